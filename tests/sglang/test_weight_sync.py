"""Weights of the policy into the real server: every layout, way and family."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server_processes import real_python, running_server
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

pytestmark = pytest.mark.sglang
MODELS = [("qwen2", False), ("qwen2", True), ("llama", False), ("llama", True)]


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: f"{model[0]}_{'tied' if model[1] else 'untied'}")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, tied = request.param
    folder = tmp_path_factory.mktemp("served")
    model, others = write_models(folder, family, tied=tied)
    with running_server(model, folder / "server.log") as url:
        yield Served(url, model, others, real_python())
