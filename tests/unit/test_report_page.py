"""The HTML report: what it says, and the page itself in a headless Chromium where there is one."""

from __future__ import annotations

import json
import math
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.cli import main
from megarl.errors import UserError
from megarl.report.run import read_report_runs
from megarl.report.tokens import token_view
from megarl.track.loggers import TOKEN_COLUMNS
from tests.browser import CHROMIUM, Page, chromium
from tests.report_runs import write_run

pytest.importorskip("altair", reason="altair (extra `report`) is not installed")
pytest.importorskip("vl_convert", reason="vl-convert-python (extra `report`) is not installed")

SIZES = {"tiny": 1.1e5, "small": 4.2e5, "middle": 1.5e6}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    runs = []
    for place, (size, parameters) in enumerate(SIZES.items()):
        for algorithm in ("grpo", "rloo"):
            member = {"size": size, "algorithm": algorithm, "parameters": parameters}
            runs.append(
                write_run(
                    root / f"{size}_{algorithm}", seed=len(runs), a=0.2 + 0.05 * place, b=0.7 + 0.1 * place,
                    selects=algorithm == "rloo", member=member,
                )
            )  # fmt: skip
    return runs


@pytest.fixture(scope="module")
def report(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    main(["report", *map(str, folders), "-o", str(path), "--title", "Sums & <tokens>"])
    return path


def embedded(report: Path, name: str) -> object:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', report.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_has_every_figure_and_finding(report: Path) -> None:
    text = report.read_text()
    specs = embedded(report, "specs")
    assert isinstance(specs, dict)
    assert list(specs) == [
        "law", "entropy", "accuracy", "length", "reward", "forecast", "tails", "selected", "theory", "scaling",
    ]  # fmt: skip
    assert "Sums &amp; &lt;tokens&gt;" in text
    assert "tiny_grpo, tiny_rloo share a, b and the ceiling" in text
    assert "The ceiling of each size, forecast from the others, is off by" in text
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text.split("<script>")[0])


def test_tokens_travel_unchanged(report: Path, folders: list[Path]) -> None:
    view = embedded(report, "tokens")
    assert isinstance(view, list)
    assert {(dump["run"], dump["step"]) for dump in view} >= {("tiny_grpo", 0), ("tiny_grpo", 80)}
    first = next(dump for dump in view if dump["run"] == "tiny_rloo" and dump["step"] == 0)["responses"][0]
    assert first["length"] == len(first["tokens"]) == len(first["entropy"]) == 40
    assert first["selected"] == [0, 9, 18, 27, 36] and "</script>" in first["tokens"]
    assert all(0 <= p <= 1 for p in first["probability"])


