"""Points read from files: grouping, units, and what must not be put into one fit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megarl.errors import UserError
from megarl.law.points import Columns, read_law_points, read_law_runs, read_run_points


def written(folder: Path, text: str) -> Path:
    path = folder / "points.csv"
    path.write_text(text)
    return path


def test_a_column_run_tells_runs_apart(tmp_path: Path) -> None:
    path = written(tmp_path, "run,step,entropy,reward\nx,0,.5,.1\ny,0,.6,.2\nx,4,.4,.2\ny,4,.5,.3\nx,8,.3,\n")
    x, y = read_law_runs(path)
    assert (x.name, x.steps, x.entropy, x.reward, x.skipped) == ("x", [0, 4], [0.5, 0.4], [0.1, 0.2], 1)
    assert (y.name, y.entropy) == ("y", [0.6, 0.5])
    with pytest.raises(UserError, match="holds 2 runs"):
        read_law_points(path)


def test_several_columns_can_tell_runs_apart(tmp_path: Path) -> None:
    path = written(tmp_path, "size,method,step,entropy,reward,n\n7b,grpo,0,.5,.1,9\n7b,rloo,0,.6,.2,9\n")
    runs = read_law_runs(path, Columns(group=("size", "method"), samples="n"))
    assert [run.name for run in runs] == ["7b grpo", "7b rloo"] and runs[0].samples == [9]


def test_percent_is_told_from_fractions(tmp_path: Path) -> None:
    percent = read_law_points(written(tmp_path, "entropy,reward\n.5,10\n.4,20.5\n"))
    assert percent.reward == pytest.approx([0.1, 0.205]) and percent.reward_unit == "percent"
    fraction = read_law_points(written(tmp_path, "entropy,reward\n.5,0.1\n.4,1\n"))
    assert fraction.reward == [0.1, 1.0] and fraction.reward_unit == "fraction"
    small = read_law_points(written(tmp_path, "entropy,acc_percent\n.5,0.1\n.4,0.9\n"), reward="acc_percent")
    assert small.reward == pytest.approx([0.001, 0.009]) and small.reward_unit == "percent"
    # A percentage that climbs from nothing is no mixture.
    climbing = read_law_points(written(tmp_path, "entropy,reward\n.5,0\n.5,.4\n.4,1.5\n.3,6\n.2,40\n"))
    assert climbing.reward_unit == "percent"
    shifted = read_law_points(written(tmp_path, "entropy,reward\n.5,-3\n.4,2.5\n"))
    assert shifted.reward == [-3, 2.5]


def test_bits_become_nats_when_the_file_or_the_user_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, "entropy,entropy_unit,reward\n1,bits,.1\n2,bits,.2\n")
    assert read_law_points(path).entropy == pytest.approx([math.log(2), 2 * math.log(2)])
    path = written(tmp_path, "entropy_bits,reward\n1,.1\n2,.2\n")
    (run,) = read_law_runs(path, Columns(entropy="entropy_bits"), entropy_unit="bits")
    assert run.entropy == pytest.approx([math.log(2), 2 * math.log(2)])


SMOOTH = [0.60, 0.57, 0.54, 0.52, 0.50, 0.48, 0.46]
HALF_IN_BITS = "\n".join(f"{h / math.log(2) if i < 3 else h},{0.1 + i / 50}" for i, h in enumerate(SMOOTH))


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("entropy_bits,reward\n1,.1\n", Columns(entropy="entropy_bits"), "seems to be in bits; say --entropy-unit"),
        ("entropy,reward\n15,.1\n14,.2\n", Columns(), "reaches 15, more nats per token than a vocabulary"),
        (f"entropy,reward\n{HALF_IN_BITS}\n", Columns(), "at point 3 .* as if bits and nats were mixed"),
        ("run,entropy,entropy_unit,reward\nx,1,bits,.1\ny,1,nats,.1\n", Columns(), "holds bits, nats; it must be"),
        ("entropy,reward\n.5,.31\n.4,.33\n.3,35\n.2,36\n", Columns(), "holds 0.33 beside 36, as if fractions and perc"),
        ("run,entropy,reward\nx,.5,.3\nx,.4,.4\ny,.5,30\n", Columns(), "run y but only 0.4 in run x, as if percent"),
        ("entropy,acc_pct\n.5,300\n", Columns(reward="acc_pct"), "reaches 300, which is above 100 percent"),
        ("entropy,reward,precision\n.5,.1,bf16\n.4,.2,fp32\n", Columns(), "points of precision bf16 and fp32; keep"),
        ("entropy,reward,temperature\n.5,.1,1\n.4,.2,0.6\n", Columns(), "points of temperature 1 and 0.6; keep them"),
        ("entropy,reward\n.5,.1\nnan,.2\n", Columns(), "line 3: column 'entropy' holds 'nan'; it must be a finite"),
        ("entropy,reward\n.5,high\n", Columns(), "line 2: column 'reward' holds 'high', which is not a number"),
        ("step,entropy,reward\n0,.5,.1\n0,.4,.2\n", Columns(), "more than once; name the column .* with --group"),
        ("entropy,reward\n.5,.1\n", Columns(group=("model",)), r"no column 'model' \(set --group\)"),
        ("entropy,reward\n", Columns(), "has a header line but no points"),
        ("entropy,reward,reward\n.5,.1,.2\n", Columns(), "has 2 columns 'reward', of which one is meant; rename them"),
        ("step,step,entropy,reward\n0,1,.5,.1\n", Columns(), "has 2 columns 'step'"),
        ("entropy;reward\n0,5;0,1\n", Columns(), "separates its columns by semicolons; commas are expected"),
        ("entropy,reward\n0,5,0,1\n", Columns(), "line 2 has 4 cells for 2 columns; is a comma meant as a decimal"),
        ("entropy,reward\n0.5_1,.1\n", Columns(), "line 2: column 'entropy' holds '0.5_1', which is not a number"),
        ('entropy,reward\n".5,.1\n.4,.2\n', Columns(), "not a CSV text file"),
        ("entropy,entropy_unit,reward\n400,bits,.1\n", Columns(), "reaches 400, more bits per token than a vocab"),
        ("entropy,reward\n.5,0.4\n.4,1.1\n", Columns(), "reaches 1.1, which may be percent or a reward above 1; say"),
    ],
)
def test_what_does_not_belong_into_one_fit_is_refused(
    tmp_path: Path, text: str, columns: Columns, message: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        read_law_runs(written(tmp_path, text), columns)
    assert "\n" not in str(refused.value)


def test_what_programs_write_around_the_numbers_is_no_matter(tmp_path: Path) -> None:
    text = '\ufeffstep, "entropy" ,reward,,\r\n\r\n8,"0.3",0.4,,\r\n0, .5 ,"0.1",,\r\n\r\n4,.4,.2\r\n12\r\n'
    path = tmp_path / "points.csv"
    path.write_bytes(text.replace('"entropy" ', "entropy ").encode())
    points = read_law_points(path)
    assert (points.steps, points.entropy, points.reward) == ([0, 4, 8], [0.5, 0.4, 0.3], [0.1, 0.2, 0.4])
    assert points.skipped == 1, "the short line"


def test_names_that_read_alike_stay_apart(tmp_path: Path) -> None:
    path = written(tmp_path, "size,method,entropy,reward\n7b a,b,.5,.1\n7b,a b,.4,.2\n")
    assert [run.entropy for run in read_law_runs(path, Columns(group=("size", "method")))] == [[0.5], [0.4]]


def test_a_run_s_own_points_are_taken_as_they_are(tmp_path: Path) -> None:
    jump = "step,entropy,reward\n" + "".join(f"{i},{h},{0.1 + i / 50}\n" for i, h in enumerate([*SMOOTH, 0.64, 0.62]))
    (tmp_path / "law.csv").write_text(jump)
    with pytest.raises(UserError, match="as if bits and nats were mixed"):
        read_law_points(tmp_path / "law.csv")
    assert read_run_points(tmp_path).entropy[-1] == 0.62


def test_what_is_grouped_apart_is_accepted(tmp_path: Path) -> None:
    path = written(tmp_path, "entropy,reward,temperature\n.5,.1,1\n.4,.2,0.6\n")
    assert [run.name for run in read_law_runs(path, Columns(group=("temperature",)))] == ["1", "0.6"]
