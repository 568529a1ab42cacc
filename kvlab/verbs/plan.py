"""``kvlab plan``: whether 1P1D pays, from what input length, the chunk to set, and how sure that is.

The last stdout line is ``1P1D pays from N tokens`` or ``1P1D does not pay``; with ``--json`` the one
document says the same under ``pays_from``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvlab import kv_layout, runs
from kvlab.analysis import calibrate, steps
from kvlab.errors import BadInput

#: input lengths of the table, beside the edges of the window
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
#: a fitted machine may be small: look closer than the published figure's 256
FITTED_GRID = 64


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments (checked in :func:`main`, so that a mistake is one line)."""
    parser.add_argument("--layout", metavar="MODEL", help="a layout kvlab ships, or a config.json: gives the KV bytes")
    parser.add_argument("--kv-dtype", default="bfloat16", help="of the KV cache (default: bfloat16)")
    parser.add_argument("--rate-gbps", metavar="R", help="rate that the transfer reaches on the link, Gbit/s")
    parser.add_argument("--gap-limit-ms", metavar="G", default="50", help="longest gap allowed (default: 50)")
    parser.add_argument("--ttft-limit-ms", metavar="T", help="longest TTFT allowed (default: none)")
    parser.add_argument("--calibration", metavar="RUN", help="a run with step times (tcp-crossover, chunk-first)")
    parser.add_argument("--published", action="store_true", help="the published curve: its step times and its layout")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _number(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise BadInput(f"{flag}: a number above 0 is wanted (got {text!r})")
    return value


def _models(args: argparse.Namespace) -> tuple[list[steps.Model], list[str]]:
    """Return the estimate with its draws, and what the plan rests on."""
    base = steps.PUBLISHED
    if args.published:
        told = (
            "published step times and KV (Gemma 4 26B-A4B FP8, g7e); the author's lower edge is 14K, within 11K to 34K"
        )
        return [base], [told, *(["--layout is not used with it"] if args.layout else [])]
    layout = kv_layout.load(args.layout, dtype=args.kv_dtype) if args.layout else None
    base = steps.with_layout(base, layout) if layout else base
    if not args.calibration:
        if layout is None:
            raise BadInput("say what to plan for: --layout MODEL, --calibration RUN or --published")
        told = "step times of another model and machine (the published 26B FP8 on g7e)"
        return [base], [f"KV of {layout.name}; {told}: not calibrated here, --calibration RUN does it"]
    run = runs.load(args.calibration)
    if not run.has("steps"):
        raise BadInput(f"{args.calibration} holds no step times; name a run of tcp-crossover or chunk-first that does")
    kv = run.manifest.get("kv")
    if kv is None and layout is None:
        raise BadInput(f"{args.calibration} does not say its model's KV bytes; add --layout MODEL")
    points = calibrate.points(run.table("cells"))
    models = calibrate.calibrate(run.table("steps"), points, base=replace(base, **(kv or {})))
    said = [f"step times fitted to {run.id}"]
    if not (points["arm"] == "1P1D").any():
        said.append("no transfer measured: the link's whole rate is taken to be reached at once")
    if layout:
        said.append(f"KV of {layout.name}")
        own = {k: getattr(base, k) for k in ("token_bytes", "window_bytes", "window_tokens")}
        models = [replace(m, **own) for m in models]
    return models, said


def plan(models: Sequence[steps.Model], gbps: float, gap_ms: float, ttft_ms: float = math.inf) -> dict[str, Any]:
    """Return the plan as a document: ``pays``, ``pays_from``, ``window``, ``chunk_tokens``, ``sure``, ``by_length``."""
    grid = steps.GRID_TOKENS if models[0].decode_token_ms is not None else FITTED_GRID
    found = calibrate.crossover(models, gbps, gap_ms=gap_ms, ttft_ms=ttft_ms, grid=grid)
    first = found["lower"]
    lengths = sorted({*LENGTHS, *(x for x in (first, found["upper"]) if x)})
    rows = steps.curve(models[0], lengths, gbps, gap_ms)
    at = int(rows.loc[rows["prompt_tokens"] == (first or 8192), "chunk_tokens"].iloc[0])
    if not found["draws"]:
        sure = "a prediction for low load from constants without a spread; nobody has measured it"
    else:
        sure = f"1P1D never pays in {found['never']:.0%} of {found['draws']} draws"
        if found["never"] < 1:
            low, high = (f"{x}" if x else "never" for x in (found["low"], found["high"]))
            sure = f"95 % interval of the lower edge {low} to {high} tokens; {sure}"
    return {
        "pays": first is not None,
        "pays_from": first,
        "chunk_tokens": at or None,
        "chunk_at_tokens": first or 8192,
        "sure": sure,
        "window": found,
        "grid_tokens": grid,
        "most_tokens": steps.MOST_TOKENS,
        "rate_gbps": gbps,
        "gap_limit_ms": gap_ms,
        "ttft_limit_ms": None if math.isinf(ttft_ms) else ttft_ms,
        "by_length": json.loads(rows.round(1).to_json(orient="records")),
    }


def main(args: argparse.Namespace) -> int:
    """Print the plan."""
    if args.published and args.calibration:
        raise BadInput("--published and --calibration exclude each other")
    if args.rate_gbps is None:
        raise BadInput("--rate-gbps is missing: the rate that the transfer reaches on the link, in Gbit/s")
    rate, gap = _number(args.rate_gbps, "--rate-gbps"), _number(args.gap_limit_ms, "--gap-limit-ms")
    ttft = _number(args.ttft_limit_ms, "--ttft-limit-ms") if args.ttft_limit_ms else math.inf
    models, basis = _models(args)
    document = {**plan(models, rate, gap, ttft), "basis": basis}
    if args.json:
        print(json.dumps(document))
        return 0
    limits = f"gap limit {gap:g} ms, TTFT limit {'none' if math.isinf(ttft) else f'{ttft:g} ms'}"
    print(f"basis   {'; '.join(basis)}\nlink    {rate:g} Gbps, {limits}, low load")
    print("input tokens   replica chunk   TTFT replica (ms)   TTFT 1P1D (ms)")
    for r in document["by_length"]:
        alone = "no chunk" if r["replica_ms"] is None else f"{r['replica_ms']:.0f}"
        print(f"{r['prompt_tokens']:>12}   {r['chunk_tokens'] or '-':>13}   {alone:>17}   {r['1p1d_ms']:>14.0f}")
    w = document["window"]
    if w["lower"]:
        end = f"{w['upper']} tokens ({w['ends_by']})" if w["upper"] else f"beyond {steps.MOST_TOKENS} tokens"
        print(f"window  {w['lower']} (at every length from {w['steady']}) to {end}")
    chunk = document["chunk_tokens"] or "none keeps the gap limit"
    print(f"chunk   --max-num-batched-tokens {chunk} on replicas at {document['chunk_at_tokens']} input tokens; "
          f"{models[0].prefill_chunk} on the prefill engine of 1P1D")  # fmt: skip
    print(f"sure    {document['sure']}")
    print(f"1P1D pays from {w['lower']} tokens" if w["lower"] else "1P1D does not pay")
    return 0
