"""What a pull costs, from its count of descriptors n and its bytes B: one model a transport, with intervals.

    post = post_base + post_per_descriptor * n  (+ post_per_byte * B for a synchronous transport, see split)
    wire = wire_base + wire_per_descriptor * n + B / bandwidth
    xfer = max(post, wire)

Why max: reads are carried while later ones are posted, and n equal jobs through two stages take n times the slower
stage and one first passage (two-stage flow shop; Johnson 1954); a sum would count time twice.  The wire has a cost
per descriptor too: a carrier that starts a copy for each (cuda_ipc) would otherwise seem to lose bandwidth with
smaller ones.  The wait for a poll is in ``wire_base``.

Fitted to the medians of each shape (n, B): least squares of the logarithm, nothing below 0.  What the shapes cannot
tell apart stays 0: a base where count or bytes hardly vary, the wire's cost per descriptor where all have one size.
Where the wire does not show, bandwidth is inf and its lower end the best rate seen.  Intervals: whole blocks (rounds)
resampled, from six blocks up; below, the covariance of the fit over shapes; missing where no freedom is left.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import optimize

from kvlab.analysis.compare import FEWEST, block_ids
from kvlab.analysis.split import CONFIDENCE, SIZE_SPREAD, SYNCHRONOUS_SHARE, post_costs, take, warm
from kvlab.errors import BadInput

Array = NDArray[np.float64]
SHAPE, TIMES = ["descriptors", "bytes"], ["post_us", "xfer_us"]
#: resamples of blocks; draws from a covariance
DRAWS, NORMAL_DRAWS = 200, 2000
#: more shapes than this are binned, eight bins an octave of count and of bytes
MOST_SHAPES = 500
#: largest over smallest from which a base can be told from a slope
SPREAD = 1.5
PARAMETERS = tuple(f"{part}_{x}_us" for part in ("post", "wire") for x in ("base", "per_descriptor", "per_byte"))


@dataclass(frozen=True)
class Fit:
    """``theta``: the six :data:`PARAMETERS`; ``draws``: rows of them that carry the uncertainty (NaN: unknown).

    ``parameters``: ``arm``, ``parameter``, ``value``, ``low``, ``high``, ``method``, the last row ``bandwidth_gb_s``;
    ``residuals``: a row a shape; post and xfer with ``_fit_us`` and ``_residual`` (measured / fitted - 1);
    ``ranges``: least and largest ``descriptors``, ``bytes`` and ``descriptor_bytes`` of the fit.
    """

    arm: str
    theta: Array
    draws: Array
    ranges: dict[str, tuple[float, float]]
    parameters: pd.DataFrame
    residuals: pd.DataFrame


def fit(pulls: pd.DataFrame) -> Fit:
    """Fit one arm's pulls (of one number in flight); BadInput for several arms or none."""
    d = warm(take(pulls, ["arm", *SHAPE, *TIMES], ("repetition", "warmup", "error")))
    d = d[(d[[*SHAPE, *TIMES]] > 0).all(axis=1)]
    if len(names := d["arm"].unique()) != 1:
        raise BadInput(f"a cost model is of one arm's pulls; got {', '.join(map(str, names)) or 'no pulls'}")
    key = d[SHAPE]
    if len(key.drop_duplicates()) > MOST_SHAPES:
        key = (key.transform(np.log2) * 8).round()
    d = d.assign(shape=key.groupby(SHAPE).ngroup(), block=block_ids(d))
    shapes, known = d.groupby("shape"), d[d["block"] >= 0]
    cells, rng = shapes[[*SHAPE, *TIMES]].median().assign(pulls=shapes.size()), np.random.default_rng(1)
    theta, draws = _solve(cells[[*SHAPE, *TIMES]].to_numpy(float), rng)
    if (blocks := known["block"].nunique()) < FEWEST:
        return _made(str(names[0]), theta, draws, cells, "covariance over shapes")
    tables = known.groupby(["shape", "block"])[TIMES].median().unstack("block")
    # Arrays, not tables: a thousand draws.  A shape that no drawn block has is left out of the draw.
    shape = cells.loc[tables.index, SHAPE].to_numpy(float)
    times = np.stack([tables[c].to_numpy(float) for c in TIMES], axis=1)
    found = []
    for at in rng.integers(0, blocks, (DRAWS, blocks)):
        drawn = times[:, :, at]
        there = ~np.isnan(drawn).all(axis=(1, 2))
        found.append(_solve(np.column_stack([shape[there], np.nanmedian(drawn[there], axis=2)]))[0])
    return _made(str(names[0]), theta, np.array(found), cells, f"{blocks} blocks")


