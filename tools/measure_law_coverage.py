"""How often the 95 % intervals of a, b, the ceiling and the forecast hold the truth, in simulated runs.

python tools/measure_law_coverage.py [--runs 500] [--json]

Fit: each method's coverage, and its width over that of knowing the errors' covariance. Methods: plain least squares;
least squares with inflated errors (plug-in rho); generalised least squares (rho by REML, plugged in); moving-block
bootstrap; and megarl's own, which averages over rho. Forecast: the last step's interval from the first 15 % of the
points. Noise is first-order autoregressive; H(t) is a stretched exponential, a power or a double exponential (which is
in neither family).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from megarl.law.fit import DIRECTIONS, fit_law
from megarl.law.forecast import forecast_run, points_in_fraction

Floats = NDArray[np.floating[Any]]

A, B = 0.3, 0.9
TRUTH = {name: float(direction @ [A, B]) for name, direction in DIRECTIONS.items()}
REWARD_NOISE = 0.012
STEPS = 1000.0

DECAYS: dict[str, Callable[[Floats], Floats]] = {
    "stretched": lambda t: 0.04 + 0.76 * np.exp(-((t / 60) ** 0.6)),
    "power": lambda t: 0.02 + 0.7 * (1 + t / 40) ** -0.9,
    "double": lambda t: 0.03 + 0.5 * np.exp(-t / 30) + 0.25 * np.exp(-t / 300),
}


@dataclass(frozen=True)
class Scenario:
    points: int
    rho: float
    decay: str


def autoregressive(points: int, rho: float, generator: np.random.Generator) -> Floats:
    """[points]: stationary errors of variance 1."""
    noise = generator.normal(size=points)
    for order in range(1, points):
        noise[order] = rho * noise[order - 1] + np.sqrt(1 - rho**2) * noise[order]
    return noise


def simulated_run(scenario: Scenario, generator: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """(steps, entropies, rewards), all [points]; entropies have noise of their own and rewards follow them."""
    steps = np.linspace(0, STEPS, scenario.points)
    h = DECAYS[scenario.decay](steps) * np.exp(0.04 * autoregressive(scenario.points, scenario.rho, generator))
    r = B - A * np.exp(h) + REWARD_NOISE * autoregressive(scenario.points, scenario.rho, generator)
    return steps, h, r


Interval = tuple[float, float]
Method = Callable[[Floats, Floats, np.random.Generator], dict[str, Interval]]


def _design(h: Floats) -> Floats:
    return np.stack([-np.exp(h), np.ones_like(h)], axis=1)


def _intervals(estimate: Floats, covariance: Floats, degrees: float) -> dict[str, Interval]:
    quantile = float(student.ppf(0.975, degrees))
    found = {}
    for name, direction in DIRECTIONS.items():
        middle, width = float(direction @ estimate), quantile * float(np.sqrt(direction @ covariance @ direction))
        found[name] = (middle - width, middle + width)
    return found


def plain(h: Floats, r: Floats, generator: np.random.Generator) -> dict[str, Interval]:
    x = _design(h)
    estimate = np.linalg.lstsq(x, r, rcond=None)[0]
    variance = float(((r - x @ estimate) ** 2).sum()) / (len(r) - 2)
    return _intervals(estimate, np.linalg.inv(x.T @ x) * variance, len(r) - 2)


def inflated(h: Floats, r: Floats, generator: np.random.Generator) -> dict[str, Interval]:
    x, n = _design(h), len(r)
    estimate = np.linalg.lstsq(x, r, rcond=None)[0]
    e = r - x @ estimate
    rho = float(e[1:] @ e[:-1] / (e @ e))
    rho = min(max(rho + (2 + 4 * rho) / n, 0.0), 0.9)
    factor = (1 + rho) / (1 - rho)
    return _intervals(estimate, np.linalg.inv(x.T @ x) * float(e @ e) / (n - 2) * factor, max(n / factor - 2.0, 1.0))


def generalised(h: Floats, r: Floats, generator: np.random.Generator) -> dict[str, Interval]:
    x, n = _design(h), len(r)
    best: tuple[float, Floats, Floats] | None = None
    lags = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    for rho in np.linspace(-0.5, 0.98, 75):
        inverse = np.linalg.inv(rho**lags) if rho else np.eye(n)
        gram = x.T @ inverse @ x
        estimate = np.linalg.solve(gram, x.T @ inverse @ r)
        e = r - x @ estimate
        squares = float(e @ inverse @ e)
        log_likelihood = 0.5 * (np.linalg.slogdet(inverse)[1] - np.linalg.slogdet(gram)[1] - (n - 2) * np.log(squares))
        if best is None or log_likelihood > best[0]:
            best = (log_likelihood, estimate, np.linalg.inv(gram) * squares / (n - 2))
    assert best is not None
    return _intervals(best[1], best[2], n - 2)


def block_bootstrap(h: Floats, r: Floats, generator: np.random.Generator) -> dict[str, Interval]:
    x, n = _design(h), len(r)
    estimate = np.linalg.lstsq(x, r, rcond=None)[0]
    e = r - x @ estimate
    e = (e - e.mean()) * np.sqrt(n / (n - 2))
    length = max(2, round(1.5 * n ** (1 / 3)))
    starts = generator.integers(0, n - length + 1, size=(400, -(-n // length)))
    drawn = e[(starts[:, :, None] + np.arange(length)).reshape(400, -1)[:, :n]]
    again = np.linalg.lstsq(x, (x @ estimate + drawn).T, rcond=None)[0]  # [2, 400]
    found = {}
    for name, direction in DIRECTIONS.items():
        low, high = np.percentile(direction @ again, [2.5, 97.5])
        middle = float(direction @ estimate)
        found[name] = (2 * middle - float(high), 2 * middle - float(low))
    return found


def megarl_fit(h: Floats, r: Floats, generator: np.random.Generator) -> dict[str, Interval]:
    return fit_law(h, r).intervals


METHODS: dict[str, Method] = {
    "least squares": plain,
    "inflated": inflated,
    "generalised": generalised,
    "block bootstrap": block_bootstrap,
    "megarl": megarl_fit,
}


def fit_coverage(scenario: Scenario, runs: int, methods: Sequence[str]) -> list[dict[str, Any]]:
    """One record per method: the coverage of each interval and its median width over the ideal one's."""
    generator = np.random.default_rng(1)
    hits = {name: dict.fromkeys(DIRECTIONS, 0) for name in methods}
    widths: dict[str, list[float]] = {name: [] for name in methods}
    lags = np.abs(np.subtract.outer(np.arange(scenario.points), np.arange(scenario.points)))
    for _ in range(runs):
        _, h, r = simulated_run(scenario, generator)
        inverse = np.linalg.inv(_design(h).T @ np.linalg.inv(scenario.rho**lags + 0.0) @ _design(h))
        ideal = 2 * 1.96 * REWARD_NOISE * float(np.sqrt(DIRECTIONS["ceiling"] @ inverse @ DIRECTIONS["ceiling"]))
        for name in methods:
            intervals = METHODS[name](h, r, generator)
            for quantity, (low, high) in intervals.items():
                hits[name][quantity] += low <= TRUTH[quantity] <= high
            widths[name].append((intervals["ceiling"][1] - intervals["ceiling"][0]) / ideal)
    return [
        {"method": name, "points": scenario.points, "rho": scenario.rho, "decay": scenario.decay}
        | {quantity: count / runs for quantity, count in hits[name].items()}
        | {"width": float(np.median(widths[name]))}
        for name in methods
    ]


