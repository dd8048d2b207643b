"""How entropy decays along a run, and where it will be: two families of curves, averaged over all that fit.

Stretched exponential H(t) = floor + drop exp(-(t / tau)^beta); power decay H(t) = floor + drop (1 + t / tau)^-p; t
counts steps from the first point. For given shape (tau, beta or p) the curve is linear in (floor, drop): these are
integrated out exactly, the shape and the errors' autocorrelation on a grid. So the far end's uncertainty is that of all
curves which the points allow, not of the best one alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import median_filter

from megarl.errors import UserError
from megarl.law.student import draw_between, log_mass
from megarl.law.uncertainty import Floats

Family = Literal["stretched exponential", "power"]

MINIMUM_POINTS = 5
HELD_OUT_SHARE = 1 / 3
RHO = np.array([0.0, 0.3, 0.6, 0.8])
COARSE = (32, 8)  # times, shapes
FINE = (32, 14)
NEGLIGIBLE = 1e-4  # of the largest weight
DRAWS = 4000


def _stretched_exponential(t: Floats, tau: Floats, beta: Floats) -> Floats:
    with np.errstate(over="ignore"):  # a step beyond all decay
        return np.asarray(np.exp(-((t / tau) ** beta)))


def _power(t: Floats, tau: Floats, exponent: Floats) -> Floats:
    return (1 + t / tau) ** -exponent


# Each family's curve and the range of its shape.
FAMILIES: dict[Family, tuple[Callable[[Floats, Floats, Floats], Floats], tuple[float, float]]] = {
    "stretched exponential": (_stretched_exponential, (0.3, 1.2)),
    "power": (_power, (0.3, 3.0)),
}


@dataclass(frozen=True)
class DecayFit:
    """What the entropies of a run's first points say about later ones."""

    family: Family  # the one with the smaller held-out error
    held_out_error: dict[Family, float]  # RMSE over the last third of the points, fitted on the others; nats
    share: dict[Family, float]  # of the draws
    cells: dict[Family, _Cells]
    first_step: float

    def draw(self, steps: Floats, count: int, generator: np.random.Generator) -> Floats:
        """[count, steps]: entropies at the steps along curves drawn by how well they fit, in nats."""
        counts = generator.multinomial(count, list(self.share.values()))
        drawn = [
            self.cells[name].draw(steps - self.first_step, int(number), generator)
            for name, number in zip(self.share, counts, strict=True)
        ]
        return generator.permutation(np.concatenate(drawn))


@dataclass(frozen=True)
class _Cells:
    """One family's grid: for each cell its shape, its weight and the distribution of (floor, drop)."""

    curve: Callable[[Floats, Floats, Floats], Floats]
    tau: Floats  # [cells]
    shape: Floats  # [cells]
    weight: Floats  # [cells], sums to 1
    mean: Floats  # [cells, 2]
    root: Floats  # [cells, 2, 2]: of the scale matrix
    degrees_of_freedom: int
    highest_floor: float

    def at(self, t: Floats) -> Floats:
        """[t]: the mean curve."""
        g = self.curve(t[None, :], self.tau[:, None], self.shape[:, None])
        return self.weight @ (self.mean[:, :1] + self.mean[:, 1:] * g)

    def draw(self, t: Floats, count: int, generator: np.random.Generator) -> Floats:
        """[count, t]: along drawn curves whose floor lies between 0 and the last entropies and whose drop is positive.

        In each cell (floor, drop) follow Student's t. Both are drawn from the allowed part of it, however little that
        is, and a cell counts by that part: points on a straight line fit best with a floor far below 0.
        """
        if count == 0:
            return np.empty((0, len(t)))
        nu, scale = self.degrees_of_freedom, self.root[:, 0, 0]
        low, high = -self.mean[:, 0] / scale, (self.highest_floor - self.mean[:, 0]) / scale
        with np.errstate(divide="ignore"):
            log_weight = np.log(self.weight) + log_mass(nu, low, high)
        which = _chosen(log_weight, 4 * count, generator)
        z = draw_between(nu, low[which], high[which], generator.uniform(size=len(which)))
        # Given the floor, the drop follows Student's t with one more degree of freedom (Ding 2016, doi
        # 10.1080/00031305.2016.1164756).
        spread = self.root[which, 1, 1] * np.sqrt((nu + z**2) / (nu + 1))
        least = -(self.mean[which, 1] + self.root[which, 1, 0] * z) / spread  # where the drop is 0
        most = np.full_like(least, np.inf)
        kept = _chosen(log_mass(nu + 1, least, most), count, generator)
        which, z, spread, least = which[kept], z[kept], spread[kept], least[kept]
        drop = (draw_between(nu + 1, least, most[kept], generator.uniform(size=count)) - least) * spread
        floor = self.mean[which, 0] + scale[which] * z
        g = self.curve(t[None, :], self.tau[which][:, None], self.shape[which][:, None])
        return floor[:, None] + drop[:, None] * g


