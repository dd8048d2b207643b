"""The stand-in for fast tests keeps the real server's rules (tests/sglang/test_contract.py holds that one to them)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server_contract import CONTRACT, LETHAL, dies_of
from tests.server_processes import running_server, use_fake, write_served_model
from tests.servers.conftest import Served

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(served: Served, check: Callable[[str, Path], None]) -> None:
    check(served.urls[0], served.model)


@pytest.mark.parametrize("cause", LETHAL)
def test_what_kills_the_real_server_kills_this_one(cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_served_model(tmp_path / "model")
    with running_server(model, tmp_path / "server.log", python=use_fake(monkeypatch)) as url:
        assert dies_of(url, cause)
