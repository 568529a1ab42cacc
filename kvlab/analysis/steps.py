"""The step-time model: TTFT of tuned replicas and of 1P1D over input length, and where 1P1D pays.

A prefill step from ``prefix`` tokens over ``chunk`` more costs::

    step_ms = fixed + token * chunk + attention * chunk * (2 * prefix + chunk)      since e^2 - s^2 = (e - s)(e + s)

A replica runs one such step between two tokens of every other request, so its chunk is the largest whose
longest step keeps the gap limit; long inputs then take many steps and pay ``fixed`` in each.  1P1D prefills
in large chunks and pays the transfer instead.  Both TTFTs share all but that::

    replica  t0 + fixed * ceil(L / chunk(L)) + token * L + attention * L^2
    1P1D     t0 + fixed * ceil(L / 8192)     + token * L + attention * L^2 + transfer(L, link rate)

Where the CPU launches every kernel (eager mode) a step takes at least as long as the launching, ``floor``, however few
its tokens: a step is then the longer of the two.

Times in ms, lengths in tokens, link rates in Gbps (10^9 bit/s).  Form and published constants were read off
the figure of "Chunk First" (doi:10.5281/zenodo.23085600); its author states neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from kvlab.kv_layout import Layout

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: chunks are multiples of this (the figure's; vLLM's usual block of 16 tokens)
CHUNK_MULTIPLE = 16
#: spacing and end of the input lengths that edges are looked for on; the published edges lie on 256
GRID_TOKENS, MOST_TOKENS = 256, 65_536


@dataclass(frozen=True)
class Model:
    """Constants of one machine, one model and one connector.

    :ivar fixed_ms, token_ms, attention_ms: a step's fixed cost, cost a token, cost a token and token of prefix
    :ivar floor_ms: no step is shorter; 0 where the costs add up at every size
    :ivar t0_ms: what both sides add to the sum of the steps
    :ivar prefill_chunk: chunk of the prefill engine in 1P1D
    :ivar transfer_ms: the part of the transfer that does not depend on the link
    :ivar link_share: time on the link over bytes / rate (1: the link's whole rate is reached)
    :ivar token_bytes: KV of a token in layers that keep all; ``window_bytes``: sliding windows when full
    :ivar decode_token_ms: growth of the decode engine's own gap with the input; None takes the step of one token
    """

    fixed_ms: float
    token_ms: float
    attention_ms: float
    t0_ms: float = 0.0
    prefill_chunk: int = 8192
    transfer_ms: float = 0.0
    link_share: float = 1.0
    token_bytes: float = 0.0
    window_bytes: float = 0.0
    window_tokens: int = 1
    decode_token_ms: float | None = None
    floor_ms: float = 0.0
    source: str = ""


#: Gemma 4 26B-A4B FP8 on g7e at low load.  The gap of the decode engine is known at one point only: past 36,736
#: tokens it exceeds 50 ms; the straight line through that point and the fixed cost is kvlab's assumption.
PUBLISHED = Model(
    fixed_ms=16.0275,
    token_ms=15.107e-3,
    attention_ms=1.32609e-6,
    t0_ms=40.8,
    transfer_ms=28.0,
    token_bytes=20480,
    window_bytes=25 * 1024 * 8192,
    window_tokens=1024,
    decode_token_ms=(50 - 16.0275) / 36_736,
    source="inferred from the figure of Chunk First, doi:10.5281/zenodo.23085600 (26B FP8, g7e, low load)",
)
#: rate at which the published curve was drawn: 11.449 us a token of 20,480 B (the text gives 14.97 at low load)
PUBLISHED_GBPS, PUBLISHED_GAP_MS = 14.3, 50.0


def with_layout(m: Model, layout: Layout) -> Model:
    """Return ``m`` with the KV bytes of a layout (:func:`kvlab.kv_layout.load`, TP 1); a state counts as a window."""
    far = 1 << 20
    at, twice = layout.pull(far).bytes, layout.pull(2 * far).bytes
    token = (twice - at) / far
    return replace(m, token_bytes=token, window_bytes=at - token * far, window_tokens=layout.window_tokens or 1)


def step_ms(m: Model, prefix: ArrayLike, chunk: ArrayLike) -> Floats:
    """Return the time of a step over ``chunk`` tokens after ``prefix``."""
    s, n = np.asarray(prefix, float), np.asarray(chunk, float)
    return np.asarray(np.maximum(m.floor_ms, m.fixed_ms + m.token_ms * n + m.attention_ms * n * (2 * s + n)))


def longest_step_ms(m: Model, tokens: ArrayLike, chunk: ArrayLike) -> Floats:
    """Return the longest step of a prefill of ``tokens`` in steps of ``chunk``: the last full one, or the rest."""
    length = np.asarray(tokens, np.int64)
    size = np.minimum(np.asarray(chunk, np.int64), length)
    whole = length // size * size
    rest = np.where(whole < length, step_ms(m, whole, length - whole), 0)
    return np.asarray(np.maximum(step_ms(m, whole - size, size), rest))


def largest_chunk(m: Model, tokens: ArrayLike, gap_ms: float, multiple: int = CHUNK_MULTIPLE) -> Ints:
    """Return the largest chunk (a multiple) that keeps the gap limit at each length; 0 where none does."""
    length = np.atleast_1d(np.asarray(tokens, np.int64))
    every = np.arange(multiple, length.max() + 2 * multiple, multiple)
    # The first step starts from nothing: a chunk too long there is too long, unless it only rounds up a whole input.
    sizes = every[: np.count_nonzero(step_ms(m, 0, every) <= gap_ms) + 1]
    keeps = (longest_step_ms(m, length[:, None], sizes) <= gap_ms) & (sizes < length[:, None] + multiple)
    return np.asarray(np.where(keeps, sizes, 0).max(axis=1), np.int64)


def ttft_replica_ms(m: Model, tokens: ArrayLike, chunk: ArrayLike) -> Floats:
    """Return a replica's TTFT at ``chunk``; infinite where the chunk is 0 (no chunk keeps the limit)."""
    length, size = np.asarray(tokens, float), np.asarray(chunk, float)
    steps = np.where(size > 0, np.ceil(length / np.maximum(size, 1)), np.inf)
    costs = m.t0_ms + m.fixed_ms * steps + m.token_ms * length + m.attention_ms * length**2
    return np.asarray(costs + _lifted_ms(m, length, np.maximum(np.minimum(size, length), 1)) if m.floor_ms else costs)


def _lifted_ms(m: Model, length: Floats, size: Floats) -> Floats:
    """Return by how much the floor lifts the steps of a prefill: whole steps grow evenly with the prefix."""
    whole = length // size
    room = m.floor_ms - (m.fixed_ms + m.token_ms * size + m.attention_ms * size**2)
    slope = 2 * m.attention_ms * size**2
    short = np.clip(np.ceil(room / np.maximum(slope, 1e-12)), 0, whole)
    last, rest = whole * size, length - whole * size
    own = m.fixed_ms + m.token_ms * rest + m.attention_ms * rest * (2 * last + rest)
    return np.asarray(
        short * room - slope * short * (short - 1) / 2 + np.where(rest > 0, np.maximum(0, m.floor_ms - own), 0)
    )


def kv_bytes(m: Model, tokens: ArrayLike) -> Floats:
    """Return the bytes that 1P1D moves for an input: all tokens of global layers, windows until they are full."""
    length = np.asarray(tokens, float)
    return np.asarray(m.window_bytes * np.minimum(1, length / m.window_tokens) + m.token_bytes * length)


def ttft_1p1d_ms(m: Model, tokens: ArrayLike, gbps: ArrayLike) -> Floats:
    """Return the TTFT of 1P1D over a link of ``gbps``."""
    moved = m.transfer_ms + m.link_share * kv_bytes(m, tokens) * 8 / (np.asarray(gbps, float) * 1e6)
    return np.asarray(ttft_replica_ms(m, tokens, m.prefill_chunk) + moved)


def curve(m: Model, tokens: Sequence[int] | Ints, gbps: float, gap_ms: float) -> pd.DataFrame:
    """Return ``prompt_tokens``, ``chunk_tokens``, ``chunks``, ``replica_ms`` and ``1p1d_ms`` (both TTFTs)."""
    length = np.asarray(tokens, np.int64)
    chunk = largest_chunk(m, length, gap_ms)
    frame = pd.DataFrame({"prompt_tokens": length, "chunk_tokens": chunk, "chunks": -(-length // np.maximum(chunk, 1))})
    frame["replica_ms"] = ttft_replica_ms(m, length, chunk)
    frame["1p1d_ms"] = ttft_1p1d_ms(m, length, gbps)
    return frame


@dataclass(frozen=True)
class Window:
    """Input lengths where 1P1D answers sooner than tuned replicas and keeps both limits.

    :ivar lower: the first such length; None: 1P1D does not pay
    :ivar steady: from here on it pays at every length up to ``upper`` (chunks are whole, so the edge is ragged)
    :ivar upper: the last; None with a lower edge: not reached within the lengths looked at
    :ivar ends_by: ``TTFT limit`` or ``gap of the decode engine``, whichever sets the upper edge
    """

    lower: int | None = None
    steady: int | None = None
    upper: int | None = None
    ends_by: str = ""


def window(
    m: Model,
    gbps: float,
    *,
    gap_ms: float = PUBLISHED_GAP_MS,
    ttft_ms: float = np.inf,
    grid: int = GRID_TOKENS,
    most: int = MOST_TOKENS,
) -> Window:
    """Return the pay-off window on the lengths ``grid``, 2 ``grid``, ... ``most``."""
    length = np.arange(grid, most + 1, grid)
    slope = 2 * m.attention_ms if m.decode_token_ms is None else m.decode_token_ms
    room = gap_ms - m.fixed_ms - (m.token_ms if m.decode_token_ms is None else 0)
    room = -1 if m.floor_ms > gap_ms else room
    # Rounded, so that the published edge comes back as the whole number it was.
    edge = np.inf if slope == 0 and room >= 0 else -1 if room < 0 else np.floor(round(room / slope, 6))
    both = ttft_1p1d_ms(m, length, gbps)
    wins = (both < ttft_replica_ms(m, length, largest_chunk(m, length, gap_ms))) & (both <= ttft_ms) & (length <= edge)
    if not wins.any():
        return Window()
    first, last = int(np.argmax(wins)), len(wins) - 1 - int(np.argmax(wins[::-1]))
    gone = np.flatnonzero(~wins[: last + 1])
    steady = int(length[gone[-1] + 1] if len(gone) else length[0])
    if last == len(length) - 1:
        return Window(int(length[first]), steady)
    by_gap = edge < length[last + 1] and both[last + 1] <= ttft_ms
    upper = int(edge) if by_gap and ttft_1p1d_ms(m, edge, gbps) <= ttft_ms else int(length[last])
    return Window(int(length[first]), steady, upper, "gap of the decode engine" if by_gap else "TTFT limit")


def windows(m: Model, rates_gbps: Sequence[float], **limits: Sequence[float]) -> pd.DataFrame:
    """Return the window for every combination of link rate and ``gap_ms``, ``ttft_ms`` and ``token_bytes``."""
    axes = {"gap_ms": [PUBLISHED_GAP_MS], "ttft_ms": [np.inf], "token_bytes": [m.token_bytes]} | limits
    rows = []
    for rate, gap, ttft, size in product(rates_gbps, axes["gap_ms"], axes["ttft_ms"], axes["token_bytes"]):
        found = window(replace(m, token_bytes=size), rate, gap_ms=gap, ttft_ms=ttft)
        rows.append({"gbps": rate, "gap_ms": gap, "ttft_ms": ttft, "token_bytes": size, **asdict(found)})
    return pd.DataFrame(rows).astype(dict.fromkeys(("lower", "steady", "upper"), "Int64"))
