"""The reference pages that are written from the config classes and the metric table."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, Field

TOOL = Path(__file__).parents[2] / "tools" / "write_config_reference.py"
spec = importlib.util.spec_from_file_location("write_config_reference", TOOL)
assert spec is not None and spec.loader is not None
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


class Penalty(BaseModel):
    """How much is taken off."""

    coefficient: float = Field(0.5, ge=0, lt=2, description="Weight of the penalty.")
    estimator: Literal["abs", "k3"] = Field("abs", description="abs or k3 (a|b).")


class Entry(BaseModel):
    """One of many."""

    name: str = Field(description="Its name.", pattern="^[a-z]+$")
    files: list[str] = Field(min_length=1, description="Its files.")


class Section(BaseModel):
    """A section."""

    fast: bool = Field(True, description="Whether it is fast.")
    limit: int | None = Field(None, ge=1, description="At most this many.")
    penalty: Penalty = Field(default_factory=Penalty)
    entries: list[Entry] = Field(default_factory=list, description="All entries.")


class Toy(BaseModel):
    """The whole."""

    seed: int = Field(1, description="Seed.")
    section: Section


def test_every_key_has_a_line_in_its_section() -> None:
    lines = reference.config_reference("Toy", Toy, "A toy.").splitlines()
    headings = [line for line in lines if line.startswith("#")]
    assert headings == ["## Toy", "### `section`", "### `section.penalty`", "### `section.entries[]`"]
    assert "| `seed` | integer | `1` |  | Seed. |" in lines
    assert "| `fast` | true or false | `true` |  | Whether it is fast. |" in lines
    assert "| `limit` | integer or null | `null` | ≥ 1 | At most this many. |" in lines
    assert "| `coefficient` | number | `0.5` | ≥ 0, < 2 | Weight of the penalty. |" in lines
    assert "| `estimator` | `abs`, `k3` | `abs` |  | abs or k3 (a\\|b). |" in lines
    assert "| `name` | text | required | `^[a-z]+$` | Its name. |" in lines
    assert "| `files` | list of text | required | length ≥ 1 | Its files. |" in lines
    assert "A section. Required." in lines and "All entries." in lines and "How much is taken off." in lines


def test_metrics_are_grouped_by_their_first_part() -> None:
    page = reference.metrics_reference({"a/x": "An x.", "b/y": "A y.", "a/z": "A z."})
    assert page.index("| `a/z` | A z. |") < page.index("## b") < page.index("| `b/y` | A y. |")


def test_check_fails_until_the_pages_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    monkeypatch.setattr(reference, "DOCS", docs)
    assert reference.main(["--check"]) == 1
    assert "docs/configuration.md is out of date" in capsys.readouterr().err
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    (docs / "metrics.md").write_text("# Metrics\n")
    assert reference.main(["--check"]) == 1
    assert "`entropy/seq_mean`" not in (docs / "metrics.md").read_text()
