"""The reader of UCX's tables: every layout and prefix, recorded versions, public cases, and hostile bytes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from ucx_tables import LAYOUTS, Spec, lines, stamped

from kvlab import schema
from kvlab.capture import logs, ucx
from kvlab.errors import BadInput

HERE = Path(__file__).parent.parent
RECORDED = HERE / "data" / "ucx"
CASES = yaml.safe_load((HERE / "cases" / "explain.yaml").read_text("utf-8"))

TWO_PATHS = Spec(
    (
        ("0", "copy-out", "rc_mlx5/mlx5_0:1/path0", 0),
        ("1..64", "software emulation", "rc_mlx5/mlx5_0:1/path0", 2),
        ("65..inf", "zero-copy", "rc_mlx5/mlx5_0:1 50% on path0 and 50% on path1", 192),
    )
)
EMULATED = Spec((("0..inf", "software emulation", "tcp/eth0", 64),))
NVLINK = Spec((("0..inf", "zero-copy", "cuda_ipc/cuda", 64),))
PUT = Spec(
    (("0..inf", "zero-copy", "52% on tcp/lo and 48% on tcp/eth0", 3),),
    operation="remote memory write by ucp_put*",
    attributes="",
    memory=" from host memory to host",
)
BY_SIZE = Spec(
    (
        ("0..8K", "software emulation", "tcp/eth0", 5),
        ("8193..64K", "copy-out", "rc_mlx5/mlx5_0:1", 0),
        ("65537..inf", "zero-copy", "rc_mlx5/mlx5_0:1", 9),
    )
)


def read(text: str | list[str] | bytes, **how: Any) -> ucx.Evidence:
    data = text if isinstance(text, bytes) else ("\n".join(text) if isinstance(text, list) else text).encode()
    return ucx.read(io.BytesIO(data), **how)


def codes(evidence: ucx.Evidence) -> list[str]:
    _ = evidence.pull
    return [p["code"] for p in evidence.problems]


# ------------------------------------------------------------------------------------------- layouts and prefixes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "before",
    [
        "",
        "(Worker_TP0 pid=2749) ",
        "(RayWorkerWrapper pid=438, ip=192.0.2.6) ",
        "\x1b[36m(EngineCore_DP0 pid=99)\x1b[0m ",
        "[1;36m(EngineCore pid=99)[0;0m ",
        "2026-07-13T16:33:58.123456789Z stdout F ",
        "decode-1  | ",
        "[pod/decode-0/vllm] ",
        "[1,3]<stderr>:",
        "Loading:  50%|#####     | 1/2\r",
    ],
)
def test_layouts_and_prefixes(layout: str, before: str) -> None:
    evidence = read(stamped(lines(TWO_PATHS, layout), pid=13245, before=before))
    (table,) = evidence.document()["protocols"]
    assert (table["host"], table["pid"], table["thread"]) == ("node-a", 13245, "0")
    assert table["context"] == "ucp_context_0"
    assert table["config"] == 1
    assert table["locality"] == (None if layout in ("1.13", "1.14") else "intra-node")
    assert table["attributes"] == ["multi"]
    assert (table["local"], table["remote"]) == ("cuda/GPU0", "cuda/dev[0]")
    assert [(r["min_bytes"], r["max_bytes"]) for r in table["rows"]] == [(0, 0), (1, 64), (65, None)]
    assert [r["selections"] for r in table["rows"]] == ([0, 2, 192] if layout.endswith("used") else [None] * 3)
    assert [tuple(x.values()) for x in table["rows"][2]["lanes"]] == [
        ("rc_mlx5", "mlx5_0:1", "path0", 50),
        ("rc_mlx5", "mlx5_0:1", "path1", 50),
    ]
    pull = evidence.pull
    assert (pull.transport, pull.devices, pull.paths, pull.emulated) == ("rc_mlx5", ["mlx5_0:1"], 2, False)
    assert pull.lines == [table["rows"][2]["line"]]
    assert "software-emulation" not in codes(evidence)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bare", ["stamp only", "nothing", "file and level", "no borders", "no last bar"])
def test_less_than_the_whole_prefix(layout: str, bare: str) -> None:
    text = lines(TWO_PATHS, layout)
    if bare == "stamp only":
        text = [f"[1787639312.15{i:04d}] {x}" for i, x in enumerate(text)]
    elif bare == "file and level":
        text = [f"[1645019897.519901] [host-b:13202:0]     proto_debug.c:406  UCX  INFO  {x}" for x in text]
    elif bare == "no borders":
        text = [x for x in text if "+--" not in x]
    elif bare == "no last bar":
        text = [x.rstrip("| ") if x.startswith("|") else x for x in text]
    evidence = read(text)
    assert (evidence.pull.transport, evidence.pull.paths) == ("rc_mlx5", 2)
    assert len(evidence.tables) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_interleaved_threads_processes_and_hosts(layout: str) -> None:
    parts = [
        stamped(lines(PUT, layout), pid=1),
        stamped(lines(EMULATED, layout), pid=2),
        stamped(lines(EMULATED, layout), pid=2, thread="a"),
        stamped(lines(PUT, layout), host="node-b", pid=2),
        stamped(lines(EMULATED, layout), host="node-b", pid=2, thread="3"),
    ]
    mixed = [x for x in chain.from_iterable(zip_longest(*parts)) if x]
    document = read(mixed).document()
    assert len(document["protocols"]) == 5
    assert all(len(t["rows"]) == 1 for t in document["protocols"])
    assert document["pull"]["transport"] == "tcp"
    assert not [p for p in document["problems"] if p["code"].startswith("row-")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_never_borrows_a_header(layout: str) -> None:
    header = [x for x in lines(NVLINK, layout) if "software" not in x]
    stray = stamped([lines(EMULATED, layout)[-2]], pid=2)
    evidence = read([*stamped(header[:-2], pid=1), *stray])
    assert evidence.pull.transport is None
    assert {"row-without-header", "header-without-rows"} <= set(codes(evidence))
    # after a table is closed by its border a further row belongs to nobody
    evidence = read([*stamped(lines(NVLINK, layout)), *stamped([lines(EMULATED, layout)[-2]])])
    assert evidence.pull.transport == "cuda_ipc"
    assert "row-without-header" in codes(evidence)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", range(60, 130, 7))
def test_wrapped_rows(layout: str, width: int) -> None:
    text = stamped(lines(TWO_PATHS, layout))
    wrapped = [x[i : i + width] for x in text for i in range(0, len(x), width)]
    pull = read(wrapped).pull
    # a wrap must not make it say anything wrong; where it can be undone it is
    assert pull.transport in ("rc_mlx5", None)
    assert pull.emulated in (False, None)
    if width > 100:
        assert (pull.transport, pull.paths) == ("rc_mlx5", 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_line_that_broke_into_another(layout: str) -> None:
    first, second = stamped(lines(NVLINK, layout), pid=1), stamped(lines(PUT, layout), pid=2)
    at = next(i for i, x in enumerate(first) if "zero-copy" in x)
    first[at] = first[at] + second[0]
    pull = read([*first, *second[1:]]).pull
    assert pull.transport == "cuda_ipc"


# ------------------------------------------------------------------------------------------------- config cells


@pytest.mark.parametrize(
    ("config", "lanes"),
    [
        ("tcp/lo", [("tcp", "lo", None, 100)]),
        ("rc_mlx5/mlx5_1:1/path0", [("rc_mlx5", "mlx5_1:1", "path0", 100)]),
        ("52% on tcp/lo and 48% on tcp/eth0", [("tcp", "lo", None, 52), ("tcp", "eth0", None, 48)]),
        (
            "55% on knem/memory and 45% on rc_mlx5/mlx5_0:1",
            [("knem", "memory", None, 55), ("rc_mlx5", "mlx5_0:1", None, 45)],
        ),
        (
            "34% on rc_mlx5/a:1/path0, 33% on rc_mlx5/a:1/path1 and 33% on rc_mlx5/b:1/path0",
            [("rc_mlx5", "a:1", "path0", 34), ("rc_mlx5", "a:1", "path1", 33), ("rc_mlx5", "b:1", "path0", 33)],
        ),
        ("rc_mlx5/a:1/path1 50% on  and 50% on", [("rc_mlx5", "a:1", "path1", 50), ("rc_mlx5", "a:1", "path1", 50)]),
    ],
)
def test_lanes(config: str, lanes: list[tuple[Any, ...]]) -> None:
    found = [(x.transport, x.device, x.path, x.share) for x in ucx.parse_lanes(config)]
    assert found == lanes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_config_cut_at_127_characters(layout: str) -> None:
    whole = (
        ", ".join(f"{13 if i < 4 else 12}% on rc_mlx5/mlx5_{i}:1" for i in range(7)) + " and 12% on rc_mlx5/mlx5_7:1"
    )
    evidence = read(stamped(lines(Spec((("0..inf", "zero-copy", whole[:127], 1),)), layout)))
    row = evidence.document()["protocols"][0]["rows"][0]
    assert row["truncated"]
    assert [x["share"] for x in row["lanes"]] == [13, 13, 13, 13, 12]  # as printed, never scaled up to 100
    assert [x["device"] for x in row["lanes"]] == [f"mlx5_{i}:1" for i in range(5)]
    assert evidence.pull.transport == "rc_mlx5"
    assert "36 percent of the share not shown" in evidence.pull.verdict
    assert "config-cut" in codes(evidence)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cut_row_claims_nothing_it_does_not_show(layout: str) -> None:
    text = stamped(lines(TWO_PATHS, layout))
    at = next(i for i, x in enumerate(text) if "65..inf" in x)
    for end in range(text[at].index("zero-copy"), len(text[at])):
        pull = read([*text[:at], text[at][:end]]).pull
        assert pull.transport in (None, "rc_mlx5")
        assert set(pull.devices) <= {"mlx5_0:1"}


def test_two_devices_are_not_two_paths() -> None:
    spec = Spec((("0..inf", "zero-copy", "50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1", 1),))
    pull = read(stamped(lines(spec, "1.20"))).pull
    assert (pull.devices, pull.paths) == (["mlx5_0:1", "mlx5_1:1"], 1)
    assert "2 devices at once" in pull.verdict


@pytest.mark.parametrize(
    ("description", "staged", "estimate"),
    [
        ("(?) rendezvous cuda_copy, fenced write to remote, cuda_copy", True, True),
        ("rendezvous gdr_copy, zero-copy read from remote, frag host", True, False),
        ("rendezvous rocm_copy, flushed write to remote", True, False),
        ("zero-copy", False, False),
        ("copy-out", False, False),
    ],
)
def test_staging_and_estimates(description: str, staged: bool, estimate: bool) -> None:
    pull = read(stamped(lines(Spec((("0..inf", description, "rc_mlx5/mlx5_0:1", 1),)), "1.20"))).pull
    assert (pull.transport, pull.staged, pull.estimate) == ("rc_mlx5", staged, estimate)


# ------------------------------------------------------------------------------------------------- the decision


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if not x.endswith("used")])
@pytest.mark.parametrize(
    ("size", "transport", "emulated"),
    [
        (1, "tcp", True),
        (8192, "tcp", True),
        (8193, "rc_mlx5", False),
        (65536, "rc_mlx5", False),
        (None, "rc_mlx5", False),
    ],
)
def test_the_row_of_the_descriptor_size(layout: str, size: int | None, transport: str, emulated: bool) -> None:
    evidence = read(stamped(lines(BY_SIZE, layout)), descriptor_bytes=size)
    assert (evidence.pull.transport, evidence.pull.emulated) == (transport, emulated)
    assert ("descriptor-size-assumed" in codes(evidence)) == (size is None)
    assert ("assumed" in evidence.pull.verdict) == (size is None)


METRICS = (
    "KV Transfer metrics: Num successful transfers=2, Avg xfer time (ms)=3.0, "
    "Avg MB per transfer={}, Avg number of descriptors={}"
)


def test_the_size_comes_from_the_metrics_lines() -> None:
    small = read([*stamped(lines(BY_SIZE, "1.20")), METRICS.format(1.0, 256.0)])  # 4 KiB each
    assert (small.pull.transport, small.pull.emulated) == ("tcp", True)
    large = read([*stamped(lines(BY_SIZE, "1.20")), METRICS.format(32.0, 256.0)])
    assert large.pull.transport == "rc_mlx5"
    assert "128 KiB on average" in large.pull.verdict
    both = read([*stamped(lines(BY_SIZE, "1.20")), METRICS.format(1.0, 256.0), METRICS.format(32.0, 256.0)])
    assert both.pull.transport is None
    assert "mixed" in both.pull.verdict


def test_no_assumption_where_every_descriptor_takes_the_row() -> None:
    evidence = read(stamped(lines(TWO_PATHS, "1.20")))
    assert "every size from 65 bytes on takes this row" in evidence.pull.verdict
    assert "descriptor-size-assumed" not in codes(evidence)


def test_counts_decide_before_an_assumption() -> None:
    spec = Spec((("0..256K", "software emulation", "tcp/eth0", 0), ("262145..inf", "zero-copy", "cuda_ipc/cuda", 40)))
    assert read(stamped(lines(spec, "1.22 used"))).pull.transport == "cuda_ipc"
    assert read(stamped(lines(spec, "1.22"))).pull.transport == "tcp"
    # a table that was counted and not used does not contradict one that was
    text = stamped(lines(Spec((("0..inf", "software emulation", "tcp/lo", 0),)), "1.22 used"), pid=1)
    assert read([*text, *stamped(lines(NVLINK, "1.22 used"), pid=2)]).pull.transport == "cuda_ipc"


def test_ranks_that_disagree_are_not_picked_from() -> None:
    text = [*stamped(lines(NVLINK, "1.20"), pid=1), *stamped(lines(EMULATED, "1.20"), pid=2)]
    evidence = read(text)
    assert (evidence.pull.transport, evidence.pull.likely, evidence.pull.emulated) == (None, None, None)
    assert "mixed" in evidence.pull.verdict
    assert "cuda_ipc" in evidence.pull.verdict and "tcp" in evidence.pull.verdict
    assert len(evidence.pull.lines) == 2
    assert {"conflicting-reads", "software-emulation"} <= set(codes(evidence))


def test_memory_kinds_and_localities() -> None:
    host = Spec((("0..inf", "zero-copy", "cma/memory", 1),), memory=" into host memory from host")
    own = Spec((("0..inf", "zero-copy", "cuda_copy/cuda", 1),), locality="self", config=0)
    text = [*stamped(lines(host, "1.20")), *stamped(lines(own, "1.20")), *stamped(lines(NVLINK, "1.20"))]
    assert read(text).pull.transport == "cuda_ipc"
    assert read(text, local="DRAM", remote="DRAM").pull.transport == "cma"
    assert read(text, local="cuda").pull.transport == "cuda_ipc"
    assert read([*text, "INFO Registering KV_Caches. use_mla: False, kv_buffer_device: cpu, x"]).pull.transport == "cma"
    assert read(stamped(lines(host, "1.20")), local="VRAM").pull.transport is None
    alone = read(stamped(lines(own, "1.20")))
    assert alone.pull.transport is None
    assert "self-endpoint-only" in codes(alone)


def test_what_never_decides() -> None:
    am = Spec(
        (("0..inf", "short", "tcp/lo", 1),),
        operation="active message by ucp_am_send*",
        attributes="(egr)",
        memory=" from host memory",
    )
    text = [
        "export UCX_TLS=rc,cuda_copy,cuda_ipc",
        *stamped(lines(PUT, "1.22")),
        *stamped(lines(am, "1.22")),
        "ucp_context_0 intra-node cfg#1 rma(cuda_ipc/cuda) am(tcp/lo cuda_ipc/cuda) ka(tcp/lo)",
    ]
    evidence = read(text)
    assert (evidence.pull.transport, evidence.pull.emulated) == (None, None)
    assert evidence.pull.verdict.startswith("not determined")
    (advice,) = [p["advice"] for p in evidence.problems if p["code"] == "not-pull-evidence"]
    assert "UCX_PROTO_INFO=used" in advice and "cleanly" in advice


def test_a_lane_list_is_not_the_read() -> None:
    """Seen on a real log: rma_am(tcp/lo) and the read went over cma, which stands under am(...) only."""
    evidence = ucx.read(RECORDED / "nixl_1.4.1_info.log")
    assert evidence.pull.transport == "cma"
    lanes = [x for x in (RECORDED / "nixl_1.4.1_info.log").read_text().splitlines() if "rma_am" in x]
    assert read(lanes).pull.likely is None
    tcp = "ucp_context_0 intra-node cfg#2 rma_am(tcp/eth1)  amo_am(tcp/eth1)  am(tcp/eth1 cuda_ipc/cuda)  ka(tcp/eth1)"
    assert str(read(tcp).pull.likely).startswith("tcp (")


@pytest.mark.parametrize(
    ("transport", "expected", "holds"),
    [
        ("rc_mlx5", "rc_mlx5", True),
        ("rc_mlx5", "rc", True),
        ("rc_mlx5", "RoCE", True),
        ("dc_mlx5", "ib", True),
        ("dc_mlx5", "rc", False),
        ("rc_verbs", "rc_mlx5", False),
        ("cuda_ipc", "nvlink", True),
        ("cma", "shared memory", True),
        ("sysv", "sm", True),
        ("posix", "mm", True),
        ("cma", "mm", False),
        ("tcp", "tcp", True),
        ("tcp", "rdma", False),
        ("knem+rc_mlx5", "rdma", False),
        ("knem+rc_mlx5", "rdma,sm", True),
        (None, "tcp", False),
    ],
)
def test_agrees(transport: str | None, expected: str, holds: bool) -> None:
    assert ucx.agrees(transport, expected) is holds


# ------------------------------------------------------------------------------------------- recorded and public logs


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.log")), ids=lambda p: p.stem)
def test_recorded_versions(path: Path) -> None:
    evidence = ucx.read(path)
    pull = evidence.pull
    if "no_am" in path.name:
        assert pull.transport is None
        assert codes(evidence)[0] == "no-active-message-transport"
        assert {"transport": "cma", "device": "memory", "reason": "no am bcopy"} in evidence.problems[0]["reasons"]
        return
    if "transport_tables" in path.name:
        assert [(a["transport"], a["enabled"]) for a in evidence.available][:3] == [
            ("tcp", True),
            ("sysv", False),
            ("posix", False),
        ]
        assert evidence.available[0]["devices"] == [
            {"device": "eth0", "enabled": True},
            {"device": "lo", "enabled": True},
        ]
        assert evidence.lanes[0]["lanes"]["rma_bw"] == ["tcp/lo", "tcp/eth0"]
        return
    tcp = path.name in ("nixl_1.5.1_used.log", "perftest_1.21.0_used.log", "perftest_1.22.0_used.log")
    assert (pull.transport, pull.emulated) == (("tcp", True) if tcp else ("cma", False))
    if "nixl" in path.name and "used" in path.name:
        assert sum(r.selections or 0 for _, r, _ in evidence.deciding) == 48  # 3 transfers of 16 descriptors


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['case']} {c['what']}")
def test_public_cases(case: dict[str, Any]) -> None:
    evidence, want = ucx.read(HERE / "cases" / f"{case['case']}.log"), case["want"]
    document = evidence.document()
    pull, found = document["pull"], [p["code"] for p in document["problems"]]
    assert pull["transport"] == want.get("transport")
    for key in ("devices", "paths", "emulated", "staged", "lines"):
        if key in want:
            assert pull[key] == want[key], key
    assert (pull["likely"] or "").split(" ")[0] == want.get("likely", "")
    assert want.get("verdict", "") in pull["verdict"]
    assert set(want.get("problems", [])) <= set(found)
    assert not set(want.get("absent", [])) & set(found)
    if "first" in want:
        assert next(p["code"] for p in document["problems"] if p["line"]) == want["first"]
    if "tables" in want:
        assert len(document["protocols"]) == want["tables"]
    if "selections" in want:
        assert document["protocols"][0]["rows"][0]["selections"] == want["selections"]
    if "lanes" in want:
        assert {k: len(document["lanes"][0]["lanes"][k]) for k in want["lanes"]} == want["lanes"]
    assert [m["num_successful_transfers"] for m in document["kv_metrics"]] == want.get("metrics", [])
    assert document["telemetry"]["pulls"] == want.get("telemetry", [])
    if "reasons" in want:
        assert max(len(p.get("reasons", [])) for p in document["problems"]) == want["reasons"]
    assert all(p["advice"] for p in document["problems"])


def test_identical_tables_are_merged() -> None:
    evidence = read(stamped(lines(EMULATED, "1.22")) * 50)
    (table,) = evidence.document()["protocols"]
    assert (table["count"], table["line"]) == (50, 3)
    assert evidence.totals["protocols"] == 50


def test_the_first_thousand_of_a_kind_are_kept() -> None:
    evidence = read([METRICS.format(i + 1, 4) for i in range(1500)] + ["NIXL_ERR_BACKEND"] * 1200)
    assert len(evidence.kv_metrics) == 1000 and evidence.totals["kv_metrics"] == 1500
    assert codes(evidence).count("backend-error") == 1000 and evidence.totals["problem backend-error"] == 1200


def test_transport_rows_fit_the_schema() -> None:
    evidence = read([*stamped(lines(PUT, "1.22")), *stamped(lines(TWO_PATHS, "1.22"))])
    frame = ucx.transport_rows(evidence, "RoCE", "initiator")
    assert schema.conform("transports", frame).num_rows == 4
    assert frame.loc[frame["decides"], "description"].tolist() == ["zero-copy"]
    empty = ucx.transport_rows(read(""), "RoCE", "initiator")
    assert schema.conform("transports", empty).num_rows == 0


# ------------------------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize(
    "pack",
    [
        gzip.compress,
        zstandard.ZstdCompressor().compress,
        lzma.compress,
        bz2.compress,
        lambda b: gzip.compress(b[:900]) + gzip.compress(b[900:]),
        lambda b: b.replace(b"\n", b"\r\n"),
        lambda b: b.decode().encode("utf-16"),
    ],
)
def test_packed_inputs(pack: Any, tmp_path: Path) -> None:
    data = "\n".join(stamped(lines(TWO_PATHS, "1.22"))).encode()
    path = tmp_path / "log"
    path.write_bytes(pack(data))
    assert ucx.read(path).pull.transport == "rc_mlx5"
    assert read(pack(data)).pull.lines == [9]


def test_damage_is_said_and_what_was_read_counts(tmp_path: Path) -> None:
    rng = random.Random(1)
    noise = "\n".join(f"{rng.random()}" for _ in range(100_000))
    data = gzip.compress(("\n".join(stamped(lines(NVLINK, "1.22"))) + "\n" + noise).encode())
    evidence = read(data[: len(data) // 2])
    assert evidence.pull.transport == "cuda_ipc"
    assert "input-damaged" in codes(evidence)
    with pytest.raises(BadInput, match="cannot be read"):
        ucx.read(tmp_path / "absent")
    with pytest.raises(BadInput, match="cannot be read"):
        ucx.read(tmp_path)


def test_docker_json_lines() -> None:
    text = [
        f'{{"log":"{x}\\n","stream":"stderr","time":"2026-01-01T00:00:00Z"}}' for x in stamped(lines(TWO_PATHS, "1.22"))
    ]
    assert read(text).pull.transport == "rc_mlx5"


def test_line_numbers_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ["x" * 50] * 37 + stamped(lines(TWO_PATHS, "1.22")) + ["y"] * 5 + stamped(lines(PUT, "1.20"))
    expected = read(text).document()
    for chunk in (1, 7, 64, 1000):
        monkeypatch.setattr(logs, "CHUNK", chunk)
        assert read(text).document() == expected
    assert expected["pull"]["lines"] == [46]


# ------------------------------------------------------------------------------------------------- hostile bytes

_PIECES = [
    x.encode() for spec in (TWO_PATHS, EMULATED, PUT) for layout in LAYOUTS for x in stamped(lines(spec, layout))
]
_PIECES += [p.read_bytes() for p in sorted((HERE / "cases").glob("*.log"))]
_PIECES += [
    b"|",
    b"+--",
    b" | 0..inf | ",
    b"\x1b[",
    b"UCX  WARN",
    b"] [",
    b"\x28\xb5\x2f\xfd",
    b"\x1f\x8b",
    b"cfg#99999999999999999999",
]


@given(
    st.lists(st.one_of(st.sampled_from(_PIECES), st.binary(max_size=60)), max_size=12),
    st.sampled_from([b"\n", b"", b"\r", b"\n\n"]),
)
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_read(pieces: list[bytes], between: bytes) -> None:
    evidence = read(between.join(pieces))
    document = evidence.document()
    assert set(document["pull"]) == {
        "transport",
        "likely",
        "devices",
        "paths",
        "emulated",
        "staged",
        "estimate",
        "verdict",
        "lines",
    }
    schema.conform("transports", ucx.transport_rows(evidence, "a", "p"))


@given(st.sampled_from(LAYOUTS), st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_mutated_tables_never_name_a_transport_that_is_not_there(layout: str, seed: int) -> None:
    rng = random.Random(seed)
    text = "\n".join(stamped(lines(BY_SIZE, layout)) + stamped(lines(EMULATED, layout), pid=7))
    for _ in range(rng.randint(1, 12)):
        at, to = rng.randrange(len(text)), rng.randrange(len(text))
        kind = rng.randrange(4)
        if kind == 0:
            text = text[:at] + text[at + rng.randint(1, 80) :]
        elif kind == 1:
            text = text[:at] + rng.choice("|+-\n[]:/% 0") + text[at:]
        elif kind == 2:
            text = text[:at] + text[to : to + 60] + text[at:]
        else:
            text = text[:at] + text[at + 1 :]
    pull = read(text or " ").pull
    assert pull.transport is None or all(t in text for t in pull.transport.split("+"))


@pytest.mark.parametrize(
    "line",
    [
        b"|" + b"x" * 200_000,
        b"UCX " + b"a" * 8000 + b" cfg#1",
        b"| " + b"A" * 8000 + b" | remote memory read by ucp_get*(multi) into " + b"b" * 8000,
        b"KV Transfer metrics: " + b"A" * 8000,
        b"no active messages transport: " + b"a/" * 4000,
        b"cfg#1 " + b"rma(" * 2000,
        b" " * 8000 + b"| 0..inf | zero-copy | " + b"1% on tcp/a and " * 400,
    ],
)
def test_hostile_lines_take_no_time(line: bytes) -> None:
    """Quadratic patterns would take minutes here; the limit is pytest's own."""
    data = b"\n".join(line + b"%d" % i for i in range(300))
    assert read(data).pull.transport is None or b"zero-copy" in line


