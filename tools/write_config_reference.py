"""Writes docs/configuration.md from the config classes and docs/metrics.md from the metric table.

python tools/write_config_reference.py           write both pages
python tools/write_config_reference.py --check   exit 1 if a page is not what would be written
"""

from __future__ import annotations

import argparse
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

DOCS = Path(__file__).parents[1] / "docs"
NOTE = "<!-- Written by tools/write_config_reference.py; change the source and run it again. -->\n"
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥", "max_length": "length ≤"}


def config_reference(title: str, model: type[BaseModel], introduction: str) -> str:
    """A Markdown chapter on a config class: its top-level keys, then one section per nested config class."""
    parts = [f"## {title}\n\n{introduction}\n"]
    top = [(name, field) for name, field in model.model_fields.items() if not _nested(field.annotation)]
    if top:
        parts.append(_field_table(top))
    for name, field in model.model_fields.items():
        if section := _nested(field.annotation):
            parts.extend(_section(name, field, section))
    return "\n".join(parts)


def _section(path: str, field: FieldInfo, model: type[BaseModel]) -> Iterator[str]:
    """The section of a nested config class at the dotted `path`, then those of the classes nested in it."""
    if _is_list(field.annotation):
        path += "[]"
    elif get_origin(field.annotation) is dict:
        path += ".<key>"
    meaning = field.description or (model.__doc__ or "").strip().splitlines()[0]
    required = " Required." if field.is_required() else ""
    yield f"### `{path}`\n\n{meaning}{required}\n"
    plain = [(name, inner) for name, inner in model.model_fields.items() if not _nested(inner.annotation)]
    if plain:
        yield _field_table(plain)
    for name, inner in model.model_fields.items():
        if nested := _nested(inner.annotation):
            yield from _section(f"{path}.{name}", inner, nested)


def _field_table(fields: Sequence[tuple[str, FieldInfo]]) -> str:
    lines = ["| key | type | default | range | meaning |", "|---|---|---|---|---|"]
    for name, field in fields:
        default = "required" if field.is_required() else f"`{_value(field.get_default(call_default_factory=True))}`"
        cells = [f"`{name}`", _type_name(field.annotation), default, _range(field), field.description or ""]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _nested(annotation: Any) -> type[BaseModel] | None:
    """The config class that an annotation holds, itself or in a list or an optional."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _nested(part))), None)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(_is_list(part) for part in get_args(annotation))


def _type_name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{_value(part)}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in parts)
    if origin is typing.Annotated:
        return _type_name(parts[0])
    if origin is list:
        return f"list of {_type_name(parts[0])}"
    if origin is dict:
        return f"map of {_type_name(parts[0])} to {_type_name(parts[1])}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    names = {str: "text", bool: "true or false", int: "integer", float: "number", Path: "path", Any: "any"}
    return names[annotation] if annotation in names else str(getattr(annotation, "__name__", annotation))


def _range(field: FieldInfo) -> str:
    limits = [
        f"{sign} {getattr(constraint, name)}"
        for constraint in field.metadata
        for name, sign in BOUNDS.items()
        if getattr(constraint, name, None) is not None
    ]
    patterns = [f"`{constraint.pattern}`" for constraint in field.metadata if getattr(constraint, "pattern", None)]
    return ", ".join(limits + patterns)


def _value(value: Any) -> str:
    """A default as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return str(value.value)
    return str(value)


def metrics_reference(metrics: Mapping[str, str]) -> str:
    """The Markdown page on the metrics, by their first name part."""
    parts = ["# Metrics\n", NOTE]
    parts.append(
        "Every step of a run is one JSON object in `metrics.jsonl`, with `step`, `time` (seconds since 1970) and "
        "those of these metrics that the step measured. A value that is not finite is `null`. TensorBoard holds the "
        "same names. `<...>` stands for a part that depends on the run. Metrics of updates are means over the step's "
        "updates.\n"
    )
    for family in dict.fromkeys(name.split("/")[0] for name in metrics):
        parts.append(f"## {family}\n\n| name | meaning |\n|---|---|")
        rows = [f"| `{name}` | {text} |" for name, text in metrics.items() if name.split("/")[0] == family]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def pages() -> dict[Path, str]:
    """The content of each reference page."""
    from megarl.config import RunConfig, SftConfig
    from megarl.track.metrics import METRICS

    configuration = "\n".join(
        [
            "# Configuration\n",
            NOTE,
            "A config is a YAML file; `section.key=value` on the command line replaces a value of it. Unknown keys "
            "and values out of range end the program with one line, before anything starts.\n",
            config_reference("Training", RunConfig, "`megarl.train` and `megarl.evaluate` read these sections."),
            config_reference("Supervised training", SftConfig, "`megarl.sft` reads these sections."),
        ]
    )
    return {DOCS / "configuration.md": configuration, DOCS / "metrics.md": metrics_reference(METRICS)}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if `--check` found a page out of date, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    options = parser.parse_args(arguments)
    outdated = [
        path
        for path, content in pages().items()
        if not path.is_file() or path.read_text(encoding="utf-8").rstrip() != content.rstrip()
    ]
    if options.check:
        for path in outdated:
            print(
                f"{path.relative_to(DOCS.parent)} is out of date: run tools/write_config_reference.py", file=sys.stderr
            )
        return int(bool(outdated))
    DOCS.mkdir(exist_ok=True)
    for path, content in pages().items():
        path.write_text(content.rstrip() + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
