"""Every parser of text from elsewhere, on damaged text: an answer or BadInput, nothing else."""

import io
import json
import lzma
import math
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_machine import TOPOLOGY

from kvlab import schema
from kvlab.capture import carrier, counter_text, foreign, logs, machine, nixl, redact, ucx, ucx_build, vllm
from kvlab.errors import BadInput
from kvlab.verbs import import_

DATA = Path(__file__).parent.parent / "data"
CASES = Path(__file__).parent.parent / "cases"
METRICS = [
    lzma.decompress((DATA / f"metrics/h200_decode_{w}.txt.xz").read_bytes()).decode() for w in ("before", "after")
]
#: only the samples that are read, so that damage falls on them
NIXL_ONLY = ["\n".join(x for x in text.splitlines() if "nixl" in x) + "\n" for text in METRICS]
COUNTERS = "\n".join((CASES / f"{n}.log").read_text("utf-8") for n in (48, 50, 52))
KV_LINES = (CASES / "21.log").read_text("utf-8") + (CASES / "23.log").read_text("utf-8")
SMI = "0, NVIDIA H200, 143771, 570.86\n1, NVIDIA H200, 143771, 570.86\n"
LINKS = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
SAID = (
    "kvlab version 1.22.0\n#  resource 0 :  md 0 dev 0 flags -- tcp/lo\nUCX_TLS=all\nkvlab module cuda\n"
    "kvlab module cuda cannot load: libcuda.so.1\nkvlab cma yes\n"
)
#: what stands for a number, a word, a line when something went wrong
PIECES = [
    "", "\n", " ", "nan", "inf", "-1", "1e400", "9" * 30, "9" * 5000, "²", "٣", "\0", "�", "=", ":", "{", '"', "|",
    "0x", "\x1b[",
]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """``text`` with pieces cut out, doubled, moved and put in."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    for _ in range(draw(st.integers(1, 8))):
        if not text:
            break
        at, length = rng.randrange(len(text)), rng.choice((0, 1, 1, 3, 30))
        piece = rng.choice([*PIECES, text[(to := rng.randrange(len(text))) : to + 40]])
        text = text[:at] + piece + text[at + length :]
    return text


def told(parser, *words):
    try:
        return parser(*words)
    except BadInput as error:
        assert "\n" not in str(error)
        return None


@given(damaged(COUNTERS))
@example("/sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data:0432")
@settings(max_examples=80, deadline=None)
def test_counters(text):
    rows = counter_text.read(text)
    assert all(r["bytes"] is None or r["bytes"] >= 0 for r in rows)
    assert all(isinstance(line, str) for _, _, line in counter_text.findings(rows))


@given(damaged(KV_LINES))
@settings(max_examples=80, deadline=None)
def test_lines_of_kv_metrics(text):
    json.dumps([vllm.kv_metrics(x) for x in text.splitlines()])


@given(damaged(NIXL_ONLY[0]), damaged(NIXL_ONLY[1]))
@settings(max_examples=40, deadline=None)
def test_scrapes(before, after):
    found = told(foreign.metrics, before, after, "a")
    if found:
        schema.conform("engine_metrics", found[0])
        assert found[1].empty or (found[1]["bytes"].map(math.isfinite)).all()


@given(damaged((DATA / "foreign/nixlbench.log").read_text("utf-8")))
@settings(max_examples=60, deadline=None)
def test_nixlbench(text):
    found = told(foreign.nixlbench, text, "a")
    assert found is None or (found[0]["bytes"] > 0).all()


@given(st.sampled_from(sorted(p.name for p in (DATA / "rings").glob("*.xz"))), st.data())
@settings(max_examples=60, deadline=None)
def test_rings(name, data):
    whole = bytearray(lzma.decompress((DATA / "rings" / name).read_bytes()))
    for at in data.draw(st.lists(st.integers(0, min(len(whole), 400) - 1), min_size=1, max_size=6)):
        whole[at] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ring")
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        found = told(nixl.read_ring, path)
        assert found is None or found[1]["reads"] == len(found[0])


@given(damaged(SMI), damaged(LINKS), damaged(TOPOLOGY), damaged(SAID))
@settings(max_examples=80, deadline=None)
def test_what_the_machine_says(listing, links, matrix, said):
    for gpu in machine.gpus(listing, links):
        assert 0 <= gpu["nvlinks_up"] <= gpu["nvlinks"]
    assert all("X" not in row.values() for row in machine.topology(matrix).values())
    json.dumps(ucx_build.parse(said))


@given(st.sampled_from(sorted(CASES.glob("*.log"))).flatmap(lambda p: damaged(p.read_text("utf-8"))))
@settings(max_examples=120, deadline=None)
def test_symptoms_and_secrets(text):
    for line in text.splitlines():
        found = logs.symptom(logs.clean(line.encode("utf-8", "surrogatepass")))
        assert found is None or all(found)
        logs.reasons(line)
    json.dumps(ucx.read([io.BytesIO(text.encode("utf-8", "surrogatepass"))]).document())
    redact.redact(text)
    redact.secrets([text, {text[:20]: text[20:40]}])


@given(st.text(max_size=40), st.text(max_size=40))
def test_names_of_transports(a, b):
    assert isinstance(carrier.agrees(a, b), bool) and isinstance(carrier.known_transport(a), bool)


@pytest.mark.parametrize("name", ["aiperf_profile_export.jsonl", "guidellm_benchmarks.json", "vllm_bench_1p1d.json"])
def test_values_of_other_kinds(name, tmp_path):
    """A value of a result is null, a text, a list, a huge number: read into tables that fit, or one line."""
    text = (DATA / "foreign" / name).read_text("utf-8")
    lines = name.endswith("l")
    document = [json.loads(x) for x in text.splitlines()] if lines else json.loads(text)
    places = list(_places(document))
    rng, path = random.Random(1), tmp_path / name
    for place in rng.sample(places, min(len(places), 30)):
        for value in (None, "x", [], {}, 10**400, -1):
            changed = _changed(document, place, value)
            path.write_text("\n".join(map(json.dumps, changed)) if lines else json.dumps(changed), "utf-8")
            told(_import, str(path))


def _import(path):
    kind, content = foreign.recognise(path)
    if kind != "log":
        tables, _ = import_._read(kind, [content], [path], ["a"])
        for table, frame in tables.items():
            schema.conform(table, frame.reindex(columns=[c.name for c in schema.TABLES[table]]))
        json.dumps(import_.parameters(kind, tables, [content]))


def _places(document, at=()):
    if isinstance(document, dict | list):
        for key in document if isinstance(document, dict) else range(len(document)):
            yield (*at, key)
            yield from _places(document[key], (*at, key))


def _changed(document, place, value):
    if not place:
        return value
    copy = document.copy()
    copy[place[0]] = _changed(document[place[0]], place[1:], value)
    return copy
