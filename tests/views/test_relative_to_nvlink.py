"""relative-to-nvlink: what is said of block sizes on a hand-made table, and of the recordings."""

import pandas as pd
import pytest

from kvlab import runs
from kvlab.views import relative_to_nvlink as view

FOUND = pd.DataFrame(
    {
        "prompt_tokens": [4096] * 3 + [16384] * 3,
        "block_size": [16, 64, 256] * 2,
        "usual": True,
        "ttft_ratio_low": [1.1, 0.9, 1.0, 1.2, 1.05, 1.0],
        "pull_ms": [60.0, 15.0, 9.0, 230.0, 60.0, 16.0],
        "ttft_ms": [240.0, 205.0, 200.0, 870.0, 680.0, 640.0],
    }
)


def test_a_block_matters_while_its_first_token_is_resolved_to_be_longer():
    assert view.stops_mattering(FOUND) == {4096: 64, 16384: 256}
    # A longer first token at 64 tells against 16 too, even where 16 itself is not resolved.
    odd = FOUND.assign(ttft_ratio_low=[0.9, 1.1, 1.0, 0.9, 0.95, 1.0])
    assert view.stops_mattering(odd) == {4096: 256, 16384: 16}
    # Cross-layer blocks are another kind of arm.
    assert view.stops_mattering(FOUND.assign(usual=FOUND["prompt_tokens"] == 4096)) == {4096: 64}


def test_advice_is_one_line_of_the_longest_prompt():
    said = view.block_size_advice(FOUND)
    assert "\n" not in said
    assert "Set --block-size 256 or more on both engines instead of 16: at 16k" in said
    assert "16 ms instead of 230, the first token 640 instead of 870" in said


def test_block_sizes_of_the_recording():
    engines = runs.load("relative_to_nvlink/h200-block-sizes")
    found = view.block_sizes(engines, runs.load("descriptor_shape/h200-one-gpu"), "cuda_ipc, GET on, 4 threads")
    long = found[found["prompt_tokens"] == 16384].set_index("descriptors")
    # 2 GiB of Llama 8B's KV: 32 layers, K and V, 16,384 tokens; in blocks of 16 to 256, or all in one.
    assert long.index.tolist() == [32 * 2 * 16384 // block for block in (16, 32, 64, 128, 256)] + [1]
    # Medians by pandas alone.
    pulls = engines.table("pulls").query("not warmup and prompt_tokens == 16384")
    medians = pulls.groupby("descriptors")["xfer_us"].median() / 1e3
    assert long["pull_ms"].to_dict() == pytest.approx(medians.to_dict())
    assert long["unsplit_ms"].notna().tolist() == [False] * 5 + [True]
    assert long["every_thread"].tolist() == [True] * 5 + [False]
    assert long["usual"].tolist() == [True] * 5 + [False]
    assert view.stops_mattering(found)[16384] == 128


def test_whether_it_matters_to_the_user():
    run = runs.load("relative_to_nvlink/cpu")
    found = view.ratios(run)
    assert view.user(run, found).startswith("by first token and throughput not resolved")
    said = "\n".join(view.predictions(run, found))
    assert "TCP: the prediction that the pull is longer holds" in said
    assert "that its post is shorter is not resolved" in said
    # Turned round, the first prediction is refuted, and a first token that differs is the user's matter.
    turned = found.assign(low=1 / found["high"], high=1 / found["low"])
    assert "the pull is longer is REFUTED" in "\n".join(view.predictions(run, turned))
    assert "it matters to the user" in view.user(run, found.assign(different=True))


def test_several_at_once_of_a_recording_that_broke_off():
    run = runs.load("relative_to_nvlink/h200-tcp-30-at-a-time")
    html = view.at_once_table([run]).as_raw_html()
    # 30 pulls of 4,096 tokens, 128 KiB each, until the last first token.
    last_ms = run.table("requests").query("arm == 'TCP' and phase == '30 at a time 4096'")["ttft_ms"].max()
    assert f"{30 * 4096 * 128 * 1024 / last_ms / 1e6:.3f}" in html
    # No pull of one arm was read from the ring, which leaves the others.
    assert "an unknown part" in view.user(run, view.ratios(run))
