"""tcp-tuning: its arms, its cases, and that an arm which hangs or fails is a row and no crash."""

import contextlib
from typing import ClassVar

import pandas as pd
import pytest

from kvlab import experiments, params
from kvlab.errors import BadInput, RunFailed
from kvlab.measures import tcp_tuning

NAME = "tcp-tuning"


def test_arms_turn_one_knob_at_a_time():
    p = params.validate(NAME, {"segment_sizes": "16k,1m", "thread_counts": 2, "rma_rails": [], "base_segment": "1m"})
    found = {a.label: ({k.removeprefix("UCX_"): v for k, v in a.env.items()}, a.nixl_threads) for a in p.arms}
    one = {"TLS": "tcp", "TCP_TX_SEG_SIZE": "1m", "TCP_RX_SEG_SIZE": "1m"}
    assert found == {
        "UCX default": ({"TLS": "tcp"}, None),
        "16k": ({"TLS": "tcp", "TCP_TX_SEG_SIZE": "16k", "TCP_RX_SEG_SIZE": "16k"}, None),
        "1m": (one, None),
        "UCX default, 2 threads": ({"TLS": "tcp"}, 2),
        "1m, 2 threads": (one, 2),
        "1m, buffers 8m": ({**one, "TCP_SNDBUF": "8m", "TCP_RCVBUF": "8m"}, None),
    }
    assert {a.expect for a in p.arms} == {"tcp"}
    own = params.validate(NAME, {"arms": [{"label": "mine"}]})
    assert [a.label for a in own.arms] == ["mine"]


@pytest.mark.parametrize("bad", ["fast", "-1", "5 per link", "4.97per flow", ""])
def test_a_link_that_is_none_is_refused(bad):
    with pytest.raises(BadInput, match="links"):
        params.validate(NAME, {"links": [bad]})


def test_link_text():
    assert tcp_tuning.parse("none") == (None, False)
    assert tcp_tuning.parse("4.97") == (4.97, False)
    assert tcp_tuning.parse("1.25 per flow") == (1.25, True)


def test_only_arms_with_threads_pull_every_count():
    p = params.validate(NAME, {"descriptor_counts": [8, 2048], "descriptor_bytes": 4096, "thread_counts": [4]})
    by_label = {a.label: [c.groups for c in tcp_tuning.cases(p, a)] for a in p.arms}
    assert by_label["UCX default"] == [((8, 4096),)]
    assert by_label["UCX default, 4 threads"] == [((8, 4096),), ((2048, 4096),)]


def test_what_passed_a_limit_is_a_timeout():
    assert tcp_tuning.outcome("arm 'a': the initiator did not finish a pull within 0.5 s; x (log: y)") == "timeout"
    assert tcp_tuning.outcome("arm 'a': no answer from the target within 20 s") == "timeout"
    assert tcp_tuning.outcome("arm 'a': the target process was killed by signal 9 in mid-run") == "failed"


class FakePair:
    """Pulls at 1 byte a microsecond; the arm ``hangs`` never finishes, ``fails`` never starts."""

    started: ClassVar[list[str]] = []

    def __init__(self, arm, options, cases, logs, **_):
        self.arm, self.options, self.logs = arm, options, {}

    def __enter__(self):
        FakePair.started.append(self.arm.label)
        if self.arm.label == "fails":
            raise BadInput("arm 'fails': the target could not make a NIXL agent (log: /x/y.log)")
        return self

    def pull(self, case, verify):
        if self.arm.label == "hangs":
            raise RunFailed("arm 'hangs': the initiator did not finish a pull within 10 s")
        row = {"arm": self.arm.label, "case": case.name, "descriptors": case.descriptors, "bytes": case.bytes}
        return [{**row, "post_us": 1.0, "xfer_us": float(case.bytes)}]

    def pid(self, side):
        return 1

    def socket_limit(self, size, streams=1):
        return 1e-3

    def kill(self):
        pass

    close = kill


class FakeLink:
    kind, reason, places, rates = "veth", "", (None, None), []

    def set_rate(self, rate, per_flow):
        self.rates.append((rate, per_flow))

    def flows(self, side, pid):
        return []


@pytest.fixture
def faked(monkeypatch):
    FakePair.started, FakeLink.rates = [], []
    monkeypatch.setattr(tcp_tuning, "Pair", FakePair)
    monkeypatch.setattr(tcp_tuning, "Link", lambda: contextlib.nullcontext(FakeLink()))
    monkeypatch.setattr(tcp_tuning, "record_evidence", lambda *a, **k: [])
    monkeypatch.setattr(experiments, "require", lambda e: None)


def run_of(tmp_path, labels):
    values = {"arms": [{"label": x} for x in labels], "links": "none,1 per flow", "descriptor_counts": 4}
    return experiments.measure(params.validate(NAME, {**values, "repetitions": 3, "out": str(tmp_path)}))


def test_arms_that_hang_or_fail_are_rows(tmp_path, faked):
    run = run_of(tmp_path, ["good", "hangs", "fails"])
    assert run.manifest["outcome"] == "completed"
    cells = run.table("cells")
    # Two failures, then the cell is left out; both links have cells of their own.
    assert cells[cells["outcome"] != "completed"].groupby(["arm", "link", "outcome"]).size().to_dict() == {
        ("fails", "1 per flow", "failed"): 2,
        ("fails", "none", "failed"): 2,
        ("hangs", "1 per flow", "timeout"): 2,
        ("hangs", "none", "timeout"): 2,
    }
    # 8 bits a microsecond; the warm-up round is no row.
    good = cells[cells["outcome"] == "completed"]
    assert set(good["arm"]) == {"good"} and len(good) == 6 and good["value"].tolist() == [0.008] * 6
    assert not cells["note"].str.contains("/x/").any()
    # An arm is started again only after it failed.
    assert pd.Series(FakePair.started).value_counts().to_dict() == {"good": 1, "hangs": 4, "fails": 4}
    assert set(FakeLink.rates) == {(None, False), (1.0, True)} and len(FakeLink.rates) == 8
    limits = run.table("limits")
    assert limits.groupby(["link", "name"]).size().tolist() == [3] * 4


def test_when_nothing_completes_the_run_fails_and_says_the_first_reason(tmp_path, faked):
    with pytest.raises(RunFailed, match="no pull of any arm completed; the first: arm 'fails'"):
        run_of(tmp_path, ["fails"])


@pytest.mark.live
def test_a_small_run_over_the_link(tmp_path):
    pytest.importorskip("nixl")
    arms = [
        {"label": "tcp", "env": {"UCX_TLS": "tcp"}, "expect": "tcp"},
        {"label": "bad", "env": {"UCX_TLS": "nothing"}},
    ]
    values = {"arms": arms, "links": ["2"], "descriptor_counts": 8, "repetitions": 2, "out": str(tmp_path)}
    run = experiments.measure(params.validate(NAME, values))
    assert run.manifest["outcome"] == "completed"
    cells = run.table("cells")
    assert cells[cells["arm"] == "bad"]["outcome"].tolist() == ["failed"] * 2
    assert run.table("verdicts").set_index("arm").loc["tcp", "transport"] == "tcp"
    if run.manifest["link"]["kind"] == "veth":
        wide = cells[cells["arm"] == "tcp"].pivot_table(index="repetition", columns="quantity", values="value")
        assert (wide["connections"] == 1).all() and (wide["rate"] < 2.1).all()
