"""The engine's own figures: the log line in every version's fields, and /metrics as differences."""

from __future__ import annotations

import http.server
import lzma
import threading
from pathlib import Path

import pandas as pd
import pytest

from kvlab import schema
from kvlab.capture import vllm
from kvlab.errors import BadInput

METRICS = Path(__file__).parents[1] / "data" / "metrics"

FIRST = (
    "(APIServer pid=205253) INFO 09-22 13:28:53 [metrics.py:98] KV Transfer metrics: Num successful "
    "transfers=1, Avg xfer time (ms)=9.862, P90 xfer time (ms)=9.862, Avg post time (ms)=5.693, P90 post "
    "time (ms)=5.693, Avg MB per transfer=70.0, Throughput (MB/s)=7097.952, Avg number of descriptors=56.0"
)
SECOND = (
    "(APIServer pid=428) INFO 07-13 16:33:58 [metrics.py:103] KV Transfer metrics: Num successful "
    "transfers=1, Avg xfer time (ms)=3.056, P90 xfer time (ms)=3.056, Avg post time (ms)=1.563, P90 "
    "post time (ms)=1.563, Avg MB per transfer=14.0, Throughput (MB/s)=4581.152, Avg number of "
    "descriptors=56.0"
)
POOLED = (
    "KV Transfer metrics: Num successful transfers=463, Avg xfer time (ms)=70.583, P90 xfer time (ms)="
    "120.765, Avg post time (ms)=11.91, P90 post time (ms)=16.785, Avg MB per transfer=95.173, Throughput "
    "(MB/s)=1348.379, Avg number of descriptors=3045.5"
)
ZEROS = (
    "(APIServer pid=11) INFO 08-03 10:00:00 [metrics.py:103] KV Transfer metrics: Num successful "
    "transfers=0, Avg xfer time (ms)=0, P90 xfer time (ms)=0, Avg post time (ms)=0, P90 post time "
    "(ms)=0, Avg MB per transfer=0, Throughput (MB/s)=0, Avg number of descriptors=0"
)


@pytest.mark.parametrize(
    ("line", "share", "after", "per_descriptor", "kib", "rate"),
    [
        (FIRST, 57.7, 4.169, 101.7, 1280, 7097.95),
        (SECOND, 51.1, 1.493, 27.9, 256, 4581.15),
        (POOLED, 16.9, 58.673, 3.9, 32.0, 1348.38),
    ],
)
def test_log_line_and_what_it_implies(
    line: str, share: float, after: float, per_descriptor: float, kib: float, rate: float
) -> None:
    fields = vllm.kv_metrics(line)
    assert fields is not None and not fields["failed_interval"]
    derived = vllm.kv_derived(fields)
    assert derived["post_share"] == pytest.approx(share / 100, abs=5e-4)
    assert derived["after_post_ms"] == pytest.approx(after, abs=1e-3)
    assert derived["post_us_per_descriptor"] == pytest.approx(per_descriptor, abs=0.05)
    assert derived["kib_per_descriptor"] == pytest.approx(kib, abs=0.05)
    # the printed throughput is mean size over mean duration again: no rate of a link
    assert derived["per_transfer_mib_s"] == pytest.approx(rate, rel=2e-4)
    assert fields["throughput_mb_per_s"] == pytest.approx(rate, rel=2e-4)


def test_missing_fields_are_missing() -> None:
    fields = vllm.kv_metrics("KV Transfer metrics: Num successful transfers=4, Avg xfer time (ms)=1.381")
    assert fields is not None
    assert fields["num_successful_transfers"] == 4
    assert fields["avg_post_time_ms"] is None and fields["num_failed_transfers"] is None
    assert vllm.kv_derived(fields)["post_share"] is None
    assert vllm.kv_metrics("Avg prompt throughput: 12.0 tokens/s") is None


def test_newer_fields_other_connectors_and_unknown_ones() -> None:
    line = FIRST + ", Num failed transfers=3, Num KV expired reqs=2, Brand new field (us)=7"
    fields = vllm.kv_metrics(line)
    assert fields is not None
    assert (fields["num_failed_transfers"], fields["num_kv_expired_reqs"]) == (3, 2)
    assert fields["other"] == {"Brand new field (us)": 7.0}
    multi = (
        "KV Transfer metrics: OffloadingConnector={'Num successful transfers': 9}, NixlConnector={'Num "
        "successful transfers': 2, 'Avg xfer time (ms)': np.float64(1.5), 'Avg post time (ms)': 0.5}"
    )
    fields = vllm.kv_metrics(multi)
    assert fields is not None
    assert (fields["num_successful_transfers"], fields["avg_xfer_time_ms"]) == (2, 1.5)


