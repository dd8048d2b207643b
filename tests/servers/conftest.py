"""Two stand-in servers of one tiny model, shared by the tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server_processes import running_server, use_fake, write_served_model


@dataclass(frozen=True)
class Served:
    """A model folder and the addresses of servers of it."""

    model: Path
    urls: list[str]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = write_served_model(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        python = use_fake(patch)
        with (
            running_server(model, folder / "one.log", python=python) as one,
            running_server(model, folder / "other.log", python=python) as other,
        ):
            yield Served(model, [one, other])
