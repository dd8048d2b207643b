"""The `megarl` command: tools around runs that need no training job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import megarl
from megarl.doctor.command import add_doctor_command
from megarl.errors import exits_cleanly_on_user_error
from megarl.law.commands import add_law_commands
from megarl.plan.command import add_plan_command
from megarl.report.page import add_report_command


def build_parser() -> argparse.ArgumentParser:
    """The parser of all `megarl` commands; each sets `run` to the function that carries it out."""
    parser = argparse.ArgumentParser(prog="megarl", description="Tools around megarl runs.")
    parser.add_argument("--version", action="version", version=f"megarl {megarl.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_law_commands(commands)
    add_report_command(commands)
    add_plan_command(commands)
    add_doctor_command(commands)
    return parser


@exits_cleanly_on_user_error
def main(arguments: Sequence[str] | None = None) -> None:
    """Nothing; the command-line entry point."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and ("overrides" not in options or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # a subcommand of argparse takes no positional arguments behind its options
        options.overrides += rest
    options.run(options)


if __name__ == "__main__":
    main()