def test_zeros_are_a_failed_interval_and_divide_nothing() -> None:
    fields = vllm.kv_metrics(ZEROS)
    assert fields is not None and fields["failed_interval"]
    assert set(vllm.kv_derived(fields).values()) == {None}


def test_pooling_lines_leaves_failed_intervals_out() -> None:
    good = ZEROS.replace("=0", "=8").replace("(ms)=8", "(ms)=20.0")
    lines = [vllm.kv_metrics(ZEROS), vllm.kv_metrics(good)]
    pooled = vllm.kv_summary(line for line in lines if line)
    assert pooled["failed_intervals"] == 1 and pooled["num_successful_transfers"] == 8
    assert pooled["avg_xfer_time_ms"] == 20.0, "the zeros must not be averaged in"
    assert any("nixl_num_failed_transfers" in note for note in pooled["notes"])
    assert any("in flight are unknown" in note for note in pooled["notes"])
    empty = vllm.kv_summary([])
    assert empty["avg_xfer_time_ms"] is None and empty["num_successful_transfers"] == 0


def test_throughput_is_per_transfer() -> None:
    """The A/B table of vllm-project/vllm#50913: the "aggregate" is mean size over mean duration again."""
    for xfer, post, mib, descriptors, printed, per_descriptor, drain in (
        (38.7, 6.7, 167, 1785, 4319, 3.75, 32.0),
        (39.4, 11.9, 168, 1799, 4274, 6.61, 27.5),
    ):
        line = vllm.kv_metrics(
            f"KV Transfer metrics: Num successful transfers=2018, Avg xfer time (ms)={xfer}, Avg post time (ms)="
            f"{post}, Avg MB per transfer={mib}, Throughput (MB/s)={printed}, Avg number of descriptors="
            f"{descriptors}"
        )
        assert line is not None
        derived = vllm.kv_derived(line)
        assert derived["per_transfer_mib_s"] == pytest.approx(printed, rel=0.003)
        assert derived["post_us_per_descriptor"] == pytest.approx(per_descriptor, abs=0.005)
        assert derived["after_post_ms"] == pytest.approx(drain, abs=0.05)


SCRAPE = """\
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 2
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 4
vllm:nixl_xfer_time_seconds_sum{engine="1",model_name="m"} 3
vllm:nixl_xfer_time_seconds_count{engine="1",model_name="m"} 6
vllm:nixl_post_time_seconds_sum{engine="0",model_name="m"} 1
vllm:nixl_post_time_seconds_count{engine="0",model_name="m"} 4
vllm:nixl_post_time_seconds_sum{engine="1",model_name="m"} 0.6
vllm:nixl_post_time_seconds_count{engine="1",model_name="m"} 6
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 1000
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 4
vllm:nixl_bytes_transferred_count_other{engine="0"} 99
vllm:nixl_bytes_transferred_sum{engine="1",model_name="m"} 1800
vllm:nixl_bytes_transferred_count{engine="1",model_name="m"} 6
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 1
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="m"} 2
"""


def test_one_scrape_of_two_engines_by_exact_names() -> None:
    rows = vllm.difference(None, SCRAPE, arm="tcp")
    schema.conform("engine_metrics", rows)
    assert not rows["metric"].str.contains("other").any()
    out = vllm.summary(rows)
    assert (out["pulls"], out["bytes"], out["failed_transfers"], out["expired_requests"]) == (10, 2800, 1, 2)
    assert out["xfer_s"] == 5 and out["post_s"] == pytest.approx(1.6) and out["post_share"] == pytest.approx(0.32)
    assert [out["engines"][e]["post_share"] for e in ("0", "1")] == pytest.approx([0.5, 0.2])
    assert out["descriptors"] is None and out["failed_notifications"] is None, "not reported is not 0"
    assert any("since each engine started" in note for note in out["notes"])
    assert any("prefill" in note for note in out["notes"])


def test_pasted_metrics_among_other_text() -> None:
    pasted = vllm.read_text("my decode engine says\n" + SCRAPE + "vllm:nixl_bytes_transferred_sum{broken 3\nand {that}")
    assert pasted is not None and (pasted["pulls"], pasted["bytes"]) == (10, 2800)
    assert vllm.read_text("vllm:nixl_xfer_time_seconds is a histogram\nvllm:e2e_request_latency_seconds_sum 3") is None


