"""Weights of the policy in every layout into a server, by every way that a CPU can run.

The same tests run against the real SGLang (`tests/sglang`) and, on one model, the stand-in (`tests/servers`): the two
modules import them and give the fixture `served`.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.data.generated import write_tokenizer
from megarl.data.weights import NamedTensors
from megarl.errors import UserError
from megarl.rollout.sglang.control import Fleet, ServerControl
from megarl.rollout.sglang.places import ServerPlace
from megarl.rollout.sglang.weights import SyncSettings, WeightSync
from megarl.rollout.sglang.weights_group import GroupSender
from tests.distributed.spawn import run_ranks
from tests.server_processes import running_process
from tests.tiny_models import write_tiny_model

WAYS = ("group", "http", "disk")
LAYOUTS = {"tp1": ({}, 1), "tp2": ({"tensor": 2}, 2), "pp2": ({"pipeline": 2}, 2)}
LAYOUTS["tp2_pp2"] = ({"tensor": 2, "pipeline": 2}, 4)
PROBE = [3 + 11 * place % 480 for place in range(40)]


@dataclass
class Served:
    """A running server of one model, and other weights for the same model."""

    url: str
    model: Path
    others: dict[str, Path]  # for each way one folder
    python: str  # of the server


def write_models(folder: Path, family: str, *, tied: bool) -> tuple[Path, dict[str, Path]]:
    """(the folder to serve, for each way the folder of the same model with other weights)."""
    model = write_tiny_model(folder / "model", family, tied=tied)
    write_tokenizer(model)
    return model, {way: disturbed(model, folder / way, seed=order) for order, way in enumerate(WAYS, start=1)}


def disturbed(model: Path, folder: Path, *, seed: int) -> Path:
    """The folder of the same model with other weights."""
    other = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    other.save_pretrained(folder)
    return folder


def settings(way: str, served: Served, **changes: Any) -> SyncSettings:
    plain = SyncSettings(
        way=way,
        bucket_bytes=60_000,  # a dozen buckets, and tensors that are larger than one
        dtype=torch.float32,
        verify="checksum",
        deadline=60.0,
        folder=served.model.parent / "versions",
        model_folder=served.model,
    )
    return replace(plain, **changes)


@torch.no_grad()
def transformers_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[tokens - 1] log-probs at temperature 1 of all tokens but the first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([token_ids])).logits[0, :-1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(token_ids)[1:, None])[:, 0]


def difference_to_transformers(url: str, folder: Path) -> float:
    """Largest |log-prob difference| over a given text and over tokens that the server samples itself."""
    control = ServerControl(url)
    given = torch.tensor(control.prompt_logprobs(PROBE)) - transformers_logprobs(folder, PROBE)
    body = {
        "input_ids": PROBE[:5],
        "sampling_params": {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    sampled = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    wanted = transformers_logprobs(folder, PROBE[:5] + answer["output_ids"])[4:]
    return max(float(given.abs().max()), float((sampled - wanted).abs().max()))


def push_from_layout(
    rank: int, world_size: int, parallel: dict[str, Any], cases: list[tuple[SyncSettings, str]], url: str
) -> list[tuple[dict[str, str], int, float, str]]:
    """For each case: failures, bytes, log-prob difference to transformers (rank 0) and the version served."""
    from megarl.policy.hf_weights import expected_tensors
    from megarl.policy.megatron import MegatronPolicy, PolicyConfig
    from megarl.policy.model import ModelConfig, read_model_shape
    from megarl.policy.parallel import ParallelConfig, initialize
    from megarl.policy.precision import PrecisionConfig

    config = ParallelConfig(**parallel)
    layout = initialize(config)
    results = []
    for number, (case, folder) in enumerate(cases):
        shape = read_model_shape(folder)
        policy = MegatronPolicy(
            folder,
            shape,
            layout,
            model=ModelConfig(path=folder),
            parallel=config,
            precision=PrecisionConfig(),
            optimizer=None,
            config=PolicyConfig(),
        )
        sync = WeightSync(case, expected_tensors(shape))
        for verify in ("probe", "checksum"):
            version = f"run-{world_size}-{number}-{verify}"
            sync._settings = replace(case, verify=verify)
            report = sync.push(policy.hf_tensors(), version, [ServerPlace(url)])
        difference = difference_to_transformers(url, Path(folder)) if rank == 0 else 0.0
        results.append((report.failed, report.bytes, difference, ServerControl(url).weight_version() == version))
        sync.close()
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_server_outputs_equal_transformers_after_every_way_from_every_layout(served: Served, layout: str) -> None:
    parallel, world_size = LAYOUTS[layout]
    cases = [(settings(way, served), str(served.others[way])) for way in WAYS]
    size = sum(p.numel() * 4 for p in transformers.AutoModelForCausalLM.from_pretrained(served.model).parameters())
    assert difference_to_transformers(served.url, served.others["http"]) > 0.1 or layout != "tp1"
    for rank, results in enumerate(run_ranks(push_from_layout, world_size, parallel, cases, served.url)):
        for way, (failed, sent, difference, is_served) in zip(WAYS, results, strict=True):
            assert failed == {}, (way, rank)
            assert difference < 1e-4, (way, rank, difference)
            assert is_served
            assert rank > 0 or sent == size


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def named(tensors: dict[str, torch.Tensor]) -> NamedTensors:
    return NamedTensors({name: tuple(t.shape) for name, t in tensors.items()}, lambda: iter(tensors.items()))


@pytest.mark.parametrize("way", WAYS)
def test_wrong_names_and_shapes_are_refused_before_anything_is_sent(served: Served, way: str) -> None:
    right = tensors_of(served.model)
    expected = named(right).shapes
    sync = WeightSync(settings(way, served), expected)
    places = [ServerPlace(served.url)]
    sync.push(named(right), "right", places)
    other = tensors_of(served.others[way])
    last = list(other)[-1]
    wrong = {
        "is not in the model": {**other, "model.layers.9.mlp.up_proj.weight": other[last]},
        "is missing": {name: tensor for name, tensor in other.items() if name != last},
        "has shape": {**other, last: other[last][:-1]},
    }
    before = ServerControl(served.url).checksums()
    for words, tensors in wrong.items():
        with pytest.raises(UserError, match=words):
            sync.push(named(tensors), "wrong", places)
        # A source that does not send what it announced is stopped before the tensor at fault.
        with pytest.raises(UserError, match="announced"):
            sync.push(NamedTensors(expected, lambda tensors=tensors: iter(tensors.items())), "wrong", places)
        sync.push(named(right), "right", places)
    assert ServerControl(served.url).checksums() == before
    assert ServerControl(served.url).weight_version() == "right"
    assert difference_to_transformers(served.url, served.model) < 1e-4
    sync.close()


def test_a_server_that_holds_other_weights_than_those_sent_fails_the_probe(served: Served) -> None:
    def score(token_ids: Sequence[int]) -> torch.Tensor:
        return transformers_logprobs(served.others["http"], list(token_ids))

    # The policy scores by other weights than the ones that reach the server.
    weights = replace(named(tensors_of(served.model)), score=score)
    sync = WeightSync(settings("http", served, verify="probe"), weights.shapes)
    report = sync.push(weights, "sent", [ServerPlace(served.url)])
    assert "a probe's log-probs differ" in report.failed[served.url]
    sync.close()


def test_a_server_that_loses_a_tensor_fails_the_checksums(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tensors_of(served.others["http"])
    sync = WeightSync(settings("http", served), named(other).shapes)
    sync.push(named(tensors_of(served.model)), "before", [ServerPlace(served.url)])
    update = ServerControl.update_weights_from_tensor
    calls: list[int] = []

    def lossy(self: ServerControl, payloads: Sequence[bytes], **options: Any) -> None:
        calls.append(len(payloads))
        if len(calls) != 3:
            update(self, payloads, **options)

    monkeypatch.setattr(ServerControl, "update_weights_from_tensor", lossy)
    report = sync.push(named(other), "lossy", [ServerPlace(served.url)])
    assert "differs" in report.failed[served.url] and "checksums" in report.failed[served.url]
    sync.close()


def test_a_server_that_is_gone_is_reported_and_the_others_get_the_weights(served: Served) -> None:
    gone = ServerPlace("http://127.0.0.1:9")
    for way in WAYS:
        other = tensors_of(served.others[way])
        sync = WeightSync(settings(way, served, deadline=20.0), named(other).shapes)
        report = sync.push(named(other), f"{way}-survivor", [gone, ServerPlace(served.url)])
        assert list(report.failed) == [gone.url], (way, report.failed)
        assert ServerControl(served.url).weight_version() == f"{way}-survivor"
        assert difference_to_transformers(served.url, served.others[way]) < 1e-4
        sync.close()


def test_a_server_killed_in_the_middle_of_a_broadcast_leaves_the_other_with_all_weights(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tensors_of(served.others["group"])
    broadcast = GroupSender._broadcast
    sent: list[int] = []
    with running_process(served.model, tmp_path / "second.log", python=served.python) as (second, process):

        def broadcast_and_kill(self: GroupSender, pool: Any, fleet: Fleet, *bucket: Any) -> Any:
            sent.append(len(fleet.servers))
            if len(sent) == 3:
                process.kill()
            return broadcast(self, pool, fleet, *bucket)

        monkeypatch.setattr(GroupSender, "_broadcast", broadcast_and_kill)
        sync = WeightSync(settings("group", served, deadline=30.0), named(other).shapes)
        report = sync.push(named(other), "survived", [ServerPlace(second), ServerPlace(served.url)])
    assert list(report.failed) == [second], (report.failed, sent)
    assert sent[:3] == [2, 2, 2] and sent[3:] == [1] * (len(sent) - 3)
    assert ServerControl(served.url).weight_version() == "survived"
    assert difference_to_transformers(served.url, served.others["group"]) < 1e-4
    sync.close()
