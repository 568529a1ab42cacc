"""The telemetry ring: every layout as a wheel wrote it, live reading, and loss that is never silent."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ring_writer import PULL, Writer

from kvlab.capture import nixl
from kvlab.errors import BadInput

RINGS = Path(__file__).parents[1] / "data" / "rings"


@pytest.mark.parametrize(
    ("release", "version", "event_bytes"),
    [("1.0.1", 1, 56), ("1.1.0", 2, 48), ("1.2.0", 2, 16), ("1.3.1", 3, 16), ("1.4.1", 4, 16), ("1.5.1", 4, 16)],
)
def test_rings_of_the_wheels(release: str, version: int, event_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "puller"
    path.write_bytes(lzma.decompress((RINGS / f"nixl-{release}.ring.xz").read_bytes()))
    before = path.read_bytes()
    with nixl.Ring(path) as ring:
        assert (ring.version, ring.event_bytes, ring.capacity) == (version, event_bytes, 64)
    rows, report = nixl.read_ring(path)
    assert sorted(rows["bytes"]) == sorted([n * 65536 for n in (40, 39, 38)] * 3)
    assert set(rows["operation"]) == {"READ"} and set(rows["requests"]) == {1}
    assert (rows["post_us"] <= rows["xfer_us"]).all() and (rows["xfer_us"] > 1000).all()
    assert rows["start_s"].isna().all()
    assert (report["incomplete_events"], report["gaps"]) == (0, {})
    assert path.read_bytes() == before, "looking must not change a ring"


def test_owner_makes_room_and_a_looker_does_not(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "engine")
    with nixl.Ring(writer.path, owner=True) as ring:
        for number in range(50):  # far more than the ring holds
            writer.pull(1, 10 + number, 100)
            batch = ring.read()
            assert batch.types.tolist() == list(PULL) and batch.values[1] == 10 + number
            assert batch.gap_before is None and batch.gap_after is None
        with pytest.raises(BadInput, match="another kvlab"):
            nixl.Ring(writer.path, owner=True)
    assert writer.lost == 0
    with nixl.Ring(writer.path) as looker:
        for _ in range(5):
            writer.pull(1, 10, 100)
        seen = looker.read()
    assert len(seen.types) == 15 and "full" in str(seen.gap_after) and writer.lost == 5


def test_full_ring_is_loss_and_pairs_nothing_across_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "engine")
    state = nixl._Followed(nixl.Ring(writer.path, owner=True))
    for number in range(5):
        writer.pull(1, 10 + number, 100)  # the fourth loses its last event, the fifth everything
    first, _ = state.read()
    writer.push(nixl.RX_REQUESTS, 1)  # would complete the fourth if one paired by order alone
    writer.pull(2, 99, 200)
    second, _ = state.read()
    state.ring.close()
    assert first[:, 1].tolist() == [10, 11, 12] and second.tolist() == [[2, 99, 200, 1]]
    report = state.report()
    assert report["incomplete_events"] == 4 and report["bytes"] == 500
    assert any("full" in loss for loss in nixl.losses([report]))


def test_restart_and_a_second_reader_are_gaps(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "engine")
    with nixl.Ring(writer.path, owner=True) as ring:
        writer.pull(1, 10, 100)
        ring.read()
        writer.restart()
        writer.pull(2, 20, 200)
        batch = ring.read()
        assert "restart" in str(batch.gap_before) and batch.values.tolist() == [2, 20, 200, 1]
        Writer(tmp_path / "engine", capacity=32)
        with pytest.raises(BadInput, match="another size"):
            ring.read()


def test_header_of_512_bytes(tmp_path: Path) -> None:
    """Seen in NIXL's source, in no wheel yet: the read position has its own cache line."""
    writer = Writer(tmp_path / "engine", version=5, header=512)
    with nixl.Ring(writer.path, owner=True) as ring:
        for _ in range(9):
            writer.pull(1, 10, 100)
            assert ring.read().types.tolist() == list(PULL)
    assert writer.lost == 0
    assert nixl.read_ring(writer.path)[1]["drops_are_told"] is False