def _chosen(log_weight: Floats, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """[count]: places drawn by their weights."""
    weight = np.exp(log_weight - log_weight.max())
    return generator.choice(len(weight), size=count, p=weight / weight.sum())


def fit_decay(steps: Floats, entropy: Floats, horizon: float) -> DecayFit:
    """The decay of the entropies [n >= 5] (nats) at the ascending `steps` [n]; `horizon` is the last step of interest.

    Errors are taken as relative to the entropy. Raises UserError: fewer points, or entropies that are not positive.
    """
    if len(steps) < MINIMUM_POINTS:
        raise UserError(f"a forecast of the entropy needs at least {MINIMUM_POINTS} points, got {len(steps)}")
    if entropy.min() <= 0:
        raise UserError("a forecast of the entropy needs entropies above 0")
    t = steps - steps[0]
    longest = max(horizon - float(steps[0]), float(t[-1]))
    held_out = max(1, int(HELD_OUT_SHARE * len(t)))
    errors: dict[Family, float] = {}
    for name in FAMILIES:
        if len(t) - held_out < MINIMUM_POINTS:
            errors[name] = float("nan")
            continue
        early = _fit_cells(name, t[:-held_out], entropy[:-held_out], longest)
        errors[name] = float(np.sqrt(np.mean((early.at(t[-held_out:]) - entropy[-held_out:]) ** 2)))
    # Neighbouring errors go together: half of the held-out points count as independent.
    log_share = np.array([-0.5 * held_out * np.log(max(error, 1e-12)) for error in errors.values()])
    share = np.exp(log_share - log_share.max()) if np.isfinite(log_share).all() else np.ones(len(errors))
    share /= share.sum()
    return DecayFit(
        family=max(zip(share, FAMILIES, strict=True), key=lambda pair: pair[0])[1],
        held_out_error=errors,
        share=dict(zip(FAMILIES, share.tolist(), strict=True)),
        cells={name: _fit_cells(name, t, entropy, longest) for name in FAMILIES},
        first_step=float(steps[0]),
    )


def _fit_cells(name: Family, t: Floats, entropy: Floats, longest: float) -> _Cells:
    """The grid over the shapes that matter: a coarse one over all shapes shows where the weight lies."""
    curve, (low, high) = FAMILIES[name]
    smooth = median_filter(entropy, size=min(5, len(entropy)), mode="nearest")
    shortest = float(np.diff(t).min()) / 2
    taus, shapes = np.geomspace(shortest, 10 * longest, COARSE[0]), np.geomspace(low, high, COARSE[1])
    _, _, log_weight, _, _ = _grid(curve, t, entropy, smooth, taus, shapes)
    heavy = np.exp(log_weight - log_weight.max()).max(axis=0).reshape(len(taus), len(shapes)) > NEGLIGIBLE
    taus = np.geomspace(*_around(taus, heavy.any(axis=1)), FINE[0])
    shapes = np.geomspace(*_around(shapes, heavy.any(axis=0)), FINE[1])
    tau, shape, log_weight, mean, root = _grid(curve, t, entropy, smooth, taus, shapes)
    weight = np.exp(log_weight - log_weight.max())
    return _Cells(
        curve=curve,
        tau=np.tile(tau, len(RHO)),
        shape=np.tile(shape, len(RHO)),
        weight=(weight / weight.sum()).ravel(),
        mean=mean,
        root=root,
        degrees_of_freedom=len(t) - 2,
        highest_floor=float(np.median(entropy[-3:])),
    )


def _around(grid: Floats, heavy: NDArray[np.bool_]) -> tuple[float, float]:
    """The ends of the heavy part of a grid, one cell wider on both sides."""
    places = np.flatnonzero(heavy)
    return float(grid[max(places[0] - 1, 0)]), float(grid[min(places[-1] + 1, len(grid) - 1)])


def _grid(
    curve: Callable[[Floats, Floats, Floats], Floats],
    t: Floats,
    entropy: Floats,
    smooth: Floats,
    taus: Floats,
    shapes: Floats,
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """(tau [cells], shape [cells], log weight [rho, cells], coefficients [rho cells, 2], roots [rho cells, 2, 2])."""
    tau, shape = (grid.ravel() for grid in np.meshgrid(taus, shapes, indexing="ij"))
    g = curve(t[None, :], tau[:, None], shape[:, None])
    design = np.stack([np.ones_like(g), g], axis=-1) / smooth[None, :, None]  # [cells, n, 2]
    fitted = [_regress(design, entropy / smooth, rho) for rho in RHO]
    log_weight, mean, root = zip(*fitted, strict=True)
    return tau, shape, np.stack(log_weight), np.concatenate(mean), np.concatenate(root)


def _regress(design: Floats, response: Floats, rho: float) -> tuple[Floats, Floats, Floats]:
    """(log restricted likelihood [cells], coefficients [cells, 2], roots of their scale matrix [cells, 2, 2])."""
    white = design.copy()
    white[:, 1:] -= rho * design[:, :-1]
    white[:, 0] *= np.sqrt(1 - rho**2)
    y = response.copy()
    y[1:] -= rho * response[:-1]
    y[0] *= np.sqrt(1 - rho**2)
    n = len(y)
    # A little is added to the diagonal for shapes whose curve is flat over the points: floor and drop are then one.
    gram = np.einsum("cni,cnj->cij", white, white)
    gram += 1e-9 * np.trace(gram, axis1=1, axis2=2)[:, None, None] * np.eye(2)
    coefficients = np.linalg.solve(gram, np.einsum("cni,n->ci", white, y)[..., None])[..., 0]
    squares = np.maximum(((y - np.einsum("cni,ci->cn", white, coefficients)) ** 2).sum(axis=1), 1e-18 * n)
    log_weight = 0.5 * np.log(1 - rho**2) - 0.5 * np.linalg.slogdet(gram)[1] - 0.5 * (n - 2) * np.log(squares)
    root = np.linalg.cholesky(np.linalg.inv(gram) * (squares / (n - 2))[:, None, None])
    return log_weight, coefficients, root
