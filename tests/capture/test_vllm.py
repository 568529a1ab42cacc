"""The engine's own figures: the log line in every version's fields, and /metrics as differences."""

from __future__ import annotations

import pytest

from kvlab.capture import vllm

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