def test_figures_are_written_as_png_and_svg(folders: list[Path], tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    main(["report", *map(str, folders[:2]), "-o", str(tmp_path / "r.html"), "--figures", str(tmp_path / "figures")])
    for name in ("law", "entropy", "accuracy", "length", "reward", "forecast", "tails", "selected", "theory"):
        assert ET.parse(tmp_path / "figures" / f"{name}.svg").getroot().tag.endswith("svg")
        with image.open(tmp_path / "figures" / f"{name}.png") as picture:
            assert picture.width > 1000 and len(picture.convert("RGB").getcolors(1 << 24)) > 20, name


def test_a_short_run_and_one_that_breaks_the_law_are_reported(folders: list[Path], tmp_path: Path) -> None:
    short = write_run(tmp_path / "short", steps=4)
    (short / "law.csv").write_text("step,entropy,reward\n0,0.5,0.1\n4,0.4,0.2\n")
    odd = write_run(tmp_path / "odd", seed=3)
    rows = (odd / "law.csv").read_text().splitlines()
    bent = [f"{line.rsplit(',', 1)[0]},{0.3 + 0.01 * order}" for order, line in enumerate(rows[1:])]
    (odd / "law.csv").write_text("\n".join([rows[0], *bent]) + "\n")
    main(["report", str(short), str(odd), "-o", str(tmp_path / "r.html")])
    text = (tmp_path / "r.html").read_text()
    assert "The law is not fitted: the law needs at least 3 points, got 2" in text
    assert "odd:</strong> The law does not hold:" in text


def test_runs_measured_differently_are_not_compared(folders: list[Path], tmp_path: Path) -> None:
    cool = write_run(tmp_path / "cool", temperature=0.6)
    main(["report", str(folders[0]), str(cool), "-o", str(tmp_path / "r.html")])
    text = (tmp_path / "r.html").read_text()
    assert "Runs differ in rollout temperature" in text and "share a, b" not in text


def test_a_run_before_its_first_evaluation_has_a_report(tmp_path: Path) -> None:
    young = tmp_path / "young"
    young.mkdir()
    (young / "metrics.jsonl").write_text(json.dumps({"step": 0, "entropy/seq_mean": 0.5, "reward/mean": 0.1}) + "\n")
    (young / "law.csv").write_text("step,entropy,reward\n")
    main(["report", str(young), "-o", str(tmp_path / "r.html")])
    assert "The law is not fitted: the law needs at least 3 points, got 0" in (tmp_path / "r.html").read_text()


def test_another_evaluation_set_has_points_of_its_own(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "two_sets")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in lines:
        if "eval/sums/accuracy" in record:
            record["eval/other/accuracy"] = 0.5 * record["eval/sums/accuracy"]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (first,) = read_report_runs([str(folder)])
    (other,) = read_report_runs([str(folder)], "other")
    assert first.fit is not None and other.fit is not None
    assert first.evaluation_set == "sums" and other.fit.a == pytest.approx(0.5 * first.fit.a, rel=1e-6)


def test_names_are_the_shortest_that_differ(tmp_path: Path) -> None:
    paths = [str(write_run(tmp_path / day / "grpo", steps=4)) for day in ("monday", "tuesday")]
    assert [run.name for run in read_report_runs(paths)] == ["monday/grpo", "tuesday/grpo"]


def test_names_that_no_page_can_show_are_made_legible(tmp_path: Path) -> None:
    names = ("a\nb", "<b>  x", os.fsdecode(b"caf\xe9"))
    paths = [str(write_run(tmp_path / f"run{place}", steps=4).rename(tmp_path / n)) for place, n in enumerate(names)]
    runs = read_report_runs(paths)
    assert [run.name for run in runs] == ["a\ufffdb", "<b>  x", "caf\ufffd"]
    assert {dump["run"] for dump in token_view(runs)} == {run.name for run in runs}


def test_a_diverged_run_s_tokens_are_shown_without_its_numbers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=4)
    path = folder / "samples" / "step_000000_tokens.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[0] |= {"reward": math.nan}
    for column, value in (("entropies", math.nan), ("logprobs", math.nan), ("covariances", -math.inf)):
        rows[0][column][3] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=TOKEN_COLUMNS), path)
    (run,) = read_report_runs([str(folder)])
    first = token_view([run])[0]["responses"][0]
    assert first["reward"] is None
    assert [first[name][3] for name in ("entropy", "probability", "covariance")] == [None, None, None]
    assert all(first[name][4] is not None for name in ("entropy", "probability", "covariance"))
    pq.write_table(pa.table({"prompt": ["x"]}), path)
    with pytest.raises(UserError, match="cannot be read as a token dump: it has no column reward"):
        token_view([run])