def test_no_rings(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(BadInput, match="No such file"):
        nixl.Ring(path)
    for data in (b"", b"short", bytes(1000), os.urandom(4096)):
        path.write_bytes(data)
        with pytest.raises(BadInput):
            nixl.Ring(path)
    Writer(path, version=99)
    assert nixl.Ring(path).version == 99  # 16 bytes an event: read as the newest known
    Writer(path, version=1)
    with pytest.raises(BadInput, match="layout"):
        nixl.Ring(path)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("pull"), st.integers(0, 9), st.integers(10, 99), st.integers(1, 10**15)),
            st.tuples(st.just("event"), st.sampled_from([4, 5, 10, 20, 33, -1]), st.just(0), st.just(7)),
        )
    ),
    st.integers(1, 7),
)
def test_grouping_does_not_depend_on_where_reads_fall(items: list[tuple[str, int, int, int]], step: int) -> None:
    events: list[tuple[int, int]] = []
    wanted = []
    for what, a, b, c in items:
        if what == "pull":
            wanted.append([a, b, c, 1])
            events += zip(PULL, (a, b, c, 1), strict=True)
        else:
            events.append((a, c))
    grouper = nixl.Grouper()
    got: list[list[int]] = []
    for at in range(0, len(events), step):
        part = events[at : at + step]
        types = np.array([e[0] for e in part], np.int64)
        got += grouper.feed(types, np.array([e[1] for e in part], np.uint64))[0].tolist()
    assert got == wanted and grouper.incomplete == 0
    assert grouper.dropped == 7 * sum(e[0] == 20 for e in events)


def test_what_makes_no_whole_group_is_counted() -> None:
    kinds = [7, 7, 6, 1, 3, 6, 7, 6, 0, 2, 7, 6, 1, 2, 7, 6, 1, 3, 7]
    values = [1, 2, 5, 9, 1, 5, 1, 2, 8, 1, 1, 2, 3, 1, 50, 5, 9, 1, 4]
    grouper = nixl.Grouper()
    rows, reads = grouper.feed(np.array(kinds, np.int64), np.array(values, np.uint64))
    assert rows.tolist() == [[2, 5, 9, 1], [1, 2, 8, 1]] and reads.tolist() == [True, False]
    # a lone post, a lone transfer time, a mixed group, and one whose post is longer than its transfer
    assert grouper.incomplete == 1 + 1 + 4 + 4
    grouper.gap()
    assert grouper.incomplete == 11


def test_follower_reads_all_and_names_what_it_could_not(tmp_path: Path) -> None:
    old = Writer(tmp_path / "was-there", capacity=64)
    old.pull(1, 10, 100)
    began = time.monotonic()
    with nixl.Follower(tmp_path, began_s=began, poll_s=0.005) as follower:
        new = Writer(tmp_path / "engine", capacity=256)
        for number in range(40):
            new.pull(1, 1000 + number, 100)
            time.sleep(0.002)
        (tmp_path / "notes.txt").write_text("no ring")
    rows = follower.take()
    assert rows["xfer_us"].tolist() == [10.0, *range(1000, 1040)]
    assert rows["ring"].value_counts().to_dict() == {"engine": 40, "was-there": 1}
    ours = rows[rows["ring"] == "engine"]
    end = ours["start_s"] + ours["xfer_us"] * 1e-6
    assert (end + ours["start_uncertainty_s"] <= time.monotonic() - began + 1e-6).all()
    assert (ours["start_uncertainty_s"] > 0).all() and rows["start_s"].isna().tolist()[0]
    assert len(follower.losses()) == 1 and "notes.txt" in follower.losses()[0]
    assert follower.take().empty


def test_environment() -> None:
    assert nixl.environment("/d", 4096)["NIXL_TELEMETRY_BUFFER_SIZE"] == "4096"
    with pytest.raises(BadInput, match="power of two"):
        nixl.environment("/d", 5000)


@pytest.mark.live
def test_rows_are_nixls_own_telemetry(tmp_path: Path) -> None:
    """Two real agents: the rows followed live equal get_xfer_telemetry, and the starts lie in their bounds."""
    pytest.importorskip("nixl")
    command = [sys.executable, str(Path(__file__).with_name("nixl_pair.py")), "20", "3", "40", "65536", "0"]
    env = {
        **os.environ,
        **nixl.environment(tmp_path),
        "UCX_TLS": "tcp,sm,self,cma",
        "NIXL_LOG_LEVEL": "ERROR",
    }
    with nixl.Follower(tmp_path, began_s=0.0) as follower:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    pulls = json.loads(done.stdout.splitlines()[-1])["pulls"]
    rows = follower.take()
    assert sorted(rows[["post_us", "xfer_us", "bytes"]].values.tolist()) == sorted(p[:3] for p in pulls)
    assert follower.losses() == []
    by_bytes = rows.groupby("bytes", sort=False)
    for size, own in by_bytes:
        truth = np.array([p[3] for p in pulls if p[2] == size])
        # 50 ms more than promised: the engine's flush thread may be kept waiting on a busy machine
        assert (abs(own["start_s"].to_numpy() - truth) <= own["start_uncertainty_s"] + 0.05).all()
