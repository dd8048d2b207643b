"""A run's progress on the screen: a bar and a line per evaluation on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping

from rich.console import Console as Screen
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# What a step shows, as far as it was measured: metric, label, format.
_SHOWN = (
    ("policy/loss", "loss", "{:.3f}"),
    ("entropy/seq_mean", "H", "{:.3f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("law/ceiling", "ceiling", "{:.3f}"),
    ("law/budget_spent", "spent", "{:.0%}"),
    ("rollout/tokens_per_second", "tokens/s", "{:,.0f}"),
    ("time/step", "s/step", "{:.2f}"),
)


class Console:
    """The progress display of one run; made on rank 0 alone. Also shows the warnings of megarl's loggers."""

    def __init__(self, total_steps: int, *, screen: Screen | None = None, seconds_between_lines: float = 5.0) -> None:
        self._total = total_steps
        self._screen = screen or Screen()
        self._interval = seconds_between_lines  # of plain lines, where there is no bar
        self._last_line = -float("inf")
        self._latest: dict[str, float] = {}
        self._progress: Progress | None = None
        if self._screen.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
                console=self._screen,
            )
            self._task = self._progress.add_task("", total=total_steps, status="")
            self._progress.start()
            self._warnings: logging.Handler = RichHandler(console=self._screen, show_path=False)
        else:
            self._warnings = logging.StreamHandler()
            self._warnings.setFormatter(logging.Formatter("megarl: %(levelname)s: %(message)s"))
        self._warnings.setLevel(logging.WARNING)
        logging.getLogger("megarl").addHandler(self._warnings)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing; shows step number `step` (from 0) and, if it evaluated, a line per evaluation set."""
        self._latest |= {name: metrics[name] for name, _, _ in _SHOWN if name in metrics}
        status = step_status(self._latest)
        lines = evaluation_lines(metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=min(step + 1, self._total), status=status)
        else:
            now = time.monotonic()
            if lines or step == 0 or step + 1 >= self._total or now - self._last_line >= self._interval:
                self._print(f"step {step}/{self._total}  {status}")
                self._last_line = now
        for line in lines:
            self._print(f"step {step}/{self._total}  {line}")

    def close(self) -> None:
        """Nothing; leaves the screen as it is and lets go of it."""
        if self._progress is not None:
            self._progress.stop()
        logging.getLogger("megarl").removeHandler(self._warnings)

    def _print(self, line: str) -> None:
        self._screen.print(line, markup=False, highlight=False, soft_wrap=True)


def step_status(metrics: Mapping[str, float]) -> str:
    """The step's main numbers in one line, as far as they were measured."""
    # The loss of a policy-gradient update says little: it is shown where there is no reward.
    hidden = {"policy/loss"} if "reward/mean" in metrics else set()
    return "  ".join(
        f"{label} {form.format(metrics[name])}"
        for name, label, form in _SHOWN
        if name in metrics and name not in hidden
    )


def evaluation_lines(metrics: Mapping[str, float]) -> list[str]:
    """One line per evaluation set among the metrics: accuracy with standard error, pass@k, H, and the law's ceiling."""
    lines = []
    for accuracy_name in sorted(name for name in metrics if re.fullmatch(r"eval/[^/]+/accuracy", name)):
        prefix = accuracy_name.removesuffix("/accuracy")
        line = f"{prefix}: accuracy {metrics[accuracy_name]:.3f}"
        if f"{prefix}/accuracy_stderr" in metrics:
            line += f" +- {metrics[f'{prefix}/accuracy_stderr']:.3f}"
        for name in sorted(name for name in metrics if name.startswith(f"{prefix}/pass@")):
            line += f"  {name.rsplit('/', 1)[1]} {metrics[name]:.3f}"
        if f"{prefix}/entropy" in metrics:
            line += f"  H {metrics[f'{prefix}/entropy']:.3f}"
        lines.append(line)
    if lines and "law/ceiling" in metrics:
        lines[0] += f"  ceiling {metrics['law/ceiling']:.3f}"
        if "law/ceiling_low" in metrics and "law/ceiling_high" in metrics:
            lines[0] += f" [{metrics['law/ceiling_low']:.3f}, {metrics['law/ceiling_high']:.3f}]"
    if lines and "law/budget_spent" in metrics:
        lines[0] += f"  entropy spent {metrics['law/budget_spent']:.0%}"
    if lines and "law/forecast" in metrics:
        lines[0] += f"  last step {metrics['law/forecast']:.3f}"
        if "law/forecast_low" in metrics and "law/forecast_high" in metrics:
            lines[0] += f" [{metrics['law/forecast_low']:.3f}, {metrics['law/forecast_high']:.3f}]"
    return lines