def test_a_config_with_empty_sections_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=4)
    (folder / "config.yaml").write_text("objective:\nevaluation:\nrollout: []\n")
    (run,) = read_report_runs([str(folder)])
    assert run.conditions["precision"] == "unknown" and run.evaluation_set == "sums" and run.algorithm.strip() == ""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", b"a: [", "config.yaml is not valid YAML"),
        ("config.yaml", b"\xff\xfe", "config.yaml is not valid YAML"),
        ("member.yaml", b"a: [", "member.yaml is not valid YAML"),
        ("member.yaml", b"- 1", "member.yaml does not hold a mapping"),
        ("member.yaml", b"parameters: seven", "parameters = 'seven' must be a positive number"),
        ("member.yaml", b"parameters: .nan", "parameters = nan must be a positive number"),
    ],
)
def test_broken_files_of_a_run_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    folder = write_run(tmp_path / "run", steps=4)
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as refused:
        read_report_runs([str(folder)])
    assert "\n" not in str(refused.value)


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "run", steps=4))
    (tmp_path / "file").write_text("")
    for out, figures, message in (
        ("/dev/full", None, "/dev/full cannot be written: No space left on device"),
        (str(tmp_path / "r.html"), str(tmp_path / "file" / "x"), "cannot be written: Not a directory"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["report", run, "-o", out, *(["--figures", figures] if figures else [])])
        printed = capsys.readouterr().err
        assert stopped.value.code == 2 and message in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{absent}"], "a run folder is expected"),
        (["{run}", "{run}"], "is named twice"),
        (["{run}", "-o", "{absent}/r.html"], "does not exist"),
        (["{run}", "-o", "{run}"], "is a folder; name the file to write"),
        (["{run}", "--set", "gsm8k"], "no evaluation set 'gsm8k'; its sets: sums"),
    ],
)
def test_bad_input_is_one_line(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = [word.format(run=folders[0], absent=tmp_path / "absent") for word in arguments]
    with pytest.raises(SystemExit) as stopped:
        main(["report", *given])
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and message in printed and printed.count("\n") == 1


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize(("width", "dark"), [(1600, False), (400, True)])
def test_the_page_is_drawn_without_errors_or_requests(browser: Page, report: Path, width: int, dark: bool) -> None:
    browser.events.clear()
    browser.open(report, width=width, dark=dark)
    assert browser.run("document.querySelectorAll('.chart').length") == 10
    drawn = "[...document.querySelectorAll('.chart')].every(c => c.querySelectorAll('svg path').length > 5)"
    assert browser.run(drawn)
    assert browser.run("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    assert browser.run("document.documentElement.dataset.scheme") == ("dark" if dark else "light")
    assert browser.problems() == []
    assert set(browser.requests()) == {report.resolve().as_uri()}


def test_the_token_view_switches_by_mouse_and_keyboard(browser: Page, report: Path) -> None:
    browser.open(report, width=1280)
    browser.run("(() => { const b = document.getElementById('token-run'); b.value = 'tiny_rloo';"
                "b.dispatchEvent(new Event('change')); })()")  # fmt: skip
    colours = "[...document.querySelectorAll('.token')].map(t => t.style.background).join()"
    by_entropy = browser.run(colours)
    assert "5 selected tokens" in browser.run("document.getElementById('token-scale').textContent")
    assert browser.run("document.querySelectorAll('.token.selected').length") == 5

    browser.click("#shade input[value=covariance]")
    by_covariance = browser.run(colours)
    assert by_covariance != by_entropy
    browser.press("ArrowRight")  # the radio buttons have the focus
    assert browser.run("document.querySelector('#shade input:checked').value") == "probability"
    assert browser.run(colours) not in (by_entropy, by_covariance)

    browser.click("#token-3")
    assert "Token 4 of 40" in browser.run("document.getElementById('token-info').textContent")
    browser.run("document.getElementById('token-text').focus()")
    browser.press("ArrowRight")
    browser.press("End")
    assert "Token 40 of 40" in browser.run("document.getElementById('token-info').textContent")
    assert browser.run("document.querySelectorAll('[aria-selected=true]').length") == 1
    browser.run("document.getElementById('token-response').focus()")
    browser.press("ArrowDown")
    assert browser.run("document.querySelectorAll('.token').length") == 41


def test_runs_can_be_hidden_and_the_colours_switched_by_keyboard(browser: Page, report: Path) -> None:
    browser.open(report, width=1280)
    lines = "document.querySelectorAll('#figure-entropy .mark-line path').length"
    assert browser.run(lines) == 6
    browser.run("document.querySelector('#shown input').focus()")
    browser.press(" ")
    browser.wait(f"{lines} === 5")
    browser.run("document.getElementById('scheme').focus()")
    browser.press(" ")
    browser.wait("document.documentElement.dataset.scheme === 'dark'")
    assert browser.run("document.getElementById('scheme').getAttribute('aria-pressed')") == "true"


def test_everything_has_a_name_for_screen_readers(browser: Page, report: Path) -> None:
    browser.open(report, width=1280)
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    wanted = {"button", "checkbox", "radio", "combobox", "region", "figure", "listbox", "link"}
    nameless = [
        node["role"]["value"]
        for node in nodes
        if not node.get("ignored") and node["role"]["value"] in wanted and not node.get("name", {}).get("value")
    ]
    assert nameless == []
    # Vega names the drawing's container, not the svg itself.
    descriptions = browser.run(
        "[...document.querySelectorAll('.chart svg')].map(s => s.closest('[aria-label]')?.getAttribute('aria-label'))"
    )
    assert all(text and len(text) > 30 for text in descriptions), descriptions