def test_counters_without_total_and_a_second_scrape() -> None:
    before = SCRAPE.replace("_total{", "{")
    after = before.replace('sum{engine="0",model_name="m"} 2', 'sum{engine="0",model_name="m"} 2.5')
    out = vllm.summary(vllm.difference(before, after, arm="a"))
    assert out["xfer_s"] == pytest.approx(0.5) and out["pulls"] == 0 and out["failed_transfers"] == 0
    assert out["restarted"] == [] and out["mean_xfer_ms"] is None
    assert "between the two scrapes" in out["over"]


def test_restart_is_flagged_and_never_negative() -> None:
    after = SCRAPE.replace('count{engine="1",model_name="m"} 6', 'count{engine="1",model_name="m"} 5')
    rows = vllm.difference(SCRAPE, after, arm="a", engine="decode-0")
    assert (rows["delta"] >= 0).all()
    assert set(rows.loc[rows["restarted"], "engine"]) == {"decode-0:1"}
    out = vllm.summary(rows)
    assert out["engines"]["decode-0:1"]["pulls"] == 5 and out["engines"]["decode-0:0"]["pulls"] == 0
    assert out["restarted"] == ["decode-0:1"]
    # grown past the old value, yet born again: only the birth time tells
    born = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {}\n"
    grown = SCRAPE.replace("} 4", "} 40").replace("} 6", "} 60")
    rows = vllm.difference(born.format(1) + SCRAPE, born.format(2) + grown, arm="a")
    assert rows["restarted"].all() and vllm.summary(rows)["pulls"] == 100
    gone = vllm.difference(SCRAPE, "\n".join(SCRAPE.splitlines()[:3]), arm="a")
    assert gone["restarted"].all() and gone["delta"].isna().sum() == len(gone) - 2


def test_recorded_scrapes_give_the_published_means() -> None:
    before, after = (
        lzma.decompress((METRICS / f"h200_decode_{which}.txt.xz").read_bytes()).decode()
        for which in ("before", "after")
    )
    out = vllm.summary(vllm.difference(before, after, arm="cuda_ipc", engine="decode"))
    assert (out["pulls"], out["bytes"], out["descriptors"]) == (5, 5 * 2**31, 5 * 65536)
    assert out["mean_xfer_ms"] == pytest.approx(213.5, abs=0.05)
    assert out["mean_post_ms"] == pytest.approx(161.3, abs=0.05)
    assert out["restarted"] == [] and out["external_cache_hits"] == 5 * 16384


def test_not_metrics() -> None:
    with pytest.raises(BadInput, match="not Prometheus text"):
        vllm.difference(None, "<html>{not metrics</html>", arm="a")
    with pytest.raises(BadInput, match="no metrics"):
        vllm.scrape("http://127.0.0.1:9", timeout_s=1)


def test_scrape_over_http() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(SCRAPE.encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        try:
            assert vllm.scrape(address) == vllm.scrape(address + "/metrics") == SCRAPE
        finally:
            server.shutdown()
            thread.join()


def test_rate_is_over_the_union_of_intervals() -> None:
    pulls = pd.DataFrame(
        {
            "start_s": [0.0, 0.5, 3.0, float("nan")],
            "xfer_us": [1e6, 1e6, 1e6, 1e6],
            "bytes": [100, 100, 100, 100],
        }
    )
    rate = vllm.rate_from_intervals(pulls)
    assert rate is not None
    assert (rate["busy_s"], rate["summed_s"]) == (2.5, 3.0)
    assert rate["bytes_per_s"] == 120 and rate["per_transfer_bytes_per_s"] == 100
    assert rate["bytes_per_s_low"] == rate["bytes_per_s_high"] == 120
    unsure = vllm.rate_from_intervals(pulls.assign(start_uncertainty_s=0.1))
    assert unsure is not None
    assert unsure["bytes_per_s_low"] == pytest.approx(300 / 2.9)
    assert unsure["bytes_per_s_high"] == pytest.approx(300 / 2.1)
    nested = pd.DataFrame({"start_s": [0.0, 0.1], "xfer_us": [1e6, 1e5], "bytes": [1, 1]})
    inner = vllm.rate_from_intervals(nested)
    assert inner is not None and inner["busy_s"] == 1.0
    assert vllm.rate_from_intervals(pulls.iloc[3:]) is None