def test_many_threads_do_not_lose_tables() -> None:
    text = [x for pid in range(10_500) for x in stamped(lines(EMULATED, "1.20"), pid=pid)]
    evidence = read([*text, *stamped(lines(EMULATED, "1.20"), pid=1)])
    assert evidence.totals["protocols"] == 10_501
    assert len(evidence.tables) == 1000
    assert evidence.pull.transport == "tcp"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_doubled_lines_and_clock_prefixes(layout: str) -> None:
    """Every line twice (two handlers), and a wall clock in brackets that must not be taken for a thread."""
    text = [f"[05:30:{i:02d}] {x}" for i, x in enumerate(stamped(lines(TWO_PATHS, layout)))]
    evidence = read([x for x in text for _ in range(2)])
    assert (evidence.pull.transport, evidence.pull.paths) == ("rc_mlx5", 2)
    assert not [c for c in codes(evidence) if c.startswith(("row-", "header-"))]


def test_given_size_and_counts_that_disagree() -> None:
    spec = Spec((("0..8K", "software emulation", "tcp/eth0", 40), ("8193..inf", "zero-copy", "rc_mlx5/mlx5_0:1", 0)))
    evidence = read(stamped(lines(spec, "1.22 used")), descriptor_bytes=131072)
    assert evidence.pull.transport == "rc_mlx5"
    assert "counts-disagree" in codes(evidence)


