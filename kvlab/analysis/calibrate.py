"""Constants of the step-time model from runs, their uncertainty carried to the crossover, and the check of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares, nnls

from kvlab.analysis.cases import case as case
from kvlab.analysis.cases import points as points
from kvlab.analysis.split import CONFIDENCE
from kvlab.analysis.steps import PUBLISHED, Floats, Model, kv_bytes, ttft_1p1d_ms, ttft_replica_ms, window
from kvlab.errors import BadInput

#: the two ends of a two-sided interval
TAILS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)


def fit_steps(steps: pd.DataFrame, draws: int = 0) -> tuple[Floats, pd.DataFrame]:
    """Fit the three costs by non-negative least squares on relative residuals of the cells' medians.

    Where the steps name their prompt's ordinary step (column ``ordinary_ms``: the running request's own, nothing
    prefilled beside it) a step is the longer of that and its costs, and every chunk size weighs the same; steps that
    do not name it are then left out.  So is a prompt's first step if others follow: its gap begins at a token that an
    engine with asynchronous scheduling gave out late, while it launched the next step.

    Returns the costs and the floor (four columns; row 0 the estimate, the others draws; floor 0: not known) and a row a
    kind of step with ``step_ms``, ``model_ms``, ``residual``.  The draws resample whole rounds (a drift falls on all
    cells) and flip the signs of what the form leaves over (wild bootstrap): a little too wide rather than too narrow.
    """
    rng = np.random.default_rng(1)
    rows = steps.dropna(subset=["prefix_tokens", "chunk_tokens", "step_ms"])
    rows = rows[(rows["chunk_tokens"] > 0) & (rows["step_ms"] > 0)]
    rows = rows.assign(r=rows["repetition"].fillna(0) if "repetition" in rows else 0)
    known = "ordinary_ms" in rows and bool(rows["ordinary_ms"].notna().any())
    if known:
        rows = rows.dropna(subset="ordinary_ms")
        rows = rows[(rows["prefix_tokens"] > 0) | (rows["chunk_tokens"] >= rows["prompt_tokens"])]
    kinds = ["prefix_tokens", "chunk_tokens"]

    def by_round(column: str) -> pd.DataFrame:
        return rows.pivot_table(index=kinds, columns="r", values=column, aggfunc="median")

    cells = by_round("step_ms")
    s, n = (cells.index.get_level_values(i).to_numpy(float) for i in (0, 1))
    design = np.column_stack([np.ones(len(cells)), n, n * (2 * s + n)])
    scale = design.max(axis=0, initial=1)
    if len(cells) < 3 or np.linalg.matrix_rank(design / scale) < 3:
        raise BadInput(
            f"{len(cells)} kinds of step cannot tell the three costs apart; measure more chunks and prefixes"
        )
    values = cells.to_numpy(float)
    ordinary = by_round("ordinary_ms").to_numpy(float) if known else np.zeros_like(values)
    weight = 1 / np.sqrt(pd.Series(n).groupby(n).transform("size").to_numpy(float)) if known else np.ones(len(cells))

    def solve(y: Floats, floor: Floats) -> Floats:
        if not known:
            return np.asarray(nnls(design / scale / y0[:, None], y / y0)[0] / scale, float)
        start = np.array([1.0, max((y / n)[n.argmax()] * scale[1], 1e-9), 1.0])  # a draw may fall below 0
        found = least_squares(
            lambda costs: weight * (np.maximum(floor, design / scale @ costs) - y) / y0, start, bounds=(0, np.inf)
        )
        return np.asarray(found.x / scale, float)

    def middle(columns: Any) -> tuple[Floats, Floats]:
        drawn, floors = values[:, columns], ordinary[:, columns]
        empty = np.isnan(drawn).all(axis=1)
        drawn[empty], floors[empty] = values[empty], ordinary[empty]
        return np.nanmedian(drawn, axis=1), np.nanmedian(floors, axis=1)

    y0, floor0 = middle(np.arange(values.shape[1]))
    found = [np.append(solve(y0, floor0), np.median([np.median(floor0[n == size]) for size in np.unique(n)]))]
    fitted = np.maximum(floor0, design @ found[0][:3])
    left = (y0 - fitted) * np.sqrt(len(cells) / max(len(cells) - 3, 1))
    for _ in range(draws):
        y, floor = middle(rng.integers(0, values.shape[1], values.shape[1]))
        y = fitted + (y - y0) + left * rng.choice([-1.0, 1.0], len(cells))
        # The floor is one number an engine: its chunk sizes, drawn anew, say how far it can be known.
        sizes = rng.choice(np.unique(n), len(np.unique(n))) if known else np.unique(n)
        found.append(np.append(solve(y, floor), np.median([np.median(floor[n == size]) for size in sizes])))
    table = cells.index.to_frame(index=False).astype(int)
    return np.array(found), table.assign(step_ms=y0, model_ms=fitted, residual=y0 / fitted - 1)


def _cells_of(points: pd.DataFrame, arm: str) -> list[pd.DataFrame]:
    mine = points[points["arm"] == arm]
    return [g for _, g in mine.groupby(["prompt_tokens", "chunk_tokens", "gbps"], dropna=False)]


def calibrate(
    steps: pd.DataFrame, points: pd.DataFrame | None = None, *, base: Model = PUBLISHED, draws: int = 500
) -> list[Model]:
    """Fit a machine's constants; the first model is the estimate, the others are bootstrap draws of it.

    Steps give the three costs; TTFTs at short lengths (``points`` of phase ``calibrate``) give ``t0_ms`` (arm
    replica) and the transfer's two constants (arm 1P1D, two link rates or more, or two lengths).

    :param steps: table ``steps``
    :param points: rows of :func:`points`; None: t0 is 0 and the link's whole rate is reached at once
    :param base: takes from here what no run tells: KV bytes, windows, the prefill engine's chunk
    :raises BadInput: when the steps do not tell the three costs apart
    """
    rng = np.random.default_rng(1)
    kept = None if points is None else points[(points["phase"] == "calibrate") & points["ttft_ms"].notna()]
    models = []
    for i, costs in enumerate(fit_steps(steps, draws)[0]):
        fixed, token, attention, floor = map(float, costs)
        m = replace(base, fixed_ms=fixed, token_ms=token, attention_ms=attention, floor_ms=floor)
        m = replace(m, source="fitted to runs")
        m = replace(m, t0_ms=0.0, transfer_ms=0.0, link_share=1.0, decode_token_ms=None)
        models.append(m if kept is None or kept.empty else _with_overheads(m, kept, rng if i else None))
    return models


def _with_overheads(m: Model, points: pd.DataFrame, rng: np.random.Generator | None) -> Model:
    def middle(g: pd.DataFrame) -> float:
        x = g["ttft_ms"].to_numpy(float)
        return float(np.median(x if rng is None else rng.choice(x, len(x))))

    alone = [
        middle(g) - float(ttft_replica_ms(m, g["prompt_tokens"].iloc[0], g["chunk_tokens"].iloc[0]))
        for g in _cells_of(points, "replica")
    ]
    m = replace(m, t0_ms=max(0.0, float(np.median(alone)))) if alone else m
    cells = _cells_of(points, "1P1D")
    if not cells:
        return m
    length, rate = (np.array([g[c].iloc[0] for g in cells], float) for c in ("prompt_tokens", "gbps"))
    took = np.array([middle(g) for g in cells])
    design = np.column_stack([np.ones(len(cells)), kv_bytes(m, length) * 8e-6 / rate])
    extra = took - ttft_replica_ms(m, length, m.prefill_chunk)
    rest, share = nnls(design / took[:, None], extra / took)[0]
    return replace(m, transfer_ms=float(rest), link_share=float(share))


def constants(models: Sequence[Model]) -> pd.DataFrame:
    """Return the fitted constants with 95 percent intervals over the draws: ``name``, ``value``, ``low``, ``high``."""
    rows = []
    floor = ("floor_ms",) if models[0].floor_ms else ()
    for name in ("fixed_ms", "token_ms", "attention_ms", *floor, "t0_ms", "transfer_ms", "link_share"):
        drawn = [getattr(m, name) for m in models[1:]] or [np.nan]
        low, high = np.quantile(drawn, TAILS)
        rows.append({"name": name, "value": getattr(models[0], name), "low": low, "high": high})
    return pd.DataFrame(rows)


def crossover(models: Sequence[Model], gbps: float, **limits: Any) -> dict[str, Any]:
    """Carry the draws of :func:`calibrate` through to the lower edge of the window.

    :param limits: of :func:`kvlab.analysis.steps.window`
    :returns: the window of the estimate, ``low`` and ``high`` (95 percent interval of the lower edge; None: does
        not pay), ``never`` (share of draws in which 1P1D does not pay; None without draws), ``draws``
    """
    first, *others = (window(m, gbps, **limits) for m in models)
    found = {**asdict(first), "low": None, "high": None, "never": None, "draws": len(others)}
    if others:
        lower = sorted(np.inf if w.lower is None else w.lower for w in others)
        ends = lower[int(TAILS[0] * (len(lower) - 1))], lower[-1 - int(TAILS[0] * (len(lower) - 1))]
        found |= dict(zip(("low", "high"), (None if np.isinf(x) else int(x) for x in ends), strict=True))
        found["never"] = float(np.mean(np.isinf(lower)))
    return found


def check(models: Sequence[Model], points: pd.DataFrame) -> pd.DataFrame:
    """Hold the prediction against TTFTs measured on both sides of the crossover (phase ``check``).

    A row a length and rate, with 1P1D's TTFT over the replica's: ``ratio`` measured with a bootstrap interval,
    ``predicted`` with the draws' interval, and ``outcome``: hit (both resolved, same side of 1), miss, unresolved.
    """
    rng = np.random.default_rng(1)
    kept = points[points["phase"] == "check"].dropna(subset=["ttft_ms"])
    rows = []
    for both in _cells_of(kept, "1P1D"):
        length, rate = int(both["prompt_tokens"].iloc[0]), float(both["gbps"].iloc[0])
        alone = kept[(kept["arm"] == "replica") & (kept["prompt_tokens"] == length)]
        if alone.empty:
            continue
        chunk, (a, b) = alone["chunk_tokens"].iloc[0], (g["ttft_ms"].to_numpy(float) for g in (both, alone))
        boot = [np.median(rng.choice(x, (4000, len(x))), axis=1) for x in (a, b)]
        low, high = np.quantile(boot[0] / boot[1], TAILS)
        said = [float(ttft_1p1d_ms(m, length, rate) / ttft_replica_ms(m, length, chunk)) for m in models]
        p_low, p_high = np.quantile(said[1:] or said, TAILS)
        sides = [-1 if hi < 1 else 1 if lo > 1 else 0 for lo, hi in ((low, high), (p_low, p_high))]
        outcome = "unresolved" if 0 in sides else "hit" if sides[0] == sides[1] else "miss"
        row = {"prompt_tokens": length, "gbps": rate, "n": len(a), "ratio": np.median(a) / np.median(b)}
        row |= {"replica_ms": np.median(b), "1p1d_ms": np.median(a), "low": low, "high": high}
        row |= {"predicted": said[0], "predicted_low": p_low, "predicted_high": p_high, "outcome": outcome}
        rows.append(row)
    return pd.DataFrame(rows)
