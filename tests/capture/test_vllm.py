"""The engine's own figures: the log line in every version's fields, and /metrics as differences."""

from __future__ import annotations

import http.server
import lzma
import threading
from pathlib import Path

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
    ("line", "xfer", "post", "mib", "descriptors", "rate"),
    [
        (FIRST, 9.862, 5.693, 70.0, 56.0, 7097.952),
        (SECOND, 3.056, 1.563, 14.0, 56.0, 4581.152),
        (POOLED, 70.583, 11.91, 95.173, 3045.5, 1348.379),
    ],
)
def test_log_line(line: str, xfer: float, post: float, mib: float, descriptors: float, rate: float) -> None:
    fields = vllm.kv_metrics(line)
    assert fields is not None and not fields["failed_interval"]
    assert (fields["avg_xfer_time_ms"], fields["avg_post_time_ms"]) == (xfer, post)
    assert (fields["avg_mb_per_transfer"], fields["avg_number_of_descriptors"]) == (mib, descriptors)
    # the printed throughput is mean size over mean duration again: no rate of a link
    assert fields["throughput_mb_per_s"] == rate == pytest.approx(mib / xfer * 1e3, rel=2e-4)


def test_missing_fields_are_missing() -> None:
    fields = vllm.kv_metrics("KV Transfer metrics: Num successful transfers=4, Avg xfer time (ms)=1.381")
    assert fields is not None
    assert fields["num_successful_transfers"] == 4
    assert fields["avg_post_time_ms"] is None and fields["num_failed_transfers"] is None
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


def test_zeros_are_a_failed_interval() -> None:
    fields = vllm.kv_metrics(ZEROS)
    assert fields is not None and fields["failed_interval"]


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


def test_counters_without_total_and_a_second_scrape() -> None:
    before = SCRAPE.replace("_total{", "{")
    after = before.replace('sum{engine="0",model_name="m"} 2', 'sum{engine="0",model_name="m"} 2.5')
    out = vllm.summary(vllm.difference(before, after, arm="a"))
    assert out["xfer_s"] == pytest.approx(0.5) and out["pulls"] == 0 and out["failed_transfers"] == 0
    assert out["restarted"] == [] and out["mean_xfer_ms"] is None


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
