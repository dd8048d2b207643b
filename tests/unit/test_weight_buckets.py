"""Weights in buckets of bounded size, checked against the model's own list."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megarl.data.weights import NamedTensors
from megarl.errors import UserError
from megarl.rollout.sglang.buckets import check_weights, fill_buckets
from megarl.rollout.sglang.checksums import ChecksumTally, checksum_problems, served_parameter
from megarl.rollout.sglang.weights_by_value import pickled_bucket
from megarl.rollout.sglang.weights_disk import write_hf_folder
from megarl.rollout.sglang.weights_group import address_towards

SIZES = {"a": (3, 4), "b": (5,), "c": (40, 2), "d": (2, 2), "e": (1,)}


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


def named(tensors: dict[str, torch.Tensor]) -> NamedTensors:
    return NamedTensors({name: tuple(t.shape) for name, t in tensors.items()}, lambda: iter(tensors.items()))


@pytest.mark.parametrize("budget", [1, 48, 68, 100, 10_000])
def test_buckets_hold_every_tensor_once_in_order_and_within_the_budget(budget: int) -> None:
    tensors = some_tensors()
    received: list[tuple[str, torch.Tensor]] = []
    lasts = []
    for bucket in fill_buckets(named(tensors), budget=budget):
        assert len(bucket.flat) <= budget or len(bucket.names) == 1
        received += [(name, tensor.clone()) for name, tensor in bucket.tensors()]
        lasts.append(bucket.is_last)
    assert [name for name, _ in received] == list(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in received)
    assert lasts == [False] * (len(lasts) - 1) + [True]
    assert len(lasts) == {1: 5, 48: 4, 68: 3, 100: 3, 10_000: 1}[budget]


def test_buckets_convert_and_never_mix_number_formats() -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(3, dtype=torch.bfloat16)}
    plain = [(bucket.names, bucket.dtype) for bucket in fill_buckets(named(tensors), budget=1000)]
    assert plain == [(["a"], torch.float32), (["b", "c"], torch.bfloat16)]
    (converted,) = list(fill_buckets(named(tensors), budget=1000, dtype=torch.bfloat16))
    assert converted.names == ["a", "b", "c"] and len(converted.flat) == 22


def test_what_was_not_announced_is_in_no_bucket() -> None:
    tensors = some_tensors()
    shapes = named(tensors).shapes
    wrong = [
        {**tensors, "f": torch.ones(2)},
        {**tensors, "d": torch.ones(2, 3)},
        {name: tensor for name, tensor in tensors.items() if name != "e"},
    ]
    for given in wrong:
        seen: list[str] = []
        with pytest.raises(RuntimeError, match="announced"):
            for bucket in fill_buckets(NamedTensors(shapes, lambda given=given: iter(given.items())), budget=64):
                seen += bucket.names
        assert set(seen) <= {"a", "b", "c", "d"} and "f" not in seen


def test_wrong_names_and_shapes_are_named_in_one_line() -> None:
    expected = {"a": (2, 3), "b": (4,), "c": (1,)}
    check_weights(dict(expected), expected)
    with pytest.raises(UserError) as error:
        check_weights({"a": (3, 2), "b": (4,), "x": (1,)}, expected)
    text = str(error.value)
    assert "c is missing" in text and "x is not in the model" in text and "a has shape [3, 2], the model [2, 3]" in text
    assert "nothing was sent" in text and "\n" not in text
    with pytest.raises(UserError, match="and 20 more"):
        check_weights({}, {f"w{place}": (1,) for place in range(25)})


def test_checksums_are_those_of_the_stacked_and_padded_parameters() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = {
        f"model.layers.0.self_attn.{name}_proj.weight": torch.randn(rows, 6, generator=generator)
        for name, rows in (("q", 8), ("k", 4), ("v", 4))
    }
    embedding = torch.randn(70, 6, generator=generator)
    norm = torch.randn(6, generator=generator)
    tally = ChecksumTally()
    for name, tensor in {**parts, "model.embed_tokens.weight": embedding, "model.norm.weight": norm}.items():
        tally.add(name, tensor)

    def digest(tensor: torch.Tensor) -> str:
        return hashlib.sha256(tensor.numpy().tobytes()).digest()[:8].hex()

    assert tally.checksums() == {
        "model.layers.0.self_attn.qkv_proj.weight": digest(torch.cat(list(parts.values()))),
        "model.embed_tokens.weight": digest(torch.cat([embedding, torch.zeros(58, 6)])),
        "model.norm.weight": digest(norm),
    }


def test_stacked_parts_in_another_order_are_refused() -> None:
    tally = ChecksumTally()
    with pytest.raises(RuntimeError, match="order"):
        tally.add("model.layers.0.self_attn.k_proj.bias", torch.ones(2))


def test_served_parameters_are_the_stacked_ones() -> None:
    assert served_parameter("model.layers.3.mlp.up_proj.weight") == ("model.layers.3.mlp.gate_up_proj.weight", 1)
    assert served_parameter("model.layers.3.mlp.down_proj.weight") == ("model.layers.3.mlp.down_proj.weight", 0)
    assert served_parameter("lm_head.weight") == ("lm_head.weight", 0)


def test_checksum_problems_name_what_differs_lacks_or_was_not_sent() -> None:
    assert checksum_problems({"a": "1"}, {"a": "1"}) == []
    problems = checksum_problems({"a": "1", "b": "2"}, {"a": "9", "c": "3"})
    assert problems == ["b is not among the server's parameters", "the server's c was not sent", "a differs"]


def test_a_pickled_bucket_says_where_its_tensors_lie() -> None:
    tensors = some_tensors()
    (bucket,) = list(fill_buckets(named(tensors), budget=1000))
    unpickled = pickle.loads(pickled_bucket(bucket))
    for entry in unpickled["metadata"]:
        piece = unpickled["flattened_tensor"][entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape)
        assert torch.equal(piece, tensors[entry.name]) and entry.numel == entry.end_idx - entry.start_idx


def test_the_written_folder_is_an_hf_folder_and_appears_whole(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("old weights")
    tensors = some_tensors()
    write_hf_folder(tmp_path / "versions" / "v1", fill_buckets(named(tensors), budget=68), model)
    folder = tmp_path / "versions" / "v1"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as handle:
            assert torch.equal(handle.get_tensor(name), tensors[name])
    assert (folder / "config.json").is_file() and not (folder / "model.safetensors").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["v1"]


def test_servers_on_this_machine_are_reached_by_the_loopback() -> None:
    assert address_towards(["http://127.0.0.1:30000", "http://localhost:30001"]) == "127.0.0.1"
