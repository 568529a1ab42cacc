"""The published figures, against the values they were carried from; and no sentence carried with them."""

import hashlib
import re
import subprocess
from pathlib import Path

import pytest

from kvlab import published
from kvlab.errors import BadInput

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
STATUS = {"published", "figure", "derived", "expected", "measured"}
#: SHA-256 of the facts as they were given (CSV, without the source column that kvlab adds)
AS_GIVEN = {
    "anyscale_pd_transports": "8eea95926a5b2221658ecafdc2876abbfa28a6cdc7a87885743e7ce719da8932",
    "chunk_stall": "b20c3b9e2893288728e6f0f4c7923163dae27560ffa182c41982231bb17cc73f",
    "h200_pulls": "7db54bdfc4ff1dad08ed1070eadd199a0a283aa8692566c5f10498f00da421b2",
    "h200_vllm_pulls": "25b7e7942d584c9a485fbd3c441382014ceca8a0fe9550a76b2b2b7d8bcc8a4d",
    "tcp_crossover_curve": "8ac956eea3ee00d5c7899922b146674eab0698e61cf58904b3b93717608f3f3c",
    "tcp_transfer": "27d3b217f15611c2e304700c7aa5c00ce6da855d6aa65951fc8ecf30cc572fc5",
    "transport_bandwidth": "89873697d58f470bafeb3422f06e48f8cd73204aefadfcbe30023dbe15327443",
}
#: kv_pull_time and so on: (quantity, tokens, NVLink, RoCE)
ROCE = """
kv_pull_time_relative 4096 1.0 0.66 | kv_pull_time_relative 8192 1.0 0.86 | kv_pull_time_relative 16384 1.0 0.73
post_time_relative 4096 1.0 0.08 | post_time_relative 8192 1.0 0.12 | post_time_relative 16384 1.0 0.07
ttft_p50_relative 4096 1.0 0.99 | ttft_p50_relative 8192 1.0 1.00 | ttft_p50_relative 16384 1.0 1.00
requests_per_second_relative 4096 1.0 1.02 | requests_per_second_relative 8192 1.0 1.00
requests_per_second_relative 16384 1.0 1.00 | post_per_descriptor 16384 2.7 0.19
bytes_per_pull 4096 0.3 0.3 | bytes_per_pull 8192 0.4 0.4 | bytes_per_pull 16384 0.6 0.6
descriptors_per_pull 4096 2350 2350 | descriptors_per_pull 16384 4250 4250 | rate_per_rank 16384 19 -
nic_bytes_received_whole_run - 0.0013 1121
post_time 16384 11.5 0.81 | kv_pull_time 16384 28.7 20.9 | after_post_time 16384 17.2 20.1
"""
#: transport: added TTFT from, to (ms), bandwidth from, to (GB/s), status
GUIDE = {
    "aggregated": (0, 0, None, None, "expected"),
    "InfiniBand + GPUDirect": (200, 500, 20, 50, "expected"),
    "RoCE + GPUDirect": (300, 800, 10, 25, "expected"),
    "EFA libfabric + GDRCopy/GPUDirect": (37, 37, 9.6, 9.6, "published"),
    "RDMA staged through the host": (1000, 3000, 1, 3, "expected"),
    "EFA through UCX without GPUDirect": (None, None, 1, 1, "published"),
    "TCP fallback": (90000, 100000, 0.1, 0.1, "published"),
}
MODEL = {
    "step_fixed": 16.0275, "step_per_token": 15.107, "step_attention": 1.32609e-9, "ttft_replica_fixed": 40.8,
    "prefill_chunk": 8192, "chunk_multiple": 16, "gap_limit": 50, "transfer_fixed": 145.2,
    "transfer_per_token": 11.449, "transfer_by_rate_fixed": 28, "sliding_kv": 209.7, "sliding_window": 1024,
    "global_kv_per_token": 20480, "window_low": 14000, "window_high": 37000, "window_low_band_low": 11000,
    "window_low_band_high": 34000,
}  # fmt: skip
WINS = {4.45: 34560, 14.3: 13824, 14.97: 13824, 25: 10496, 50: 6912, 95: 5632, 200: 4608, 400: 4608}
OTHER = {
    "post_share_cuda_ipc": 0.569, "post_share_rc_x": 0.15, "descriptors_per_rank_low": 91e3,
    "descriptors_per_rank_high": 120e3, "short_descriptors_before": 3528, "short_descriptors_after": 1,
    "short_ttft_before": 1661, "short_ttft_after": 687, "long_descriptors_before": 34000,
    "long_descriptors_after": 422, "long_ttft_before": 11100, "long_ttft_after": 5200, "first_ttft_before": 399,
    "first_ttft_after": 219, "read_rate": 0.5, "push_rate": 49, "handover_block_16": 263, "handover_block_64": 197,
    "sample_pull": 38.7, "sample_post": 6.7, "sample_descriptors": 1785, "sample_bytes": 167, "transfer_call": 0.6,
    "segments": 15000, "tcp_fallback_ttft": 98, "tcp_fallback_transfer": 1.05, "tcp_fallback_requests": 10,
    "device_copy_rate": 2112,
}  # fmt: skip


