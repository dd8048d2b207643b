"""A dry run: shards that tile a checkpoint, groups that cut the world, bytes as the plan's arithmetic has them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import RunConfig
from megarl.dry_run import dry_run, main
from megarl.errors import UserError
from megarl.plan.memory import states_of
from megarl.policy.dry_run import Place, check_groups, check_tiling, rank_place
from megarl.policy.dry_run.tiling import RankShards, Region
from megarl.policy.model import read_model_shape
from megarl.policy.parallel import ParallelConfig
from tests.tiny_models import FAMILIES


def model_folder(folder: Path, family: str, *, tied: bool, **sizes: Any) -> Path:
    """A folder with nothing but a config.json. Head widths and vocabulary are no multiple of Megatron's paddings."""
    own = {
        "architectures": [FAMILIES[family].__name__.replace("Config", "ForCausalLM")], "vocab_size": 499,
        "hidden_size": 72, "intermediate_size": 104, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 20, "max_position_embeddings": 256, "tie_word_embeddings": tied,
        "sliding_window": None,
    }  # fmt: skip
    FAMILIES[family](**{**own, **sizes}).save_pretrained(folder)
    return folder


def config_of(folder: Path, **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "run": {"folder": "runs/x"}, "loop": {"steps": 1, "prompts_per_step": 8, "updates_per_step": 2},
        "model": {"path": str(folder), "vocab_padding": 8}, "data": {"files": ["x"], "max_prompt_length": 32},
        "rollout": {"max_response_length": 32, "samples_per_prompt": 8},
    }  # fmt: skip
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return RunConfig.model_validate(tree)


LAYOUTS: list[tuple[str, bool, dict[str, Any], int]] = [
    ("qwen2", False, {}, 1),
    ("qwen2", True, {"tensor": 2, "sequence": True}, 8),
    ("qwen3", True, {"tensor": 2, "pipeline": 2}, 12),
    ("qwen3", False, {"pipeline": 2, "virtual_pipeline": 2}, 6),
    ("llama", True, {"tensor": 4, "pipeline": 2, "context": 3}, 24),
    ("mistral", False, {"context": 2}, 6),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "tied", "parallel", "world"), LAYOUTS)
def test_every_rank_holds_what_the_plan_says(
    tmp_path: Path, family: str, tied: bool, parallel: dict[str, Any], world: int, dtype: str
) -> None:
    """Parameters, weights, gradients, master weights and moments to the byte, for every rank of the job."""
    folder = model_folder(tmp_path / "model", family, tied=tied)
    config = config_of(folder, parallel=parallel, precision={"dtype": dtype})
    shape = read_model_shape(folder)
    seen = dry_run(config, "x.yaml", world, every=True)
    assert len(seen.ranks) == world
    for rank in seen.ranks:
        at = rank.place.coordinates
        shard = rank.place.groups["data_context"].index(rank.place.rank)
        data = len(rank.place.groups["data"])
        states = states_of(config, shape, data, at["pipeline"], shard)
        counted = rank.memory
        assert states.parameters == rank.shards.parameters
        assert (states.weights, states.gradients) == (counted.weights, counted.gradients)
        assert (states.master_weights, states.moments) == (counted.master_weights, counted.moments)


def test_an_optimizer_that_is_not_sharded_is_held_whole(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "qwen2", tied=False)
    config = config_of(folder, optimizer={"distributed": False}, precision={"dtype": "bfloat16"})
    (rank,) = dry_run(config, "x.yaml", 4, only=3).ranks
    assert rank.memory.master_weights == 4 * rank.shards.parameters
    assert rank.memory == replace(rank.memory, moments=8 * rank.shards.parameters)
    states = states_of(config, read_model_shape(folder), 4, 0, 3)
    assert states.total == rank.memory.total


def whole(name: str, size: tuple[int, ...]) -> Region:
    return Region(name, tuple((0, extent) for extent in size), replicated=len(size) == 1)


