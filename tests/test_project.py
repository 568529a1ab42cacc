"""The files that must be kept in step with each other."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from kvlab import experiments
from kvlab.cli import VERBS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def _normal(spec: str) -> str:
    return re.sub(r"[-_]", "-", spec.lower().replace(" ", ""))


def test_environment_yml_has_what_pyproject_has():
    entries = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(e["pip"] for e in entries if isinstance(e, dict))
    conda = {_normal(e) for e in entries if isinstance(e, str)} - {"pip"}
    assert conda == {_normal(d) for d in PROJECT["dependencies"]} | {_normal("python" + PROJECT["requires-python"])}
    extras = PROJECT["optional-dependencies"]
    assert {_normal(e) for e in pip} == {_normal(d) for d in extras["cpu"] + extras["test"]}


def test_base_install_is_light():
    names = {re.match(r"[\w-]+", d)[0].lower() for d in PROJECT["dependencies"]}
    assert not names & {"torch", "vllm", "nixl", "ray", "ai-dynamo"}
    assert {"cpu", "gpu", "dynamo", "ray", "test"} <= set(PROJECT["optional-dependencies"])


def test_ci_calls_exactly_the_readmes_test_command():
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert "kvlab run post-vs-completion" in blocks[0]
    assert blocks[1].strip().split(" && ")[-1].startswith(".venv/bin/python -m pytest ")
    assert blocks[1].strip() in (ROOT / ".ci/run").read_text()


def test_readme_names_every_verb_and_experiment():
    readme = (ROOT / "README.md").read_text()
    for name in [f"kvlab {v}" for v in VERBS] + list(experiments.EXPERIMENTS):
        assert name in readme, name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_form(path):
    nb = json.loads(path.read_text())
    assert nb["metadata"]["kernelspec"]["name"] == "python3"
    code = [c for c in nb["cells"] if c["cell_type"] == "code"]
    tagged = [c for c in code if "parameters" in c["metadata"].get("tags", [])]
    if path.name != "00_start_here.ipynb":
        assert len(tagged) == 1 and code[0] is tagged[0], "the parameters cell is the first code cell"
    for cell in code:
        assert cell["execution_count"] is not None, "committed with outputs"
        lines = [x for x in "".join(cell["source"]).splitlines() if x.strip() and not x.lstrip().startswith("#")]
        assert cell in tagged or len(lines) <= 12, "a cell this long wants to be a function"
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr"


@pytest.mark.parametrize("name", sorted(experiments.EXPERIMENTS))
def test_parameters_cell_names_every_parameter_with_its_default(name):
    e = experiments.get(name)
    nb = json.loads(e.notebook_path.read_text())
    cell = next(c for c in nb["cells"] if "parameters" in c["metadata"].get("tags", []))
    scope = {}
    exec("".join(cell["source"]), scope)
    del scope["__builtins__"]
    assert set(scope) == set(e.model().model_fields)
    replay = scope.pop("replay")
    assert replay, "a notebook opens as a replay"
    assert (ROOT / "data" / replay / "manifest.json").is_file()
    given, default = e.model()(**scope).model_dump(), e.model()().model_dump()
    del given["replay"], default["replay"]
    assert given == default


def test_committed_text_names_no_machine():
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout.split(b"\0")
    if files == [b""]:
        pytest.skip("not a git checkout")
    wrong = re.compile(rb"/work/|/root/|/home/\w|pypi-more|\.library")
    for name in filter(None, files):
        path = ROOT / name.decode()
        if path.suffix in {
            ".py",
            ".md",
            ".yaml",
            ".yml",
            ".toml",
            ".ipynb",
            ".json",
            ".cfg",
            ".csv",
            ".txt",
            ".log",
            "",
        }:
            if path == Path(__file__) or not path.is_file():
                continue
            found = wrong.search(path.read_bytes())
            assert not found, f"{path}: {found[0]!r}"


def test_import_is_light():
    code = "import sys, kvlab; print([m for m in ('pandas','altair','torch','nixl','papermill') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert out.strip() == "[]"


def test_readme_has_every_rule_of_check():
    from kvlab.check import rules_markdown

    assert rules_markdown().strip() in (ROOT / "README.md").read_text()
