"""What people write in YAML, with two settings of one key refused instead of the first one lost."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from megarl.errors import UserError


class _OneValuePerKey(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"key {key.value} stands in line {seen[key.value]} and again in line {line}"
                    )
                seen[key.value] = line
        return super().construct_mapping(node, deep)


def read_mapping(path: Path, kind: str, sections: Iterable[str]) -> dict[str, Any]:
    """The tree of a `kind` of file (config, sweep) whose top level holds `sections`.

    Raises UserError: no such file, no YAML, a key that is set twice, or a top level that is no mapping.
    """
    if not path.is_file():
        raise UserError(f"{kind} file {path} does not exist")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _OneValuePerKey)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: the top level must hold sections ({', '.join(sections)})")
    return tree
