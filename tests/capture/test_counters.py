"""Byte counters: fake trees and hand-worked differences, pasted dumps, and a pull on this machine's loopback."""

import math
import sys
import types
from pathlib import Path

import pandas as pd
import pytest

from kvlab import runs, views
from kvlab.analysis.explained import explained, sentence
from kvlab.capture import counter_text, counters
from kvlab.capture.counters import Background, Count, Snapshot, difference

CASES = Path(__file__).parent.parent / "cases"
FULL = 2**32 - 1
NET = "Inter-|   Receive    |  Transmit\n face |bytes packets\n"


def tree(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    return root


def port(**files):
    base = "sys/class/infiniband/mlx5_0/ports/1"
    return {f"{base}/{k.replace('__', '/')}": v for k, v in {"state": "4: ACTIVE", **files}.items()}


def turn(before, after, seconds=1.0, key=("mlx5_0:1", "RDMA port", "port_rcv_data")):
    def shot(at, count):
        return Snapshot(at, {} if count is None else {key: count})

    return shot(10.0, before), shot(10.0 + seconds, after)


def only(rows):
    (row,) = rows
    return row


def test_reading_a_tree(tmp_path):
    tree(tmp_path, port(counters__port_rcv_data="100", counters__port_xmit_data="7", hw_counters__rx_bytes="5"))
    tree(
        tmp_path, {"proc/net/dev": NET + "    lo: 3245 30 0 0 0 0 0 0 1111 30 0 0 0 0 0 0\n  eth0:9 1 0 0 0 0 0 0 8 1"}
    )
    other = {p.replace("mlx5_0", "mlx5_1"): v for p, v in port(counters__port_rcv_data=str(2**40)).items()}
    assert counters.read(tree(tmp_path, other), nvlink=False).counts == {
        ("lo", "interface", "rx_bytes"): Count(3245),
        ("lo", "interface", "tx_bytes"): Count(1111),
        ("eth0", "interface", "rx_bytes"): Count(9),
        ("eth0", "interface", "tx_bytes"): Count(8),
        ("mlx5_0:1", "RDMA port", "port_rcv_data"): Count(100, 4, 32),
        ("mlx5_0:1", "RDMA port", "port_xmit_data"): Count(7, 4, 32),
        ("mlx5_1:1", "RDMA port", "port_rcv_data"): Count(2**40, 4, 64),
    }


def test_a_machine_without_anything(tmp_path):
    assert counters.read(tmp_path, nvlink=False).counts == {}
    assert difference([]) == []


def test_the_64_bit_counter_of_old_kernels_wins(tmp_path):
    tree(tmp_path, port(counters__port_rcv_data=str(FULL), counters_ext__port_rcv_data_64=str(2**33)))
    assert set(counters.read(tmp_path, nvlink=False).counts.values()) == {Count(2**33, 4, 64)}


def test_no_performance_agent(tmp_path):
    tree(tmp_path, port(counters__port_rcv_data="N/A (no PMA)"))
    shot = counters.read(tmp_path, nvlink=False)
    row = only(difference([(shot, shot)]))
    assert row["usable"] is False and row["delta_bytes"] is None and "N/A (no PMA)" in row["note"]


def test_a_roce_port_at_0_has_hw_counters_and_ethtool_instead(tmp_path, monkeypatch):
    script = tree(tmp_path / "bin", {"ethtool": "#!/bin/sh\necho NIC statistics:\n"}) / "ethtool"
    with script.open("a") as handle:
        for name, value in (("rx_vport_rdma_unicast_bytes", 4000), ("rx_bytes_phy", 9000), ("rx_packets", 3)):
            handle.write(f"echo '     {name}: {value}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    files = port(counters__port_rcv_data="0", hw_counters__rx_bytes="12", hw_counters__rx_write_requests="3")
    files["sys/class/infiniband/mlx5_0/device/net/enp1/mtu"] = "9000"
    shot = counters.read(tree(tmp_path, files), nvlink=False)
    assert {k: c.value for k, c in shot.counts.items()} == {
        ("mlx5_0:1", "RDMA port", "port_rcv_data"): 0,
        ("mlx5_0:1", "RDMA hw_counters", "rx_bytes"): 12,
        ("enp1", "ethtool", "rx_vport_rdma_unicast_bytes"): 4000,
        ("enp1", "ethtool", "rx_bytes_phy"): 9000,
    }
    dead, *others = difference([(shot, shot)])
    assert not dead["usable"] and "not usable on this driver" in dead["note"] and dead["delta_bytes"] is None
    assert all(r["usable"] and r["delta_bytes"] == 0 for r in others)
    # The port counter wakes up: it is used, and the stand-ins that are no longer read are dropped.
    awake = Snapshot(shot.seconds + 1, {("mlx5_0:1", "RDMA port", "port_rcv_data"): Count(25, 4, 32)})
    row = only(difference([(shot, awake)]))
    assert row["usable"] and row["delta_bytes"] == 100


@pytest.mark.parametrize(
    ("before", "after", "delta", "note"),
    [
        (Count(10, 4, 32), Count(35, 4, 32), 100.0, ""),  # words
        (Count(7, 4, 32), Count(7, 4, 32), 0.0, ""),  # it moved before, so 0 counts
        (Count(FULL - 1, 4, 32), Count(FULL, 4, 32), None, "stuck at 2^32-1"),
        (Count(FULL, 4, 32), Count(FULL, 4, 32), None, "stuck at 2^32-1"),
        (Count(FULL, 4, 64), Count(FULL + 2, 4, 64), 8.0, ""),  # a wide counter passes there
        (Count(FULL, 1, 64), Count(FULL, 1, 64), 0.0, ""),
        (Count(2**32 - 10, 4, 32), Count(15, 4, 32), 100.0, "wrapped at 2^32"),
        (Count(2**64 - 10), Count(15), 25.0, "wrapped at 2^64"),
        (Count(1000, 4, 32), Count(5, 4, 32), None, "set back"),
        (Count(2**40), Count(5), None, "set back"),
        (Count(1), None, None, "gone"),
        (None, Count(1), None, "not there before"),
        (Count(3, 1024), Count(5, 1024), 2048.0, ""),  # NVLink's KiB
    ],
)
def test_one_difference(before, after, delta, note):
    row = only(difference([turn(before, after)]))
    assert row["delta_bytes"] == delta and row["usable"] is (delta is not None)
    assert note in row["note"] and bool(note) == bool(row["note"])


def test_turns_of_an_arm_are_added_and_what_lies_between_is_not():
    key = ("lo", "interface", "rx_bytes")
    shots = [Snapshot(t, {key: Count(v)}) for t, v in ((0, 100), (1, 600), (5, 9000), (7, 9400))]
    row = only(difference([(shots[0], shots[1]), (shots[2], shots[3])], arm="TCP"))
    assert (row["arm"], row["delta_bytes"], row["before_bytes"], row["after_bytes"]) == ("TCP", 900.0, 100, 9400)
    # One turn that says nothing spoils the sum.
    back = (shots[3], Snapshot(8, {key: Count(3)}))
    assert only(difference([(shots[0], shots[1]), back]))["delta_bytes"] is None


def test_background_is_taken_off_with_its_uncertainty():
    key = ("eth0", "interface", "rx_bytes")
    shots = iter(Snapshot(t, {key: Count(v)}) for t, v in ((0.0, 0), (1.0, 10), (2.0, 30), (3.0, 60)))
    others = counters.background(0.0, steps=3, look=lambda: next(shots))
    # 10, 20, 30 bytes in seconds: mean 20, sample variance 100.
    assert others == Background(3.0, {key: (20.0, 100.0)})
    row = only(difference([turn(Count(0), Count(1000), seconds=6.0, key=key)], others))
    assert row["background_bytes"] == 120.0
    assert row["background_uncertainty_bytes"] == pytest.approx(math.sqrt(100 * 6 * (1 + 6 / 3)))
    share = explained(pd.DataFrame([row]).assign(arm="a"), {"a": 880.0}).iloc[0]
    assert share["counted_bytes"] == 880.0 and share["share"] == 1.0
    assert share["high"] - share["share"] == pytest.approx(2 * row["background_uncertainty_bytes"] / 880)


def test_nvlink_by_nvml(monkeypatch):
    def values(handle, fields):
        # GPU 0 knows the sum over links in KiB, GPU 1 only bytes a link (two of 18 links), GPU 2 nothing.
        for field, scope in fields:
            good = handle == 0 and field in (139, 138) and scope == FULL
            good |= handle == 1 and field in (204, 202) and scope < 2
            yield types.SimpleNamespace(nvmlReturn=0 if good else 3, value=types.SimpleNamespace(ullVal=field))

    fake = types.ModuleType("pynvml")
    fake.__dict__.update(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetFieldValues=lambda h, f: list(values(h, f)),
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX=139,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX=138,
        NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES=204,
        NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES=202,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    counters._gpus.cache_clear()
    try:
        assert counters.read(Path("/nowhere")).counts == {
            ("gpu0", "NVLink", "rx_bytes"): Count(139, 1024),
            ("gpu0", "NVLink", "tx_bytes"): Count(138, 1024),
            ("gpu1", "NVLink", "rx_bytes"): Count(408),
            ("gpu1", "NVLink", "tx_bytes"): Count(404),
        }
    finally:
        counters._gpus.cache_clear()


def row(arm, device, kind, counter, delta, usable=True):
    note = {"usable": usable, "note": "", "background_bytes": None, "background_uncertainty_bytes": None}
    return {"arm": arm, "device": device, "kind": kind, "counter": counter, "delta_bytes": delta, **note}


def test_the_published_check():
    """Without RoCE the NICs received 1.3 MB, with RoCE 1,121 GB, for the same prompts."""
    frame = pd.DataFrame(
        [
            row("NVLink", "mlx5_0:1", "RDMA port", "port_rcv_data", 1.3e6),
            row("NVLink", "mlx5_0:1", "RDMA port", "port_xmit_data", 5e6),
            row("RoCE", "mlx5_0:1", "RDMA port", "port_rcv_data", 1121e9),
            row("RoCE", "mlx5_1:1", "RDMA port", "port_rcv_data", None, usable=False),
        ]
    )
    found = explained(frame, {"NVLink": 1121e9, "RoCE": 1121e9})
    assert found["counter"].tolist() == ["port_rcv_data"] * 3
    shares = found.set_index(["arm", "device"])["share"]
    assert shares["NVLink", "mlx5_0:1"] == pytest.approx(1.1597e-6, rel=1e-3)
    assert shares["RoCE", "mlx5_0:1"] == 1.0 and math.isnan(shares["RoCE", "mlx5_1:1"])
    assert sentence(found, "NVLink").startswith(
        "NVLink: no device counted the bytes; the most is 1.2e-06 of them on mlx5_0"
    )
    assert sentence(found, "RoCE") == "RoCE: mlx5_0:1 counted 100% of the bytes"
    assert sentence(found[found["device"] == "mlx5_1:1"], "RoCE") == "RoCE: no usable counter"


@pytest.mark.live
def test_a_tcp_pull_is_explained_by_lo_and_a_cma_pull_is_not(tmp_path):
    pytest.importorskip("nixl")
    from kvlab.measures import post_vs_completion
    from kvlab.params import PostVsCompletion

    params = PostVsCompletion(prompt_tokens=[1024], repetitions=3, warmup=1, limits=True)
    run = runs.create("post-vs-completion", params.model_dump(), out=tmp_path)
    post_vs_completion.measure(params, run)
    shares = views.explained_shares(run)
    lo = shares[shares["device"] == "lo"].set_index("arm")
    pulls = run.table("pulls").groupby("arm")["bytes"].sum()
    assert lo["pulled_bytes"].to_dict() == pulls.to_dict() and (pulls > 1e8).all()
    # The plain socket that is measured as a limit runs over lo too, outside the arms' turns.
    assert 1.0 <= lo["share"]["TCP"] < 1.2
    assert 0 <= lo["share"]["shared memory"] < 0.1
    assert sentence(shares, "shared memory").startswith("shared memory: no device counted the bytes")
    table = views.counters_table(run).as_raw_html()
    assert "Share explained" in table and f"{lo['share']['TCP']:.1%}" in table


def test_a_run_without_counters_shows_an_empty_table(tmp_path):
    run = runs.create("post-vs-completion", {"arms": [{"label": "a"}]}, out=tmp_path)
    run.write("pulls", pd.DataFrame([{"arm": "a", "bytes": 8, "post_us": 1.0, "xfer_us": 2.0}]))
    assert views.explained_shares(run).empty
    assert "Share explained" in views.counters_table(run).as_raw_html()


def test_counters_survive_a_run_that_fails(tmp_path):
    from kvlab.measures.common import counted

    run = runs.create("post-vs-completion", {"arms": [{"label": "a"}]}, out=tmp_path)
    key = ("eth0", "interface", "rx_bytes")
    clock = iter(range(100))

    def look():
        now = next(clock)
        return Snapshot(float(now), {key: Count(100 * now)})

    with pytest.raises(RuntimeError, match="broke"), counted(run, background_s=0, look=look) as turn:
        with turn("a"):
            pass
        with turn("a"):
            raise RuntimeError("broke")
    # Two turns of one second, 100 bytes each, and the background moves as much.
    only_row = run.table("counters").iloc[0]
    assert (only_row["delta_bytes"], only_row["background_bytes"]) == (200.0, 200.0)
    assert only_row["background_uncertainty_bytes"] == 0.0


# -- pasted dumps (public cases 48, 50, 52) ------------------------------------------------------------


def case(number):
    rows = counter_text.read((CASES / f"{number}.log").read_text())
    return rows, {code: (line, text) for code, line, text in counter_text.findings(rows)}


def test_words_and_bytes_of_one_port_agree():
    rows, found = case(48)
    words = next(r for r in rows if r["counter"] == "port_rcv_data")
    assert (words["raw"], words["bytes"], words["device"]) == (81_408_901_908, 325_635_607_632, "rocep1s0f1:1")
    assert "325.6 GB" in found["counter-words"][1] and "words of 4 bytes" in found["counter-words"][1]
    assert "= 1 times enp1s0f1np1 rx_vport_rdma_unicast_bytes; not RDMA: 5.223 MB" in found["counters-agree"][1]
    assert set(found) == {"counter-words", "counters-agree"}


@pytest.mark.parametrize(
    ("factor", "code"), [(4, "counter-unit-error"), (0.25, "counter-unit-error"), (2, "counters-differ")]
)
def test_a_factor_of_4_between_two_sources_is_a_unit_error(factor, code):
    text = (CASES / "48.log").read_text().replace("325635607632", str(int(325635607632 * factor)))
    assert code in {c for c, _, _ in counter_text.findings(counter_text.read(text))}


def test_a_roce_port_that_stays_0_says_nothing():
    rows, found = case(50)
    line, text = found["counter-zero"]
    assert line == 4 and "Counter not usable on this driver" in text and "does not mean no RDMA traffic" in text
    assert "enP2p1s0f0np0 rx_bytes 5,000,000" in text and "rx_vport_rdma_unicast_bytes" in text and "TCP too" in text
    assert found["port-down"] == (6, "roceP2p1s0f1:1. The port is down: its rate is a placeholder, no speed")
    rates = {r["device"]: r["usable"] for r in rows if r["counter"] == "rate"}
    assert rates == {"roceP2p1s0f0:1": True, "roceP2p1s0f1:1": False}


def test_perfquery_in_32_and_64_bits():
    rows, found = case(52)
    data = [(r["raw"], r["bytes"], r["usable"]) for r in rows if r["counter"] == "port_xmit_data"]
    assert data == [
        (16_480_432, 65_921_728, True),
        (FULL, 17_179_869_180, False),
        (4_372_366_170_488, 17_489_464_681_952, True),
    ]
    words, stuck = found["counter-words"][1], found["counter-saturated"]
    assert "65.92 MB, 4,119 B a packet" in words and "17.49 TB" in words
    assert stuck[0] == 10 and "perfquery -x" in stuck[1] and "lid 2 port 1" in stuck[1]


@pytest.mark.parametrize(
    ("text", "device", "counter", "raw"),
    [
        ("==> /sys/class/infiniband/mlx5_0/ports/2/counters/port_rcv_data <==\n55\n", "mlx5_0:2", "port_rcv_data", 55),
        ("port_rcv_data: 55", "", "port_rcv_data", 55),
        ("port_xmit_data 55", "", "port_xmit_data", 55),
        ("port_rcv_data:N/A (no PMA)", "", "port_rcv_data", None),
        ("RcvData:.........................0x37", "port 1", "port_rcv_data", 55),
        ("XmtData:.........................55", "port 1", "port_xmit_data", 55),
        ("/sys/class/net/eth0/statistics/rx_bytes:55", "eth0", "rx_bytes", 55),
        ("     tx_bytes_phy: 55", "", "tx_bytes_phy", 55),
    ],
)
def test_other_forms(text, device, counter, raw):
    found = only(counter_text.read(text))
    assert (found["device"], found["counter"], found["raw"]) == (device, counter, raw)
    assert found["usable"] is (raw is not None)
    assert [c for c, _, _ in counter_text.findings([found])] == ["counter-not-readable"] or raw is not None


def test_two_ports_without_a_header_stay_apart():
    rows = counter_text.read("PortXmitData:....5\nPortXmitPkts:....1\nPortXmitData:....6\n")
    assert [(r["device"], r["raw"]) for r in rows] == [("port 1", 5), ("port 1", 1), ("port 2", 6)]
