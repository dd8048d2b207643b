"""HF folders written tensor by tensor, as transformers and safetensors read them."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.errors import UserError
from megarl.policy.hf_folder import HfFolderWriter, TensorSpec, plan_shards
from megarl.policy.hf_weights import SafetensorsFolder, check_tensors, expected_tensors
from megarl.policy.model import read_model_shape
from tests.tiny_models import write_tiny_model

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
    "c": torch.full((3, 1), 65504.0, dtype=torch.float16),
    "d": torch.tensor(3.0),
}


def side_files(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float16", "vocab_size": 5}))
    (folder / "generation_config.json").write_text('{"top_k": 3}')
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "model.safetensors").write_bytes(b"not to be copied")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def write(folder: Path, source: Path, shard_bytes: int) -> None:
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}
    with HfFolderWriter(folder, specs, source, dtype="float32", shard_bytes=shard_bytes) as writer:
        for name in reversed(TENSORS):
            writer.write(name, TENSORS[name])


@pytest.mark.parametrize(("shard_bytes", "count"), [(1 << 20, 1), (26, 2)])
def test_tensors_come_back_bit_for_bit_from_one_or_several_files(tmp_path: Path, shard_bytes: int, count: int) -> None:
    folder = tmp_path / "out"
    write(folder, side_files(tmp_path / "source"), shard_bytes)
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert len(list(folder.glob("*.safetensors"))) == count
    reader = SafetensorsFolder(folder)
    assert reader.names() == set(TENSORS)
    assert torch.equal(reader.read("a", slice(0, 1), slice(1, 3)), TENSORS["a"][:1, 1:])
    if count > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 24 + 6 + 6 + 4
    config = json.loads((folder / "config.json").read_text())
    assert config == {"torch_dtype": "float32", "vocab_size": 5}
    assert (folder / "generation_config.json").is_file() and (folder / "chat_template.jinja").is_file()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "source"]


def test_a_tensor_that_never_came_leaves_no_folder(tmp_path: Path) -> None:
    specs = {"a": TensorSpec((2, 3), torch.float32), "b": TensorSpec((1,), torch.float32)}
    with (
        pytest.raises(ValueError, match="b"),
        HfFolderWriter(tmp_path / "out", specs, side_files(tmp_path / "source")) as writer,
    ):
        writer.write("a", TENSORS["a"])
    assert not (tmp_path / "out").exists()


def test_files_are_cut_between_tensors() -> None:
    specs = {name: TensorSpec((size,), torch.float32) for name, size in (("a", 1), ("b", 2), ("c", 9), ("d", 1))}
    assert plan_shards(specs, 12) == [["a", "b"], ["c"], ["d"]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", "llama", tied=True, layers=2)


def rewrite(model: Path, change: dict[str, torch.Tensor | None]) -> None:
    from safetensors.torch import save_file

    tensors = load_file(model / "model.safetensors")
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({NORM: None}, f"missing {NORM}"),
        ({"model.layers.0.extra": torch.zeros(1)}, "unexpected model.layers.0.extra"),
        ({NORM: torch.zeros(3)}, f"{NORM} has shape (3,), not (64,)"),
        ({"lm_head.weight": torch.zeros(500, 64)}, "ties lm_head.weight"),
    ],
)
def test_every_tensor_is_accounted_for(model: Path, change: dict[str, torch.Tensor | None], told: str) -> None:
    rewrite(model, change)
    with pytest.raises(UserError) as refused:
        check_tensors(model, SafetensorsFolder(model), read_model_shape(model))
    assert told in str(refused.value)


def test_frequencies_and_a_repeated_tied_weight_are_no_surplus(model: Path) -> None:
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(model, {"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    shape = read_model_shape(model)
    check_tensors(model, SafetensorsFolder(model), shape)
    assert "lm_head.weight" not in expected_tensors(shape)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": "x"}', ""])
def test_an_index_that_is_none_is_named(model: Path, text: str) -> None:
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"index\.json is not an index of weight files"):
        SafetensorsFolder(model)


@pytest.mark.parametrize("name", ["5", "null", '"nowhere.safetensors"'])
def test_an_index_that_points_nowhere_names_the_file(model: Path, name: str) -> None:
    (model / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": {name}}}}}')
    with pytest.raises(UserError, match=r"weight file (5|None|nowhere\.safetensors) is missing"):
        SafetensorsFolder(model)


def test_a_lost_index_is_told_from_lost_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    with pytest.raises(UserError, match=r"1 other safetensors files are there, but no model\.safetensors\.index"):
        SafetensorsFolder(model)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": "64"}, "hidden_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 must be at least 1"),
        ({"num_key_value_heads": -2}, "num_key_value_heads = -2 must be at least 1"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
            "rope_theta = 0 of the rope parameters must be",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}},
            "factor = '2' of the rope parameters must be a positive number",
        ),
        ({"vocab_size": 0}, "vocab_size = 0 must be at least 1"),
        ({"num_hidden_layers": 0, "layer_types": []}, "num_hidden_layers = 0 must be at least 1"),
    ],
)
def test_sizes_that_are_none_are_one_line(model: Path, change: dict[str, object], told: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=told) as refused:
        read_model_shape(model)
    assert "\n" not in str(refused.value)


def test_truncated_and_pickled_weights_are_named(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        SafetensorsFolder(model)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"\.bin files"):
        SafetensorsFolder(model)


LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64, "factor": 2.0}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONGROPE}}, "rope type 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"sliding_window": 64}, "sliding_window = 64"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(model: Path, change: dict[str, object], told: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError) as refused:
        read_model_shape(model)
    assert told in str(refused.value)


def test_a_window_that_no_sequence_outgrows_is_accepted(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "sliding_window": 128}))
    assert read_model_shape(model).max_positions == 128


def test_a_folder_for_which_there_is_no_room_is_one_line_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = side_files(tmp_path / "source")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # what is buffered meets it when the file is closed
    try:
        with pytest.raises(UserError, match=r"out cannot be written: File too large"):
            write(tmp_path / "out", source, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    with pytest.raises(UserError, match=r"out: 0 MiB are needed, 0 MiB are free"):
        write(tmp_path / "out", source, 1 << 20)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
