"""The real server keeps the rules that megarl and its stand-in for fast tests are built on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server_contract import CONTRACT, LETHAL, dies_of
from tests.server_processes import running_server, write_served_model

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("served")
    model = write_served_model(folder / "model")
    with running_server(model, folder / "server.log") as url:
        yield url, model


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(served: tuple[str, Path], check: Callable[[str, Path], None]) -> None:
    check(*served)


@pytest.mark.parametrize("cause", LETHAL)
def test_what_kills_it(cause: str, tmp_path: Path) -> None:
    with running_server(write_served_model(tmp_path / "model"), tmp_path / "server.log") as url:
        assert dies_of(url, cause)
