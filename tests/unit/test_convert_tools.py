"""The conversion tools' command lines: what cannot be done is one line, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file, save_file

from megarl.policy import convert
from tests.tiny_models import write_tiny_model

TOOLS = Path(__file__).parents[2] / "tools"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TO_MEGATRON = tool("convert_hf_to_megatron").main
TO_HF = tool("convert_megatron_to_hf").main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tied=False, layers=2)


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Path:
    out = model.with_name("converted")
    TO_MEGATRON(["--hf", str(model), "--out", str(out)])
    return out


def refused(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], None], *arguments: str | Path) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert stopped.value.code == 2 and told.startswith("megarl: error: ")
    return told


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tensor-parallel", "0", "must be at least 1"),
        ("--pipeline-parallel", "-1", "must be at least 1"),
        ("--tensor-parallel", "3", "parallel.tensor = 3 does not divide the model's 4 attention heads"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    assert message in refused(capsys, TO_MEGATRON, "--hf", model, "--out", tmp_path / "out", option, value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "1e300"])
def test_shard_sizes_that_are_none_are_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    told = refused(capsys, TO_HF, "--checkpoint", checkpoint, "--out", tmp_path / "out", "--shard-size", size)
    assert "--shard-size" in told and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_place_that_cannot_be_written_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: str
) -> None:
    (tmp_path / "file").write_text("")
    told = refused(capsys, TO_MEGATRON, "--hf", model, "--out", tmp_path / "file" / "out", "--tensor-parallel", ranks)
    assert "file/out cannot be written: Not a directory" in told
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    told = refused(capsys, TO_MEGATRON, "--hf", model, "--out", tmp_path / "link", "--tensor-parallel", ranks)
    assert "link already exists" in told
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_link_to_nowhere_is_in_the_way_of_an_hf_folder_too(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "already exists" in refused(capsys, TO_HF, "--checkpoint", checkpoint, "--out", tmp_path / "link")
    assert os.listdir(tmp_path) == ["link"]


def test_a_disk_too_small_is_told_before_the_work(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage)
    assert "0 MiB are free" in refused(capsys, TO_MEGATRON, "--hf", model, "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["1", "2"])
def test_a_disk_that_fills_up_leaves_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert.files, "record_files" if failing == "1" else "publish", full)
    told = refused(capsys, TO_MEGATRON, "--hf", model, "--out", tmp_path / "out")
    assert told.endswith("out cannot be written: No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_weights_are_checked_before_a_model_of_the_config_s_size_is_made(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(model, tmp_path / "model")
    config = (source / "config.json").read_text()
    assert '"vocab_size": 500' in config
    (source / "config.json").write_text(config.replace('"vocab_size": 500', '"vocab_size": 1000000000'))
    told = refused(capsys, TO_MEGATRON, "--hf", source, "--out", tmp_path / "out")
    assert "lm_head.weight has shape (500, 64), not (1000000000, 64)" in told
    assert not (tmp_path / "out.part").exists()


def test_the_way_back_may_lie_inside_the_checkpoint(model: Path, checkpoint: Path) -> None:
    out = checkpoint / "back"
    TO_HF(["--checkpoint", str(checkpoint), "--out", str(out)])
    TO_HF(["--checkpoint", str(checkpoint), "--out", str(checkpoint / "again")])
    first, second = (load_file(folder / "model.safetensors") for folder in (model, out))
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def test_a_tied_weight_stored_twice_comes_back_once(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", "qwen2", tied=True, layers=2)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, source / "model.safetensors")
    TO_MEGATRON(["--hf", str(source), "--out", str(tmp_path / "converted")])
    TO_HF(["--checkpoint", str(tmp_path / "converted"), "--out", str(tmp_path / "back")])
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys() and all(back[name].equal(tensors[name]) for name in tensors)


def one_byte_flipped(file: Path, place: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 0x10
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights in the middle": (lambda folder: one_byte_flipped(folder / "__0_0.distcp", 0.5), "not as it was written"),
    "weights at the beginning": (lambda folder: one_byte_flipped(folder / "__0_0.distcp", 0), "not as it was written"),
    "weights cut short": (lambda folder: os.truncate(folder / "__0_0.distcp", 1000), "has 1000 bytes"),
    "weights gone": (lambda folder: (folder / "__0_0.distcp").unlink(), "is missing"),
    "table of tensors": (lambda folder: one_byte_flipped(folder / ".metadata", 0.5), "not as it was written"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_and_leaves_no_hf_folder(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    damage, message = DAMAGE[kind]
    shutil.copytree(checkpoint, tmp_path / "damaged")
    damage(tmp_path / "damaged")
    told = refused(capsys, TO_HF, "--checkpoint", tmp_path / "damaged", "--out", tmp_path / "out")
    assert "is damaged: " in told and message in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


def test_an_interruption_is_not_taken_for_damage_and_waits_for_no_further_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [f"many_{number}.distcp" for number in range(3000)]
    checked: list[str] = []

    def damaged(folder: Path, records: object, names: Iterable[str]) -> list[str]:
        for name in names:
            if name in many:
                checked.append(name)
                time.sleep(0.05)
        return list(checked)

    def interrupt(done: int, total: int) -> None:
        while not checked:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(convert.files, "file_problems", damaged)
    monkeypatch.setattr(convert, "_weight_files", lambda manifest: many)
    with pytest.raises(KeyboardInterrupt):
        convert.megatron_to_hf(checkpoint, tmp_path / "out", progress=interrupt)
    assert len(checked) < len(many) and not list(tmp_path.iterdir())
