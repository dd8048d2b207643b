"""The comparison of runs: curves read from run folders, table, picture."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megarl.errors import UserError
from megarl.law.report import comparison_picture, comparison_table, markdown_table, read_run
from megarl.law.runs import read_metrics

ROOT = Path(__file__).parents[2]


def write_run(folder: Path, final_entropy: float, *, pass_at_8: bool = True) -> Path:
    """A run folder of 13 steps that evaluates every 3rd and lies exactly on R = 1 - 0.5 exp(H)."""
    folder.mkdir()
    lines, law = [], ["step,entropy,reward"]
    for step in range(13):
        entropy = 0.4 + (final_entropy - 0.4) * step / 12
        record: dict[str, float] = {"step": step, "time": 1.0, "entropy/seq_mean": entropy, "reward/mean": 0.5}
        if step % 3 == 0:
            accuracy = 1 - 0.5 * math.exp(entropy)
            record |= {"eval/sums/accuracy": accuracy, "eval/sums/accuracy_stderr": 0.01, "eval/sums/entropy": entropy}
            if step == 12 and pass_at_8:
                record |= {"eval/sums/pass@8": 0.75, "eval/sums/pass@1": 0.5}
            law.append(f"{step},{entropy!r},{accuracy!r}")
        lines.append(json.dumps(record))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "law.csv").write_text("\n".join(law) + "\n")
    return folder


def test_curves_of_a_run_folder(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "grpo", 0.1))
    assert run.steps == list(range(13)) and run.evaluation_steps == [0, 3, 6, 9, 12]
    assert run.entropy[0] == 0.4 and run.entropy[-1] == pytest.approx(0.1)
    assert run.accuracy[-1] == pytest.approx(1 - 0.5 * math.exp(0.1)) and run.accuracy_stderr == [0.01] * 5
    assert run.pass_at_k == {8: 0.75, 1: 0.5} and run.evaluation_entropy == pytest.approx(0.1)
    fit = run.fit()
    assert fit is not None and (fit.a, fit.b) == pytest.approx((0.5, 1.0))


def test_table_compares_with_the_first_run(tmp_path: Path) -> None:
    runs = {
        "grpo": read_run(write_run(tmp_path / "grpo", 0.1)),
        "clip_cov": read_run(write_run(tmp_path / "clip_cov", 0.2, pass_at_8=False)),
    }
    grpo, clip_cov = comparison_table(runs)
    assert grpo.entropy_ratio == 1.0 and clip_cov.entropy_ratio == pytest.approx(2.0)
    assert grpo.initial_entropy == 0.4 and clip_cov.final_entropy == pytest.approx(0.2)
    assert grpo.steps == 12 and grpo.accuracy_stderr == 0.01
    assert clip_cov.law_ceiling == pytest.approx(0.5) and clip_cov.law_r2 == pytest.approx(1.0)
    text = markdown_table([grpo, clip_cov])
    assert "| H, end / grpo | 1.00 | 2.00 |" in text
    assert "| pass@8 | 0.750 | - |" in text
    assert f"| accuracy | {grpo.accuracy:.3f} ± 0.010 | {clip_cov.accuracy:.3f} ± 0.010 |" in text


def test_accuracies_of_further_sets_have_a_line_each(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "grpo", 0.1)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    cool = {"eval/sums_at_0.6/accuracy": 0.9, "eval/sums_at_0.6/accuracy_stderr": 0.02}
    lines[9] = json.dumps(json.loads(lines[9]) | cool)
    lines[12] = json.dumps(json.loads(lines[12]) | cool | {"eval/sums_at_0.6/accuracy": 0.95})
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    runs = {"grpo": read_run(folder), "clip_cov": read_run(write_run(tmp_path / "clip_cov", 0.2))}
    assert runs["grpo"].accuracy[-1] == pytest.approx(1 - 0.5 * math.exp(0.1))
    assert "| accuracy, sums_at_0.6 | 0.950 ± 0.020 | - |" in markdown_table(comparison_table(runs))


def test_a_run_whose_points_fix_no_law_is_compared_without_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "short", 0.1)
    (folder / "law.csv").write_text("step,entropy,reward\n0,0.4,0.2\n3,0.3,0.3\n")
    (row,) = comparison_table({"short": read_run(folder)})
    assert row.law_a is None and "| law a | - |" in markdown_table([row])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 0, "entropy/seq_mean": 0.5}\n', "holds no evaluation"),
        ("metrics.jsonl", '{"step": 0}\n{"step": \n', "line 2 is not JSON"),
        ("law.csv", "step,H,reward\n", "no column 'entropy'"),
    ],
)
def test_broken_run_folders_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = write_run(tmp_path / "grpo", 0.1)
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=message):
        read_run(folder)


def test_missing_folders_and_sets_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a run folder is expected"):
        read_run(tmp_path / "absent")
    with pytest.raises(UserError, match="no evaluation set 'gsm8k'; its sets: sums"):
        read_run(write_run(tmp_path / "grpo", 0.1), evaluation_set="gsm8k")


def quickstart_compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", ROOT / "examples" / "quickstart" / "compare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module
    spec.loader.exec_module(module)
    return module


def test_compare_writes_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image", reason="matplotlib (extra `report`) is not installed")
    runs = [write_run(tmp_path / "grpo", 0.1), write_run(tmp_path / "clip_cov", 0.2)]
    quickstart_compare().main([*map(str, runs), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "clip_cov" in printed and "R = b - a exp(H)" in printed
    assert "| H, end / grpo | 1.00 | 2.00 |" in (tmp_path / "out" / "table.md").read_text()
    record = json.loads((tmp_path / "out" / "table.json").read_text())
    assert record[1]["name"] == "clip_cov" and record[1]["entropy_ratio"] == pytest.approx(2.0)
    with image.open(tmp_path / "out" / "comparison.png") as picture:
        assert picture.format == "PNG" and picture.width > 1500
        assert len(picture.convert("RGB").getcolors(maxcolors=1 << 24)) > 50  # more than an empty canvas


def test_compare_refuses_two_runs_of_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    runs = [write_run(tmp_path / "first" / "grpo", 0.1), write_run(tmp_path / "second" / "grpo", 0.2)]
    with pytest.raises(SystemExit) as stopped:
        quickstart_compare().main([*map(str, runs), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2 and "same name" in capsys.readouterr().err


def test_a_single_run_without_a_law_still_has_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra `report`) is not installed")
    folder = write_run(tmp_path / "grpo", 0.1)
    (folder / "law.csv").write_text("step,entropy,reward\n0,0.4,0.2\n3,0.3,0.3\n")
    comparison_picture({"grpo": read_run(folder)}, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000


def test_a_record_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "x": 1}\n{"step": 1, "x": 2}\n{"step": 2, "x')
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1]
    path.write_bytes(b'{"step": 0, "x": 1}\n\xff\x00\n{"step": 2, "x": 2}\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        read_metrics(tmp_path)
