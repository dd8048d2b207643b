"""The stand-in for fast tests keeps the real server's rules (tests/sglang/test_contract.py holds that one to them)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server_contract import CONTRACT, LETHAL, dies_of
from tests.server_processes import running_server, use_fake, write_served_model

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("served")
    model = write_served_model(folder / "model")
    with (
        pytest.MonkeyPatch.context() as patch,
        running_server(model, folder / "server.log", python=use_fake(patch)) as url,
    ):
        yield url, model


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(served: tuple[str, Path], check: Callable[[str, Path], None]) -> None:
    check(*served)


@pytest.mark.parametrize("cause", LETHAL)
def test_what_kills_the_real_server_kills_this_one(cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_served_model(tmp_path / "model")
    with running_server(model, tmp_path / "server.log", python=use_fake(monkeypatch)) as url:
        assert dies_of(url, cause)
