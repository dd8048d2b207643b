"""Checkpoint folders: whole or absent, damage found, the right ones kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.policy.checkpoint import files
from megarl.policy.checkpoint.files import DamagedCheckpoint, Manifest


def write_checkpoint(root: Path, step: int) -> Path:
    folder = files.step_folder(root, step)
    part = files.begin(folder)
    (part / "__0_0.distcp").write_bytes(bytes(range(256)) * 40)
    (part / "hf").mkdir()
    (part / "hf" / "config.json").write_text("{}")
    manifest = Manifest(
        kind="train",
        step=step,
        model={"layers": 2},
        config={"run": {"seed": 1}},
        parallel={"tensor": 1},
        run_state={"step": step, "law_points": [[0.1234567890123, 0.5]]},
        training_state={"optimizer_steps": 2 * step},
        versions=files.versions(),
        files=files.record_files(part, files.unrecorded(part, {})),
    )
    files.publish(folder, manifest)
    return folder


def problems_of(folder: Path) -> list[str]:
    try:
        manifest = files.read_manifest(folder)
    except DamagedCheckpoint as error:
        return [str(error)]
    return files.file_problems(folder, manifest.files, sorted(manifest.files))


def test_a_published_checkpoint_is_sound_and_reads_back(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_000004"]
    assert problems_of(folder) == []
    manifest = files.read_manifest(folder)
    assert set(manifest.files) == {"__0_0.distcp", "hf/config.json"}
    assert manifest.run_state["law_points"] == [[0.1234567890123, 0.5]]
    assert manifest.created


def flip_bytes(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[5000:5064] = bytes(255 - byte for byte in content[5000:5064])
    path.write_bytes(content)


DAMAGE = {
    "truncated": (lambda folder: (folder / "__0_0.distcp").write_bytes(b"short"), ["__0_0.distcp", "5 bytes", "10240"]),
    "missing": (lambda folder: (folder / "__0_0.distcp").unlink(), ["__0_0.distcp", "missing"]),
    "flipped": (flip_bytes, ["__0_0.distcp", "checksum"]),
    "side file": (lambda folder: (folder / "hf" / "config.json").write_text("[]"), ["hf/config.json", "checksum"]),
    "empty manifest": (lambda folder: (folder / "manifest.json").write_text(""), ["manifest.json", "cannot be read"]),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), ["manifest.json", "missing"]),
    "altered manifest": (
        lambda folder: (folder / "manifest.json").write_text(
            (folder / "manifest.json").read_text().replace('"optimizer_steps": 8', '"optimizer_steps": 9')
        ),
        ["manifest.json", "checksum"],
    ),
    "other format": (
        lambda folder: (folder / "manifest.json").write_text(json.dumps({"format": 99})),
        ["manifest.json"],
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_named(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(tmp_path, 4)
    damage, expected = DAMAGE[kind]
    damage(folder)
    (problem,) = problems_of(folder)
    for part in expected:
        assert part in problem, problem


def test_an_interrupted_save_is_no_checkpoint_and_is_cleared_away(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)
    (files.begin(files.step_folder(tmp_path, 6)) / "__0_0.distcp").write_bytes(b"half")
    assert files.saved_steps(tmp_path) == [4]
    files.remove_leftovers(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_000004"]


def test_publishing_over_a_checkpoint_sets_the_old_one_aside(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    flip_bytes(folder)
    write_checkpoint(tmp_path, 4)
    assert problems_of(folder) == []
    assert problems_of(folder.with_name("step_000004.damaged")) != []


def test_the_last_ones_and_every_mth_are_kept() -> None:
    steps = [2, 4, 6, 8, 10, 12]
    assert files.surplus_steps(steps, keep_last=2, keep_every=None) == [2, 4, 6, 8]
    assert files.surplus_steps(steps, keep_last=1, keep_every=4) == [2, 6, 10]
    assert files.surplus_steps(steps[:1], keep_last=3, keep_every=None) == []


def test_steps_beyond_six_digits_are_found(tmp_path: Path) -> None:
    for step in (5, 1_234_567):
        write_checkpoint(tmp_path, step)
    assert files.saved_steps(tmp_path) == [5, 1_234_567]
    files.remove_checkpoint(tmp_path, 5)
    assert files.saved_steps(tmp_path) == [1_234_567]


def test_folders_with_another_name_than_their_step_s_are_no_checkpoints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)
    (tmp_path / "step_0000007").mkdir()
    (tmp_path / "step_000008").write_text("a file")
    assert files.saved_steps(tmp_path) == [4]
