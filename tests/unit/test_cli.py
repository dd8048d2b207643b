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
        ("entropy,reward\n.5,.1\n.4,.2\n.3,nan\n.2,.4\n", [], "line 4: column 'reward' holds 'nan'"),
        ("entropy,reward\n.5,.1\n.5,.2\n.5,.3\n", [], "entropy is 0.5 at every point"),
        ("entropy,reward\n.5,.1\n.4,.2\n.3,.3\n", ["--group", "model"], "has no column 'model' (set --group)"),
        ("entropy,reward\n.5,.1\n.4,.2\n.3,.3\n", ["--samples", "0"], "samples is 0; it must be at least 1"),
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


def test_several_runs_are_fitted_each_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["model,step,entropy,acc_percent"]
    for model, a in (("small", 0.2), ("large", 0.3)):
        lines += [f"{model},{step},{h},{100 * (0.9 - a * math.exp(h))!r}" for step, h in ROWS]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([*lines, "empty,0,0.5,50"]) + "\n")
    arguments = [str(path), "--group", "model", "--reward", "acc_percent"]
    record = fit_json(capsys, *arguments)
    assert [(run["run"], run["reward_unit"]) for run in record["runs"]] == [("small", "percent"), ("large", "percent")]
    assert [run["a"] for run in record["runs"]] == pytest.approx([0.2, 0.3])
    assert record["not_fitted"] == [{"run": "empty", "reason": "the law needs at least 3 points, got 1"}]
    assert any(row["quantity"] == "a" and not row["shared"] for row in record["differences"])
    main(["law", "fit", *arguments])
    printed = capsys.readouterr().out
    assert "read as percent" in printed and "do not share" in printed and "empty: not fitted" in printed


def test_weights_and_a_robust_fit_are_said(curve: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = fit_json(capsys, str(curve), "--samples", "500", "--robust")
    assert record["weighted"] and record["robust"] and record["a"] == pytest.approx(0.3)


@pytest.fixture
def long_curve(tmp_path: Path) -> Path:
    lines = ["step,entropy,reward"]
    for step in range(0, 400, 10):
        h = 0.05 + 0.6 * math.exp(-((step / 60) ** 0.7))
        lines.append(f"{step},{h!r},{0.9 - 0.3 * math.exp(h) + 0.003 * math.sin(step)!r}")
    path = tmp_path / "long.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_law_forecast_from_the_first_points_alone(long_curve: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["law", "forecast", str(long_curve), "--at", "200", "390", "--backtest", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["steps"] == [200, 390] and record["last_fitted_step"] == 50
    assert record["reward_low"][1] < 0.9 - 0.3 * math.exp(0.05) < record["reward_high"][1]
    assert record["backtest"][-1]["actual"] == pytest.approx(0.9 - 0.3 * math.exp(0.05), abs=0.01)
    main(["law", "forecast", str(long_curve), "--fit-steps", "100"])
    assert "Forecast from step 100 on" in capsys.readouterr().out


def test_a_run_too_short_for_its_first_15_percent_is_told_what_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "law.csv"
    entropies = [0.6 * math.exp(-step / 8) for step in range(21)]
    lines = [f"{step},{entropy!r},{0.9 - 0.3 * math.exp(entropy)!r}" for step, entropy in enumerate(entropies)]
    path.write_text("\n".join(["step,entropy,reward", *lines]) + "\n")
    with pytest.raises(SystemExit):
        main(["law", "forecast", str(path)])
    assert "the first 0.15 of 21 points are 3; at least 5 are needed" in (told := capsys.readouterr().err)
    assert "--fit-fraction 0.24 would do" in told
    main(["law", "forecast", str(path), "--fit-fraction", "0.24"])
    printed = capsys.readouterr().out
    assert "nan" not in printed and "Too few points to tell how the entropy falls" in printed


def test_law_scale_reads_coefficients_or_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"small": 1e5, "middle": 1e6, "large": 1e7, "huge": 1e8}
    table, points = ["model,parameters,a,b"], ["run,parameters,step,entropy,reward"]
    for place, (name, parameters) in enumerate(sizes.items()):
        a, b = 0.1 + 0.05 * place, 0.5 + 0.1 * place
        table.append(f"{name},{parameters},{a},{b}")
        points += [f"{name},{parameters},{step},{h},{b - a * math.exp(h)!r}" for step, h in ROWS]
    records = []
    for name, lines in (("table.csv", table), ("points.csv", points)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        main(["law", "scale", str(tmp_path / name), "--json"])
        records.append(json.loads(capsys.readouterr().out))
    assert records[0]["lines"]["a"]["slope"] == pytest.approx(0.05 / math.log(10))
    assert records[1]["lines"]["ceiling"]["slope"] == pytest.approx(0.05 / math.log(10))
    assert records[0]["held_out"][-1]["name"] == "huge"
    assert records[0]["leave_largest_out_error"] == pytest.approx(0.0, abs=1e-9)
    main(["law", "scale", str(tmp_path / "table.csv")])
    assert "huge (largest)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model,a,b\nx,.1,.2\n", "has no column 'parameters' (set --parameters)"),
        ("parameters,a,b\n1e5,.1,.2\n1e6,x,.3\n", "line 3: column 'a' holds 'x'"),
        ("parameters,a,b\n1e5,.1,.2\n1e6,.2,.3\n", "at least 3 model sizes, got 2"),
        ("parameters,a,b,precision\n1,.1,.2,bf16\n2,.2,.3,fp32\n3,.2,.3,fp32\n", "runs of precision bf16 and fp32"),
    ],
)
def test_bad_scaling_tables_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(content)
    with pytest.raises(SystemExit) as stopped:
        main(["law", "scale", str(path)])
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and message in printed and printed.count("\n") == 1


