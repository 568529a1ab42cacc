"""A notebook's cells run in this process, without a kernel: what each shows, or its error."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from kvlab import experiments


def replay(experiment: str, run: Path | str, run_dir: Path | str = "") -> list[tuple[str, str]]:
    """Run the notebook of ``experiment`` on ``run``; return (source, what it shows) of every cell behind the first."""
    book = json.loads(experiments.get(experiment).notebook_path.read_text("utf-8"))
    space: dict[str, Any] = {}
    shown: list[tuple[str, str]] = []
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        if "parameters" in cell["metadata"].get("tags", []):
            exec(source, space)
            space |= {"replay": str(run), "run_dir": str(run_dir)}
            continue
        shown.append((source, _value(ast.parse(source), space)))
    return shown


def _value(tree: ast.Module, space: dict[str, Any]) -> str:
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), space)
    if not isinstance(last, ast.Expr):
        return ""
    if isinstance(last.value, ast.Call) and getattr(last.value.func, "id", "") == "print":
        return str(eval(compile(ast.Expression(last.value.args[0]), "cell", "eval"), space))
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
    if hasattr(value, "_repr_mimebundle_"):
        return json.dumps(value._repr_mimebundle_())
    if hasattr(value, "_repr_html_"):
        value._repr_html_()
    return str(value)