def _solve(cells: Array, rng: np.random.Generator | None = None) -> tuple[Array, Array]:
    """Return theta and, with ``rng``, draws from the covariance over shapes (Student's t, cut at 0).

    ``cells``: a row a shape, columns :data:`SHAPE` and :data:`TIMES`.
    """
    n, size, post, xfer = cells.T
    x, theta, draws = np.column_stack([np.ones(len(n)), n, size]), np.zeros(6), np.zeros((NORMAL_DRAWS, 6))
    counts, sizes, lengths = (float(v.max() / v.min()) for v in (n, size, size / n))
    p, s = post_costs(cells[:, :3])
    copies = bool(np.median(post / xfer) >= SYNCHRONOUS_SHARE and np.median(s * size - p * n) > 0)
    # Most needed first: no more of them than there are shapes.
    own = [1] + [2] * copies + [0] * (counts >= SPREAD and (not copies or sizes >= SPREAD))
    wire = [2] + [1] * (lengths >= SIZE_SPREAD and counts >= SPREAD) + [0] * (sizes >= SPREAD)
    stages = [(0, own, post, 0 * post, post > 0), (3, wire, xfer, post, xfer - post > 0.1 * xfer)]
    for at, free, y, floor, shows in (stage for stage in stages if stage[4].any()):
        columns = sorted(free[: len(n)])
        unit = x[:, columns] / y[:, None]
        scale, least = unit.max(axis=0), np.maximum(floor / y, 1e-12)
        unit /= scale
        start = np.maximum(optimize.nnls(unit[shows], np.ones(shows.sum()))[0], 1e-6)
        model = optimize.least_squares(_log_ratio, start, _slope, bounds=(0, np.inf), args=(unit, least))
        z = np.where(model.x > 1e-5, model.x, 0)
        where = at + np.array(columns)
        theta[where] = z / scale
        # A shape that the floor decides says nothing about the wire, so it is no degree of freedom.
        spare = int(model.jac.any(axis=1).sum()) - len(columns)
        if rng is None or spare < 1 or np.linalg.matrix_rank(model.jac) < len(columns):
            draws[:, where] = np.nan
            continue
        covariance = 2 * model.cost / spare * np.linalg.inv(model.jac.T @ model.jac)
        moved = rng.multivariate_normal(0 * z, covariance, NORMAL_DRAWS)
        moved *= np.sqrt(spare / rng.chisquare(spare, (NORMAL_DRAWS, 1)))
        draws[:, where] = np.maximum(z + moved, 0) / scale
    return theta, draws


def _log_ratio(z: Array, unit: Array, least: Array) -> Array:
    return np.asarray(np.log(np.maximum(unit @ z, least)))


def _slope(z: Array, unit: Array, least: Array) -> Array:
    model = (unit @ z)[:, None]
    return np.where(model > least[:, None], unit / np.maximum(model, least[:, None]), 0.0)


def given(arm: str, pulls: pd.DataFrame, **parameters: float) -> Fit:
    """Return a model of stated :data:`PARAMETERS`, without intervals.

    ``pulls``: the published ones, with ``descriptors``, ``bytes``, ``post_us``, ``xfer_us``: range and residuals.
    """
    if unknown := set(parameters) - set(PARAMETERS):
        raise BadInput(f"no parameter {min(unknown)!r} in the cost model; it has {', '.join(PARAMETERS)}")
    theta = np.array([parameters.get(name, 0.0) for name in PARAMETERS])
    return _made(arm, theta, np.full((DRAWS, 6), np.nan), pulls.assign(pulls=1), "given")


def _made(arm: str, theta: Array, draws: Array, cells: pd.DataFrame, method: str) -> Fit:
    shapes = cells.assign(descriptor_bytes=cells["bytes"] / cells["descriptors"], arm=arm).reset_index(drop=True)
    ranges = {c: (float(shapes[c].min()), float(shapes[c].max())) for c in (*SHAPE, "descriptor_bytes")}
    rows = pd.DataFrame(np.column_stack([theta, *_ends(draws)]), columns=["value", "low", "high"])
    with np.errstate(divide="ignore"):
        rows.loc[5] = 1e-3 / rows.loc[5, ["value", "high", "low"]].to_numpy()
    if not np.isfinite(rows.loc[5, ["value", "low"]]).any():
        rows.loc[5] = [np.inf, float((cells["bytes"] / cells["xfer_us"]).max()) / 1e3, np.inf]
    rows = rows.assign(arm=arm, parameter=[*PARAMETERS[:5], "bandwidth_gb_s"], method=method)
    model = Fit(arm, theta, draws, ranges, rows, shapes)
    found = predict(model, shapes["descriptors"], shapes["bytes"])
    for name in ("post", "xfer"):
        shapes[f"{name}_fit_us"] = found[f"{name}_us"]
        shapes[f"{name}_residual"] = shapes[f"{name}_us"] / found[f"{name}_us"] - 1
    return model