def test_law_theory_correlates_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entropy, records = 0.8, []
    for step in range(81):
        covariance = 0.02 * math.exp(-step / 30)
        records.append(
            {"step": step, "entropy/seq_mean": entropy} | ({"covariance/group": covariance} if step < 80 else {})
        )
        entropy -= 1.5 * covariance
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    main(["law", "theory", str(tmp_path), "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["value"] == pytest.approx(1.0) and record["positive_share"] == 1.0 and record["steps"] == 80
    with pytest.raises(SystemExit) as stopped:
        main(["law", "theory", str(tmp_path / "absent")])
    assert stopped.value.code == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"megarl {megarl.__version__}\n"


SIZES = "\n".join(
    f"{name},{n},{step},{h},{b - 0.1 * math.exp(h)!r}"
    for name, n, b in (("small", 1e6, 0.3), ("middle", 1e7, 0.4), ("large", 1e8, 0.5))
    for step, h in enumerate((0.6, 0.5, 0.4, 0.3))
)


def test_sizes_are_fitted_from_points_although_one_run_is_too_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "points.csv"
    path.write_text(f"model,N,step,entropy,reward\n{SIZES}\nhuge,1e9,0,0.5,0.4\n")
    arguments = ["law", "scale", str(path), "--group", "model", "--parameters", "N"]
    main([*arguments, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert [size["name"] for size in record["sizes"]] == ["small", "middle", "large"]
    assert record["lines"]["b"]["slope"] == pytest.approx(0.1 / math.log(10))
    assert record["not_fitted"] == [{"run": "huge", "reason": "the law needs at least 3 points, got 1"}]
    main(arguments)
    assert "huge: not fitted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "content", "arguments", "message"),
    [
        ("scale", b"\xff\xfea,b", [], "not a CSV text file"),
        ("scale", b"parameters,a,a,b\n1,2,3,4\n", [], "has 2 columns 'a', of which one is meant"),
        ("scale", b"parameters,a,b\n7B,2,3\n", [], "line 2: column 'parameters' holds '7B'"),
        ("scale", b"parameters,a,b,precision\n1,2,3,bf16\n2,2,3,fp32\n", [], "runs of precision bf16 and fp32"),
        ("forecast", b"step,entropy,reward\n0,.5,\n1,.4,\n", [], "the first 0.15 of 0 points are 0; at least 5"),
        ("forecast", b"step,entropy,reward\n0,.5,.1\n1,.4,.2\n", [], "the first 0.15 of 2 points are 0; at least 5"),
    ],
)
def test_bad_tables_of_other_commands_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, content: bytes, arguments: list[str], message: str
) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        main(["law", command, str(path), *arguments])
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and message in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("step", ["nan", "inf"])
def test_a_step_that_never_comes_is_not_forecast(
    long_curve: Path, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["law", "forecast", str(long_curve), "--at", step])
    assert stopped.value.code == 2 and "must be a finite number" in capsys.readouterr().err


def test_a_narrow_terminal_cuts_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    path = tmp_path / "points.csv"
    path.write_text(f"run,N,step,entropy,reward\n{SIZES}\n")
    main(["law", "fit", str(path)])
    main(["law", "scale", str(path), "--parameters", "N"])
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "│ middle │      4 │ 0.100 ± 0.000 │ 0.400 ± 0.000 │" in printed and "│ large (largest) │" in printed


@pytest.mark.parametrize(
    "arguments", [["plan", "run.yaml", "--gpus", "8", "--gpuz", "1"], ["law", "fit", "law.csv", "loop.steps=3"]]
)
def test_arguments_that_no_command_takes_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and "unrecognized arguments: " in told and arguments[-1] in told


def test_overrides_behind_the_options_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("run: {folder: x}\nmodel: {path: y}\nloop: {steps: 1}\n")
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path / "run.yaml"), "--gpus", "8", "loop.step=3"])
    assert "loop.step" in (told := capsys.readouterr().err) and "unrecognized" not in told