def test_a_gap_an_overlap_and_a_missing_tensor_are_found(tmp_path: Path) -> None:
    from megarl.policy.hf_weights import expected_tensors

    shape = read_model_shape(model_folder(tmp_path / "model", "llama", tied=False))
    sizes = expected_tensors(shape)
    regions = [whole(name, size) for name, size in sizes.items()]
    assert check_tiling([RankShards(0, 0, regions)], shape, 1) == sum(math.prod(size) for size in sizes.values())
    place = next(i for i, region in enumerate(regions) if region.name.endswith("3.mlp.up_proj.weight"))
    rows, columns = sizes[regions[place].name]
    upper = Region(regions[place].name, ((0, rows // 2), (0, columns)), False)
    lower = Region(regions[place].name, ((rows // 2, rows), (0, columns)), False)
    later = Region(regions[place].name, ((rows // 2 - 1, rows), (0, columns)), False)
    others = regions[:place] + regions[place + 1 :]

    def problem(*changed: Region) -> str:
        with pytest.raises(UserError) as refused:
            check_tiling([RankShards(0, 0, [*others, *changed])], shape, 1)
        return str(refused.value)

    check_tiling([RankShards(0, 0, [*others, upper, lower])], shape, 1)
    assert "has elements in two shards" in problem(upper, later)
    assert f"has {rows // 2 * columns} of its {rows * columns} elements" in problem(upper)
    assert "is held by pipeline stages [], not by 1" in problem()
    with pytest.raises(UserError, match="pipeline stages \\[0, 1\\]"):
        check_tiling([RankShards(0, 0, regions), RankShards(0, 1, [lower])], shape, 1)
    with pytest.raises(UserError, match="is not whole on each of the 2 tensor ranks"):
        check_tiling([RankShards(0, 0, regions)], shape, 2)


def test_groups_that_disagree_are_found() -> None:
    parallel = ParallelConfig(tensor=2, pipeline=2, context=2)
    places = [rank_place(rank, 16, parallel) for rank in range(16)]
    sizes = {"tensor": 2, "pipeline": 2, "context": 2, "data": 2}
    check_groups(places, sizes)
    assert [place.coordinates["tensor"] for place in places] == [0, 1] * 8

    def problem(changed: Place) -> str:
        with pytest.raises(UserError) as refused:
            check_groups([*places[:5], changed, *places[6:]], sizes)
        return str(refused.value)

    groups = places[5].groups
    assert "tensor groups" in problem(replace(places[5], groups=groups | {"tensor": (5, 6)}))
    moved = places[5].coordinates | {"data": 1 - places[5].coordinates["data"]}
    assert "rank 5 is not at its place" in problem(replace(places[5], coordinates=moved))


@pytest.mark.parametrize(
    ("parallel", "world", "message"),
    [
        ({"tensor": 3}, 6, "parallel.tensor = 3 does not divide the model's 4 attention heads"),
        ({"tensor": 2}, 5, "= 2 does not divide the world size 5"),
        ({"pipeline": 3}, 6, "does not divide the model's 4 layers"),
        ({}, 64, "an update has 4 x 8 = 32 sequences for 64 data-parallel ranks"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parallel: dict[str, Any], world: int, message: str
) -> None:
    from megarl import train

    config = config_of(model_folder(tmp_path / "model", "qwen2", tied=False), parallel=parallel)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with pytest.raises(SystemExit) as stopped:
        train.main([str(file), "--dry-run", "--world-size", str(world)])
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and message in printed and printed.count("\n") == 1


def test_one_rank_and_every_rank_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    from megarl import train

    with pytest.raises(SystemExit) as stopped:
        train.main(["run.yaml", "--dry-run", "--world-size", "4", "--rank", "1", "--every-rank"])
    assert stopped.value.code == 2 and "not allowed with argument" in capsys.readouterr().err


def test_weight_files_that_are_there_are_checked(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from tests.tiny_models import write_tiny_model

    folder = write_tiny_model(tmp_path / "model", "qwen2", tied=False)
    config = config_of(folder)
    assert dry_run(config, "x.yaml", 1).weights_checked
    import torch

    save_file({"model.norm.weight": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"weights do not fit config\.json: missing"):
        dry_run(config, "x.yaml", 1)


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(model_folder(tmp_path / "model", "qwen3", tied=True), parallel={"tensor": 2})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    main([str(file), "--dry-run", "--world-size", "4", "--json", "loop.steps=3"])
    printed = capsys.readouterr().out
    record = json.loads(printed)
    assert printed.count("\n") == 1 and record["replicas"] == 2
    # One rank of each kind; each holds padding: 499 tokens become 512, of which the second rank has 13 unused rows.
    assert [(rank["tensor"], rank["padding"]) for rank in record["ranks"]] == [(0, 0), (1, 13 * 72)]
