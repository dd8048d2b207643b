"""The `megarl` command: what it prints and how it fails."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import megarl
from megarl.cli import main

ROWS = [(0, 0.8), (10, 0.6), (20, 0.5), (30, 0.3), (40, 0.2)]


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    """law.csv of a run exactly on R = 0.9 - 0.3 exp(H), rows out of order, one without a reward."""
    lines = [f"{step},{entropy},{0.9 - 0.3 * math.exp(entropy)!r}" for step, entropy in reversed(ROWS)]
    path = tmp_path / "law.csv"
    path.write_text("\n".join(["step,entropy,reward", *lines, "50,0.1,"]) + "\n")
    return path


def fit_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    main(["law", "fit", *arguments, "--json"])
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


def test_law_fit_prints_one_json_object(curve: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = fit_json(capsys, str(curve))
    assert (record["a"], record["b"], record["ceiling"]) == pytest.approx((0.3, 0.9, 0.6))
    assert record["points"] == 5 and record["skipped_rows"] == 1 and record["forecast"] is None
    assert record["intervals"]["ceiling"] == pytest.approx([0.6, 0.6])
    assert record["warnings"] == []


def test_law_fit_forecasts_the_later_points(curve: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_steps = fit_json(capsys, str(curve), "--fit-steps", "20")
    by_fraction = fit_json(capsys, str(curve), "--fit-fraction", "0.6")
    assert by_steps == by_fraction
    assert by_steps["points"] == 3 and by_steps["forecast"]["later_points"] == 2
    assert by_steps["forecast"]["rmse"] == pytest.approx(0.0, abs=1e-12)
    assert by_steps["forecast"]["final_actual"] == pytest.approx(0.9 - 0.3 * math.exp(0.2))


def test_law_fit_prints_a_table_for_people(curve: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["law", "fit", str(curve), "--fit-steps", "20"])
    printed = capsys.readouterr().out
    assert "ceiling b - a" in printed and "0.6000" in printed and "Forecast of 2 later points" in printed


def test_other_column_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.csv"
    path.write_text("H,acc\n0.0,0.9\n0.6931471805599453,0.5\n1.0986122886681098,0.4\n")
    assert fit_json(capsys, str(path), "--entropy", "H", "--reward", "acc")["ceiling"] == pytest.approx(0.85)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("", [], "is empty"),
        ("step,entropy,reward\n0,0.5,0.1\n", [], "at least 3 points, got 1"),
        ("step,H,reward\n0,0.5,0.1\n", [], "has no column 'entropy' (set --entropy); its columns: step, H, reward"),
        ("step,entropy,reward\n0,0.5,0.1\n1,x,0.2\n", [], "line 3: column 'entropy' holds 'x'"),
        ("step,entropy,reward\n0,0.5,0.1\n0,0.4,0.2\n", [], "step 0 occurs more than once"),
        ("entropy,reward\n.5,.1\n.4,.2\n.3,.3\n.2,.4\n", ["--fit-steps", "2"], "needs a step column"),
        ("entropy,reward\n.5,.1\n.4,.2\n.3,.3\n.2,.4\n", ["--fit-fraction", "1.5"], "must be greater than 0 and less"),
        ("entropy,reward\n.5,.1\n.4,.2\n.3,nan\n.2,.4\n", [], "reward of point 2"),
    ],
)
def test_bad_files_end_with_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, arguments: list[str], message: str
) -> None:
    path = tmp_path / "points.csv"
    path.write_text(content)
    with pytest.raises(SystemExit) as stopped:
        main(["law", "fit", str(path), *arguments])
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_missing_file_and_a_binary_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = tmp_path / "points.parquet"
    binary.write_bytes(b"PAR1\xff\xfe\x00\x81")
    for path, message in ((tmp_path / "absent.csv", "does not exist"), (binary, "not a CSV text file")):
        with pytest.raises(SystemExit) as stopped:
            main(["law", "fit", str(path)])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"megarl {megarl.__version__}\n"
