"""Weights of the policy into the stand-in for fast tests: every layout and way on one model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server_processes import running_server, use_fake
from tests.weight_sync_cases import (
    Served,
    test_a_server_killed_in_the_middle_of_a_broadcast_leaves_the_other_with_all_weights,
    test_a_server_that_holds_other_weights_than_those_sent_fails_the_probe,
    test_a_server_that_is_gone_is_reported_and_the_others_get_the_weights,
    test_a_server_that_loses_a_tensor_fails_the_checksums,
    test_server_outputs_equal_transformers_after_every_way_from_every_layout,
    test_wrong_names_and_shapes_are_refused_before_anything_is_sent,
    write_models,
)

__all__ = [
    "test_a_server_killed_in_the_middle_of_a_broadcast_leaves_the_other_with_all_weights",
    "test_a_server_that_holds_other_weights_than_those_sent_fails_the_probe",
    "test_a_server_that_is_gone_is_reported_and_the_others_get_the_weights",
    "test_a_server_that_loses_a_tensor_fails_the_checksums",
    "test_server_outputs_equal_transformers_after_every_way_from_every_layout",
    "test_wrong_names_and_shapes_are_refused_before_anything_is_sent",
]  # collected here, with this module's `served`

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model, others = write_models(folder, "qwen2", tied=True)
    with pytest.MonkeyPatch.context() as patch:
        python = use_fake(patch)
        with running_server(model, folder / "server.log", python=python) as url:
            yield Served(url, model, others, python)