U = "[1.1] [h:1:0] x.c:1 UCX  "


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (U + "ERROR Not enough memory. Please check that /dev/shm has more available memory", "shared-memory-full"),
        (U + "ERROR cuIpcOpenMemHandle() failed: invalid argument", "cuda-ipc-open-failed"),
        (U + "ERROR ibv_reg_mr(address=0x7f, length=1) failed: Bad address", "memory-registration"),
        (U + "ERROR ibv_reg_mr() failed: Please set max locked memory (ulimit -l) to 'unlimited'", "memory-lock-limit"),
        (U + "ERROR Transport retry count exceeded on mlx5_0:1/RoCE", "endpoint-failure"),
        (U + "ERROR connect(fd=9, dest_addr=172.17.0.1:1) failed: Connection refused", "tcp-connect-failed"),
        ("zmq.error.Again: Resource temporarily unavailable", "side-channel-timeout"),
        ("RuntimeError: Remote NIXL agent engine ID mismatch. Expected a,received b.", "engine-id-mismatch"),
        ("INFO [factory.py:62] Creating v1 connector with name: NixlPushConnector and engine_id: x", "push-connector"),
        ("E1201 02:57:14.610787 1 nixl_agent.cpp:4] status NIXL_ERR_REMOTE_DISCONNECT", "remote-disconnected"),
        ("E1201 02:57:14.610787   1 nixl_agent.cpp:9] loadRemoteMD: failed NIXL_ERR_NOT_FOUND", "metadata-missing"),
        ("NIXL WARNING UCX CUDA support was not found!", "ucx-without-cuda"),
        ("(RayWorker pid=1) x [repeated 3x across cluster]", "ray-dropped-lines"),
        (U + "ERROR cuDevicePrimaryCtxGetState(d, &f, &a) failed: unrecognized error code 4", "cuda-closed-before-ucx"),
        (U + "FATAL something new", "ucx-error"),
        (U + "DIAG tcp_ep: Connection reset by remote peer", ""),
        ("INFO all is well with NIXL", ""),
    ],
)  # fmt: skip
def test_symptoms(text: str, code: str) -> None:
    found = [c for c in codes(read(text)) if c not in ("no-evidence", "not-pull-evidence")]
    assert found == ([code] if code else [])