def test_every_table_says_what_each_row_is_and_whence():
    told = (ROOT / "data/published/SOURCE.md").read_text()
    for name in published.names():
        frame = published.load(name)
        assert set(frame["status"]) <= STATUS
        assert frame["source"].notna().all() and not frame.duplicated().any()
        assert name in told


@pytest.mark.parametrize("name", AS_GIVEN)
def test_tables_are_as_given(name):
    import pandas as pd

    path = ROOT / f"data/published/{name}.csv"
    given = pd.read_csv(path, dtype=str, keep_default_na=False).drop(columns="source")
    assert hashlib.sha256(given.to_csv(index=False, lineterminator="\n").encode()).hexdigest() == AS_GIVEN[name]


def test_roce_vs_nvlink():
    frame = published.load("roce_vs_nvlink")
    seen = 0
    for line in re.split(r"[|\n]", ROCE.strip()):
        quantity, tokens, *values = line.split()
        for transport, value in zip(("cuda_ipc", "rc_mlx5"), values, strict=True):
            keys = {"quantity": quantity, "transport": transport}
            keys |= {} if tokens == "-" else {"prompt_tokens": int(tokens)}
            if value != "-":
                assert published.value("roce_vs_nvlink", **keys) == float(value)
                seen += 1
    assert seen == len(frame)
    derived = {"post_time", "kv_pull_time", "after_post_time"}
    assert set(frame.loc[frame["status"] == "derived", "quantity"]) == derived
    assert set(frame.loc[frame["status"] != "derived", "status"]) == {"published"}


def test_what_is_derived_follows_from_what_is_published():
    def at_16k(quantity, transport):
        return published.value("roce_vs_nvlink", quantity=quantity, transport=transport, prompt_tokens=16384)

    for transport, post_us in (("cuda_ipc", 2.7), ("rc_mlx5", 0.19)):
        assert at_16k("post_time", transport) == pytest.approx(4250 * post_us / 1e3, rel=0.005)
        rest = at_16k("kv_pull_time", transport) - at_16k("post_time", transport)
        assert at_16k("after_post_time", transport) == pytest.approx(rest, abs=0.05)
    assert 0.53 / 19 * 1e3 <= at_16k("kv_pull_time", "cuda_ipc") <= 0.56 / 19 * 1e3
    assert at_16k("kv_pull_time", "rc_mlx5") == pytest.approx(0.73 * 28.7, rel=0.005)
    # 2 (K and V) x 32 layers x 8 heads x 128 x 2 B a token, 8,000 tokens
    assert published.value("other_figures", quantity="tcp_fallback_transfer") == pytest.approx(
        2 * 32 * 8 * 128 * 2 * 8000 / 1e9, rel=0.005
    )


def test_ttft_by_transport():
    frame = published.load("ttft_by_transport").set_index("transport").astype(object)
    frame = frame.where(frame.notna(), None)
    columns = ["extra_ttft_low_ms", "extra_ttft_high_ms", "bandwidth_low_gb_s", "bandwidth_high_gb_s", "status"]
    assert {t: tuple(r) for t, r in frame[columns].iterrows()} == GUIDE


def test_crossover_model_and_single_figures():
    for quantity, value in MODEL.items():
        assert published.value("tcp_crossover_model", quantity=quantity) == value, quantity
    wins = published.load("tcp_crossover_model").query("quantity == 'first_length_1p1d_wins'")
    assert dict(zip(wins["rate_gbps"], wins["value"], strict=True)) == WINS
    assert len(MODEL) + len(WINS) == len(published.load("tcp_crossover_model"))
    other = published.load("other_figures")
    assert dict(zip(other["quantity"], other["value"], strict=True)) == OTHER


def test_what_is_not_there_is_refused_in_one_line():
    with pytest.raises(BadInput, match=r"no published table 'x'; known: anyscale"):
        published.load("x")
    with pytest.raises(BadInput, match="no column 'colour'"):
        published.value("roce_vs_nvlink", colour=1)
    with pytest.raises(BadInput, match="3 rows fit"):
        published.value("roce_vs_nvlink", quantity="post_time_relative", transport="cuda_ipc")


#: a work may be cited by its title
TITLE = """Chunk First: When Prefill–Decode Disaggregation Pays Off over TCP. Measurements and a Calibrated Model on
Single-GPU Cloud Instances"""


def _words(text):
    return re.findall(r"[a-z0-9_=]+", text.lower())  # SETTING=VALUE is one word


def _runs(text, n=9):
    words = _words(text)
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def test_no_sentence_of_the_sources_is_copied():
    sources = sorted((SHARED / "sources").glob("*.txt"))
    if not sources:
        pytest.skip("the sources are not here")
    runs = set().union(*(_runs(s.read_text()) for s in sources)) - _runs(TITLE)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    kinds = {".md", ".py", ".csv", ".ipynb", ".yaml"}
    for name in [f for f in files.split("\0") if Path(f).suffix in kinds and (ROOT / f).is_file()]:
        text = re.sub(r"\\n|<[^>]+>", " ", (ROOT / name).read_text())
        found = _runs(text) & runs
        assert not found, f"{name}: {' '.join(min(found))}"