def _ends(draws: Array) -> Array:
    return np.asarray(np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0))


def predict(fit: Fit, descriptors: ArrayLike, bytes: ArrayLike) -> pd.DataFrame:
    """Return ``post_us`` and ``xfer_us`` with ``_low``, ``_high`` (of the median pull), and ``extrapolated``.

    ``extrapolated`` is True where count, bytes or descriptor size lies outside of what was fitted.
    """
    n, size = (np.atleast_1d(v) for v in np.broadcast_arrays(np.asarray(descriptors, float), np.asarray(bytes, float)))
    x = np.stack([np.ones(len(n)), n, size])
    # The first row is the fit, the others its draws.
    post, wire = (np.vstack([fit.theta, fit.draws])[:, part] @ x for part in (slice(0, 3), slice(3, 6)))
    frame = pd.DataFrame({"arm": fit.arm, "descriptors": n, "bytes": size})
    for name, times in (("post", post), ("xfer", np.maximum(post, wire))):
        low, high = _ends(times[1:])
        frame = frame.assign(**{f"{name}_us": times[0], f"{name}_low_us": low, f"{name}_high_us": high})
    looked = {"descriptors": n, "bytes": size, "descriptor_bytes": size / n}
    outside = [(v < fit.ranges[c][0]) | (v > fit.ranges[c][1]) for c, v in looked.items()]
    return frame.assign(extrapolated=np.any(outside, axis=0))


def break_even(fit_a: Fit, fit_b: Fit, bytes: float) -> pd.DataFrame:
    """Return where the two take the same time for a pull of ``bytes``: a row a crossing, from few descriptors up.

    Columns: ``bytes``, ``descriptors`` and ``descriptor_bytes`` (with ``_low``, ``_high``), ``xfer_us``, ``fewer`` and
    ``more`` (the faster arm with fewer and with more descriptors), ``crossing_share`` (of the draws that cross at
    all; below 95 percent no interval), ``extrapolated``.  Without a crossing one row, its numbers missing.
    """
    k = min(len(fit_a.draws), len(fit_b.draws))
    a, b = (np.vstack([f.theta, f.draws[:k]]) for f in (fit_a, fit_b))
    found = _crossings(a, b, bytes)
    points, drawn, rows = np.unique(found[0][~np.isnan(found[0])]), found[1:], []
    for n in points if len(points) else [np.nan]:
        left, right = (predict(f, np.nan_to_num([n / 1.001, n, n * 1.001], nan=1), bytes) for f in (fit_a, fit_b))
        faster = np.where(left["xfer_us"] < right["xfer_us"], fit_a.arm, fit_b.arm)
        gaps = np.where(np.isnan(drawn), np.inf, np.abs(np.log(drawn / n)))
        nearest = np.take_along_axis(drawn, gaps.argmin(axis=1)[:, None], 1)
        share = float(np.mean(~np.isnan(nearest)))
        low, high = _ends(nearest[~np.isnan(nearest)]) if share >= CONFIDENCE else (np.nan, np.nan)
        row = {"bytes": bytes, "descriptors": n, "descriptors_low": low, "descriptors_high": high}
        row |= {f"descriptor_bytes{e}": bytes / v for e, v in (("", n), ("_low", high), ("_high", low))}
        row |= {"xfer_us": left["xfer_us"][1] if n == n else n, "fewer": faster[0], "more": faster[2]}
        outside = bool(left["extrapolated"][1] or right["extrapolated"][1])
        rows.append(row | {"crossing_share": share, "extrapolated": outside})
    return pd.DataFrame(rows)


def _crossings(a: Array, b: Array, size: float) -> Array:
    """Return for each row the counts where xfer of ``a`` and ``b`` meet (a pair of their lines each), else NaN."""
    ours, theirs = ([(t[:, i] + t[:, i + 2] * size, t[:, i + 1]) for i in (0, 3)] for t in (a, b))
    found = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for (u, p), (v, q) in itertools.product(ours, theirs):
            n = (v - u) / (p - q)
            tops = [np.max([c + k * n for c, k in lines], axis=0) for lines in (ours, theirs)]
            on = np.isclose(u + p * n, tops[0], rtol=1e-9) & np.isclose(tops[0], tops[1], rtol=1e-9)
            found.append(np.where(on & (n >= 1) & (n <= size), n, np.nan))
    return np.column_stack(found)