def forecast_coverage(scenario: Scenario, runs: int) -> dict[str, Any]:
    """The last step's coverage from the first 15 % of the points, the interval's median width and the median error."""
    generator = np.random.default_rng(2)
    hits, widths, errors = 0, [], []
    for _ in range(runs):
        steps, h, r = simulated_run(scenario, generator)
        known = points_in_fraction(len(steps), 0.15)
        ahead = forecast_run(steps[:known], h[:known], r[:known], STEPS)
        hits += ahead.reward_low[0] <= r[-1] <= ahead.reward_high[0]
        widths.append(ahead.reward_high[0] - ahead.reward_low[0])
        errors.append(abs(ahead.reward[0] - r[-1]))
    return {
        "points": scenario.points,
        "known": known,
        "rho": scenario.rho,
        "decay": scenario.decay,
        "coverage": hits / runs,
        "width": float(np.median(widths)),
        "error": float(np.median(errors)),
    }


def main() -> None:
    """Nothing; the command-line entry point."""
    parser = argparse.ArgumentParser(description="Coverage of the law's intervals in simulated runs.")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--points", type=int, nargs="+", default=[30, 60, 120])
    parser.add_argument("--rho", type=float, nargs="+", default=[0.0, 0.4, 0.7])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--part", choices=["fit", "forecast", "both"], default="both")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    fits: list[dict[str, Any]] = []
    forecasts: list[dict[str, Any]] = []
    for points in options.points:
        for rho in options.rho:
            if options.part != "forecast":
                fits += fit_coverage(Scenario(points, rho, "stretched"), options.runs, options.methods)
            if options.part != "fit":
                forecasts += [
                    forecast_coverage(Scenario(points, rho, decay), options.runs)
                    for decay in DECAYS
                    if points_in_fraction(points, 0.15) >= 5
                ]
    if options.json:
        print(json.dumps({"runs": options.runs, "fit": fits, "forecast": forecasts}))
        return
    for title, records in (("Coverage of 95 % intervals", fits), ("Forecast of the last step from 15 %", forecasts)):
        if records:
            table = Table(*records[0], title=title)
            for record in records:
                table.add_row(
                    *(f"{value:.3f}" if isinstance(value, float) else str(value) for value in record.values())
                )
            Console().print(table)


if __name__ == "__main__":
    main()
