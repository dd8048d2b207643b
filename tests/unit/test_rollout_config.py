"""Rollout settings that cannot work are refused by key, before a server is started."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megarl.rollout.config import RolloutConfig


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"server_args": ["--port", "3000"]}, "--port is given by the run; allowed instead: rollout.port"),
        ({"server_args": ["--mem-fraction-static", "0.5", "--tp-size=2"]}, "allowed instead: rollout.server_tensor"),
        ({"server_args": ["--served-model-name=x"]}, "--served-model-name is given by the run"),
        ({"sync": "ipc", "placement": "separate"}, "with placement = separate: group, http, disk"),
        ({"sync": "ipc", "urls": ["http://there:30000"]}, "with rollout.urls: group, http, disk"),
        ({"urls": ["there:30000"]}, "must begin with http"),
        ({"urls": ["http://there:1", "http://there:1/"]}, "must differ"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        RolloutConfig(engine="sglang", **settings)


def test_other_arguments_and_ways_are_taken() -> None:
    config = RolloutConfig(engine="sglang", server_args=["--mem-fraction-static", "0.5", "--trust-remote-code"])
    assert config.server_args[-1] == "--trust-remote-code"
    assert RolloutConfig(engine="sglang", sync="ipc").placement == "colocated"
