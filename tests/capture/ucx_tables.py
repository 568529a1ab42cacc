"""Writes protocol tables as the versions of UCX print them, for tests that hold over all layouts."""

from __future__ import annotations

from dataclasses import dataclass

LAYOUTS = ("1.13", "1.14", "1.15", "1.20", "1.21 used", "1.22", "1.22 used")


@dataclass(frozen=True)
class Spec:
    """One table; rows are (range, description, config, count)."""

    rows: tuple[tuple[str, str, str, int], ...]
    operation: str = "remote memory read by ucp_get*"
    attributes: str = "(multi)"
    memory: str = " into cuda/GPU0 from cuda/dev[0]"
    context: str = "ucp_context_0"
    locality: str = "intra-node"
    config: int = 1


def lines(spec: Spec, layout: str) -> list[str]:
    """Return the table's lines without any prefix."""
    function = spec.operation + (spec.attributes or ("()" if layout == "1.13" else "")) + spec.memory
    old = layout in ("1.13", "1.14")
    name = f"{spec.context} ep_cfg[{spec.config}]" if old else f"{spec.context} {spec.locality} cfg#{spec.config}"
    used = layout.endswith("used")
    if layout.startswith("1.22"):
        head = (["Count"] if used else []) + ["Range", "Description", "Config"]
        body = [([str(n)] if used else []) + [r, d, c] for r, d, c, n in spec.rows]
        wide = [max(len(x[i]) for x in [head, *body]) for i in range(len(head))]
        rule = "+" + "+".join("-" * (w + 2) for w in wide) + "+"
        full = sum(wide) + 3 * len(wide) - 3
        wide[-1] += max(0, max(len(name), len(function)) - full)
        full = max(full, len(name), len(function))
        titles = [f"| {t:<{full}} |" for t in (name, function)]
        right = len(head) - 2

        def row(cells: list[str]) -> str:
            padded = [
                f"{c:>{w}}" if i < right else f"{c:<{w}}" for i, (c, w) in enumerate(zip(cells, wide, strict=True))
            ]
            return "| " + " | ".join(padded) + " |"

        centred = "| " + " | ".join(f"{h:^{w}}" for h, w in zip(head, wide, strict=True)) + " |"
        return [rule, *titles, rule, centred, rule, *(row(b) for b in body), rule]
    first = max(len(name), *(len(r) for r, *_ in spec.rows)) if spec.rows else len(name)
    config = max((len(c) for _, _, c, _ in spec.rows), default=0)
    text = max([len(d) for _, d, _, _ in spec.rows] + [len(function) - config])
    cells = []
    for r, d, c, n in spec.rows:
        left = f"{n} {r:>{first - len(str(n)) - 1}}" if used else f"{r:>{first}}"
        cells.append(f"| {left} | {d:<{text}} | {c:<{config}} |")
    wide = f"+{'-' * (first + 2)}+{'-' * (text + config + 5)}+"
    rule = f"+{'-' * (first + 2)}+{'-' * (text + 2)}+{'-' * (config + 2)}+"
    return [wide, f"| {name:>{first}} | {function:<{text + config + 3}} |", rule, *cells, rule]


def stamped(text: list[str], host: str = "node-a", pid: int = 101, thread: str = "0", before: str = "") -> list[str]:
    """Put UCX's own prefix (and ``before`` it a wrapper's) in front of each line."""
    return [f"{before}[1796093657.{100000 + i:06d}] [{host}:{pid:<5}:{thread}]   {x}" for i, x in enumerate(text)]
