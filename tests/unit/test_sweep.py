"""Sweeps: which members a file names, their configs, their states and their launch scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megarl.config import save_config
from megarl.errors import UserError
from megarl.report.run import MEMBER_FILE
from megarl.sweep import local
from megarl.sweep.collect import coefficient_rows, collect, write_coefficients, write_law_csv
from megarl.sweep.config import Member, SweepConfig, filled, load_sweep, members_of, merged
from megarl.sweep.local import StopSweepError, run_sweep
from megarl.sweep.members import has_checkpoint, last_step, non_embedding_parameters, other_config, state_of
from megarl.sweep.scripts import launch_command, write_scripts
from tests.report_runs import write_run
from tests.tiny_models import write_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples" / "scaling_law"


def sweep_tree(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "seeds": [1, 2],
        "base": {
            "loop": {"steps": 80, "save_hf": False},
            "data": {"files": ["{folder}/train.parquet"]},
            "evaluation": {"sets": [{"name": "sums", "files": ["e.parquet"]}]},
        },
        "sizes": [
            {"name": "small", "model": "{folder}/small", "parameters": 1e5},
            {"name": "large", "model": "{folder}/large", "parameters": 1e6, "processes": 4,
             "config": {"loop": {"prompts_per_step": 64}, "parallel": {"tensor": 2}}},
        ],
        "algorithms": [
            {"name": "grpo", "config": {"objective": {"advantage": "grpo"}}},
            {"name": "clip_cov", "seeds": [7], "sizes": ["large"], "config": {"objective": {"loss": "clip_cov"}}},
        ],
    } | changes  # fmt: skip


def loaded(folder: Path, **changes: Any) -> SweepConfig:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep_tree(folder / "out", **changes)))
    return load_sweep(path)


def write_member_run(member: Member, **settings: Any) -> None:
    write_run(member.folder, **settings)
    save_config(member.config, member.folder / "config.yaml")


def test_members_are_sizes_times_algorithms_times_seeds(tmp_path: Path) -> None:
    members = members_of(loaded(tmp_path))
    assert [member.name for member in members] == [
        "small_grpo_seed1", "large_grpo_seed1", "large_clip_cov_seed7", "small_grpo_seed2", "large_grpo_seed2",
    ]  # fmt: skip
    large = members[2].config
    assert large.run.seed == 7 and large.run.folder == str(tmp_path / "out" / "runs" / "large_clip_cov_seed7")
    assert large.objective.loss == "clip_cov" and large.loop.prompts_per_step == 64 and large.loop.steps == 80
    assert large.model.path == f"{tmp_path}/out/large" and large.data.files == [f"{tmp_path}/out/train.parquet"]
    assert members[0].config.loop.prompts_per_step == 256


def test_merging_keeps_both_trees() -> None:
    under, over = {"a": {"x": 1, "y": [1, 2]}, "b": 2}, {"a": {"y": [3]}, "c": 3}
    assert merged(under, over) == {"a": {"x": 1, "y": [3]}, "b": 2, "c": 3}
    assert under == {"a": {"x": 1, "y": [1, 2]}, "b": 2}
    assert filled({"a": ["{folder}/x", "{other}", 3]}, folder="f") == {"a": ["f/x", "{other}", 3]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": [1]}, "unknown key seed; allowed here: folder, seeds"),
        ({"seeds": []}, "seeds"),
        ({"sizes": [{"name": "x", "model": "m"}] * 2}, "two sizes have the same name"),
        ({"algorithms": [{"name": "grpo", "sizes": ["huge"]}]}, "no size 'huge' in"),
        ({"base": {"loop": {"steps": 0}, "data": {"files": ["x"]}}}, "member small_grpo_seed1: loop.steps = 0"),
        ({"base": {"run": {"seed": 3}, "loop": {"steps": 1}}}, "run.seed is set by the sweep"),
        ({"base": {"run": 5, "loop": {"steps": 1}}}, "member small_grpo_seed1: run = 5 must be a section"),
        ({"seeds": [1, 1]}, "two members have the name small_grpo_seed1: .* list no seed twice"),
        (
            {
                "sizes": [{"name": "a_b", "model": "m"}, {"name": "a", "model": "m"}],
                "algorithms": [{"name": "c"}, {"name": "b_c"}],
            },
            "two members have the name a_b_c_seed1",
        ),
        ({"prepare": ["echo 'a"]}, 'prepare.0 = "echo \'a": .*is no command: No closing quotation'),
        ({"prepare": [" "]}, "is an empty command"),
        ({"sizes": [{"name": "x", "model": "m", "parameters": float("inf")}]}, "parameters = inf"),
        (
            {"base": {"loop": {"steps": 1, "stepz": 1}, "data": {"files": ["x"]}}},
            "small_grpo_seed1: unknown key loop.stepz",
        ),
    ],
)
def test_bad_sweeps_are_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        members_of(loaded(tmp_path, **changes))
    assert "\n" not in str(refused.value)


def test_states_follow_what_a_run_leaves(tmp_path: Path) -> None:
    member = members_of(loaded(tmp_path))[0]
    assert state_of(member) == "new"
    write_run(member.folder, steps=40)
    assert state_of(member) == "unfinished" and last_step(member.folder) == 40
    with (member.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 80}) + '\n{"step": 8')  # the crash came in the middle of a line
    assert state_of(member) == "finished" and last_step(member.folder) == 80


def test_a_finished_member_has_its_final_model_where_one_is_wanted(tmp_path: Path) -> None:
    tree = sweep_tree(tmp_path / "out")["base"] | {"loop": {"steps": 80, "save_hf": True}}
    member = members_of(loaded(tmp_path, base=tree))[0]
    write_run(member.folder, steps=80)
    assert state_of(member) == "unfinished"
    (member.folder / "final_hf").mkdir()
    (member.folder / "final_hf" / "config.json").write_text("{}")
    assert state_of(member) == "finished"


def test_parameters_are_counted_without_embeddings(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_tiny_model(tmp_path, "qwen2", tied=False, layers=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name and "lm_head" not in name)
    assert non_embedding_parameters(tmp_path) == expected
    with pytest.raises(UserError, match="no safetensors weights"):
        non_embedding_parameters(tmp_path / "absent")


def test_launch_scripts_name_every_member(tmp_path: Path) -> None:
    sweep = loaded(tmp_path, slurm={"partition": "h100", "setup": ["module load cuda"]})
    members = members_of(sweep)
    scripts = write_scripts(sweep, tmp_path / "sweep.yaml", members)
    assert [path.name for path in scripts] == ["run_all.sh", "small.sbatch", "large.sbatch"]
    for path in scripts:
        assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0, path
    text = scripts[2].read_text()
    assert "--array=0-2%4" in text and "--gpus-per-node=4" in text and "--partition=h100" in text
    assert "members=(large_grpo_seed1 large_clip_cov_seed7 large_grpo_seed2)" in text and "module load cuda" in text
    assert all(member.name in scripts[0].read_text() for member in members)
    assert launch_command(members[0]) == ["python", "-m", "megarl.train", str(members[0].config_path)]
    assert launch_command(members[1])[:5] == [
        "python",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
    ]


def test_results_of_what_there_is_are_collected(tmp_path: Path) -> None:
    members = members_of(loaded(tmp_path))
    write_member_run(members[0], a=0.2, b=0.7, selects=False)
    write_member_run(members[1], a=0.3, b=0.9, steps=40, selects=False)
    collected = collect(loaded(tmp_path), members)
    assert collected.missing == {
        "large_grpo_seed1": "is unfinished; what it has recorded is included",
        **dict.fromkeys(("large_clip_cov_seed7", "small_grpo_seed2", "large_grpo_seed2"), "has not started"),
    }
    assert yaml.safe_load((members[0].folder / MEMBER_FILE).read_text())["parameters"] == 1e5
    rows = coefficient_rows(collected)
    assert [row["run"] for row in rows] == ["small_grpo_seed1", "large_grpo_seed1"]
    assert rows[0]["a"] == pytest.approx(0.2, abs=0.02) and rows[0]["a_low"] < 0.2 < rows[0]["a_high"]
    assert rows[0]["holds"] is True and rows[0]["forecast_rmse"] < 0.05
    write_law_csv(collected, tmp_path / "law.csv")
    lines = (tmp_path / "law.csv").read_text().splitlines()
    assert len(lines) == 1 + 41 + 21 and lines[1].startswith("small_grpo_seed1,small,grpo,1,100000,")
    write_coefficients(rows, tmp_path / "coefficients.csv")
    assert len((tmp_path / "coefficients.csv").read_text().splitlines()) == 3


def test_results_of_another_config_are_not_taken_for_the_sweep_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = members_of(loaded(tmp_path))[:1]
    write_member_run(members[0], selects=False)
    tree = sweep_tree(tmp_path / "out")["base"] | {"optimizer": {"learning_rate": 1e-3}}
    changed = loaded(tmp_path, base=tree)
    member = members_of(changed)[0]
    assert other_config(members[0]) is None
    told = "was run with another config: optimizer.learning_rate = 1e-06 became 0.001; set it back, or remove"
    assert (other_config(member) or "").startswith(told)
    assert told in collect(changed, [member]).missing[member.name]
    assert run_sweep(changed, [member]) == [member.name]
    assert f"{member.name}: FAILED, {told}" in capsys.readouterr().out
    assert run_sweep(loaded(tmp_path), members) == []


def test_a_save_that_was_cut_short_is_no_checkpoint(tmp_path: Path) -> None:
    member = members_of(loaded(tmp_path))[0]
    (member.folder / "checkpoints" / "step_000020.part").mkdir(parents=True)
    (member.folder / "checkpoints" / "step_000010.damaged").mkdir()
    assert not has_checkpoint(member)
    (member.folder / "checkpoints" / "step_000020").mkdir()
    assert has_checkpoint(member)


STUBBORN = "trap 'echo asked >> {log}' TERM; echo $$ >> {log}; while true; do sleep 0.1; done"


@pytest.mark.parametrize("signals", [1, 2])
def test_no_member_outlives_a_stopped_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: int) -> None:
    """Its members are asked to end, and killed when they do not in time, or when a second signal comes."""
    log = tmp_path / "log"
    later = [0.0]  # seconds by which the sweep's clock is ahead
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0], sleep=time.sleep, strftime=time.strftime)
    monkeypatch.setattr(local, "time", clock)
    monkeypatch.setattr(local, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(local, "launch_command", lambda *_: ["bash", "-c", STUBBORN.format(log=log)])
    sweep = loaded(tmp_path, at_once=2)
    (tmp_path / "out").mkdir()

    def interrupt() -> None:
        while not log.is_file() or len(log.read_text().split()) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        while log.read_text().count("asked") < 2:
            time.sleep(0.02)
        if signals == 2:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            later[0] = local.STOP_SECONDS

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(StopSweepError, match="SIGTERM"):
        run_sweep(sweep, members_of(sweep)[:3])
    thread.join(timeout=60)
    words = log.read_text().split()
    members = [int(word) for word in words if word != "asked"]
    assert len(members) == 2 and words.count("asked") == 2
    assert not any(Path(f"/proc/{member}").exists() for member in members)


def test_a_stop_ends_the_preparation_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "POLL_SECONDS", 0.05)
    log = tmp_path / "log"
    sweep = loaded(tmp_path, prepare=[f"bash -c 'echo $$ > {log}; sleep 60; true'"])

    def interrupt() -> None:
        while not log.is_file() or not log.read_text().strip():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(StopSweepError, match="SIGINT"):
        run_sweep(sweep, members_of(sweep))
    assert not Path(f"/proc/{int(log.read_text())}").exists()


def test_the_cluster_preset_names_the_papers_runs() -> None:
    members = members_of(load_sweep(EXAMPLES / "cluster.yaml"))
    assert len(members) == 44 and len({member.size.name for member in members}) == 11
    for member in members:
        world = member.size.nodes * member.size.processes
        assert world % member.config.parallel.tensor == 0, member.name


def test_the_cpu_preset_has_three_sizes_and_the_wanted_seeds() -> None:
    members = members_of(load_sweep(EXAMPLES / "cpu.yaml"))
    assert len(members) == 15
    seeds = {(m.algorithm, m.seed) for m in members}
    assert seeds == {("grpo", 1), ("grpo", 2), ("rloo", 1), ("rloo", 2), ("clip_cov", 1)}
