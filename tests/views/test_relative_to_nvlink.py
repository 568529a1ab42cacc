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


AGENTS, BARE = "descriptor_shape/h200-one-gpu", "cuda_ipc, GET on, 4 threads"


def test_block_sizes_of_two_recordings_are_of_all_their_starts():
    engines = [runs.load(f"relative_to_nvlink/h200-block-sizes{part}") for part in ("", "-again")]
    agents = runs.load(AGENTS)
    found = view.block_sizes(engines, agents, BARE)
    long = found[found["prompt_tokens"] == 16384].set_index("descriptors")
    # 2 GiB of Llama 8B's KV: 32 layers, K and V, 16,384 tokens; in blocks of 16 to 256.  The first recording's arm of
    # cross-layer blocks is none of the second.
    assert long.index.tolist() == [32 * 2 * 16384 // block for block in (16, 32, 64, 128, 256)]
    assert found["n"].unique().tolist() == [40]
    # Medians by pandas alone.
    pulls = pd.concat([e.table("pulls").query("not warmup and prompt_tokens == 16384") for e in engines])
    medians = pulls.groupby("descriptors")["xfer_us"].median() / 1e3
    assert long["pull_ms"].to_dict() == pytest.approx(medians.drop(1.0).to_dict())
    assert long["split"].all() and long["every_thread"].all() and long["usual"].all()
    assert (long["gb_per_s"] * long["pull_ms"] / 1e3).to_list() == pytest.approx([2**31 / 1e9] * 5)
    assert (long["pull_share"] < 0.3).all()
    assert view.stops_mattering(found)[16384] == 128
    each = [view.block_sizes([e], agents, BARE) for e in engines]
    both = view.beside(*each).set_index(["prompt_tokens", "block_size"])
    assert len(both) == 10
    ends = [e.table("pulls").query("not warmup and prompt_tokens == 4096 and descriptors == 1024") for e in engines]
    first, again = (rows["xfer_us"].median() for rows in ends)
    assert both.loc[(4096, 256), "pull_ms_ratio"] == pytest.approx(again / first)


def test_cross_layer_blocks_merge_in_a_fresh_cache_and_not_in_a_used_one():
    engines = [runs.load(f"relative_to_nvlink/h200-cross-layers{part}") for part in ("", "-again")]
    found = view.block_sizes(engines, runs.load(AGENTS), BARE)
    layers = found[~found["usual"] & (found["prompt_tokens"] == 16384)].set_index("descriptors")
    # One block of 16 tokens is 2 MiB with all its layers, 16,384 tokens are 1,024 of them.
    assert layers["kib"].to_dict() == {1024: 2048, 1: 2048 * 1024}
    assert layers["n"].to_dict() == {1024: 8, 1: 32}
    asked = pd.concat([e.table("requests").query("not warmup and prompt_tokens == 16384") for e in engines])
    first = asked[asked["arm"].str.contains("cross") & (asked["repetition"] < 8)]["ttft_ms"].median()
    assert layers.loc[1, "ttft_ms"] == pytest.approx(first)
    plain = found[found["usual"]]
    assert plain["descriptors"].tolist() == [16384, 65536] and (plain["ttft_ratio"] == 1).all()
    said = view.cross_layer_findings([found]).splitlines()
    words = ["holds" if ": holds (" in line else "open" if "not resolved" in line else "" for line in said]
    assert words == ["holds", "open", "", "holds"]
    assert said[2].startswith("run 1: with them, in a used cache: 1/15.2 at 4k, 1/18.8 at 16k")
    # Below the split the model's other part applies, as it does to every count under 1,024.
    assert found.loc[~found["split"], "descriptors"].max() == 256
    assert layers.loc[1, "predicted_ms"] < layers.loc[1024, "predicted_ms"]
    # Were the pulls as long as without, neither of the last two would hold.
    slow = found.assign(**{f"pull{e}": found[f"pull{e}"].where(found["usual"], 199.0) for e in view.ENDS})
    assert sum("does NOT hold" in line for line in view.cross_layer_findings([slow]).splitlines()) == 2


def test_what_a_second_start_was_predicted_to_give():
    again = FOUND.assign(descriptors=FOUND.index, arm="cuda_ipc")
    rows = pd.concat([again, again.iloc[[0, 3]].assign(block_size=32, ttft_ms=[210.0, 800.0], descriptors=[10, 11])])
    said = view.again_predictions(rows, rows.assign(pull_ms=rows["pull_ms"] * 1.05)).splitlines()
    assert "within a tenth of the first start's: holds (8 of 8 are; +5% to +5%)" in said[0]
    assert "4k: first tokens of two starts differ by more" in said[1] and "does NOT hold (by up to 0 ms" in said[1]
    assert said[3].endswith("32 to 64 tokens a block: holds")
    assert said[4].endswith("does NOT hold (16, 32 do)")
    said = view.again_predictions(rows, rows.assign(pull_ms=rows["pull_ms"] * 2, ttft_ms=rows["ttft_ms"] + 300))
    assert "does NOT hold (0 of 8 are; +100% to +100%)" in said
    assert "holds (by up to 300 ms; those pulls by 88)" in said


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


def test_starts_of_two_runs_stay_apart_where_one_lacks_a_table(tmp_path):
    # A start whose pulls were not read from the ring must not make another run's pulls join its requests.
    class Made:
        def __init__(self, pulls, requests):
            self.tables = {"pulls": pulls, "requests": requests}

        def table(self, name):
            return self.tables[name]

    def rows(*starts):
        return pd.DataFrame({"start": starts, "repetition": 0, "warmup": False, "request": "a"})

    both = [Made(rows(0), rows(0, 1)), Made(rows(0), rows(0))]
    pulls, asked = (view._together(both, name) for name in ("pulls", "requests"))
    assert pulls["start"].nunique() == 2 and asked["start"].nunique() == 3
    assert pulls["start"].tolist() == [asked["start"].iloc[0], asked["start"].iloc[2]]


def test_a_prediction_without_a_case_is_open():
    run = runs.load("relative_to_nvlink/h200-tcp-30-at-a-time-16k")
    alone = view.at_once([run]).query("arm == 'cuda_ipc'")
    assert all(
        ": is open ()" in line or ": is open (;" in line for line in view.at_once_predictions(alone).splitlines()
    )


def test_one_round_has_no_interval_however_many_its_requests():
    found = view.ratios(runs.load("relative_to_nvlink/h200-tcp-30-at-a-time-16k"))
    assert found["low"].isna().all() and not found["different"].any() and (found["n"] == 1).all()
    assert found["ratio"].notna().all()


def test_thirty_at_a_time_of_two_recordings():
    at_once = [runs.load(f"relative_to_nvlink/h200-tcp-30-at-a-time{part}") for part in ("", "-16k")]
    found = view.at_once(at_once).set_index(["run", "arm", "prompt_tokens"]).sort_index()
    key = ("h200-tcp-30-at-a-time-16k", "TCP", 16384)
    pulls = at_once[1].table("pulls").query("arm == 'TCP' and concurrency > 1 and not warmup")
    # vLLM's own sums and the ring, read independently of each other.
    assert found.loc[key, "pull_ms"] == pytest.approx(pulls["xfer_us"].mean() / 1e3)
    assert found.loc[key, "post_max_ms"] == pulls["post_us"].max() / 1e3
    last_ms = at_once[1].table("requests").query("arm == 'TCP' and concurrency > 1 and not warmup")["ttft_ms"].max()
    assert found.loc[key, "rate"] == pytest.approx(30 * 16384 * 128 * 1024 / last_ms / 1e6)
    # The ring of the other recording's TCP arm was not read.
    assert found.loc[("h200-tcp-30-at-a-time", "TCP")]["post_max_ms"].isna().all()
    rate, gap = view.at_once_predictions(found.reset_index()).splitlines()
    assert "does NOT hold (0.287 at 4k, 0.287 at 8k, 0.288 at 16k)" in rate
    assert ": holds (" in gap and gap.count(" times at ") == 3
    turned = found.reset_index().assign(rate=0.4)
    turned["gap_median_ms"] = turned["arm"].eq("TCP") + 1.0
    rate, gap = view.at_once_predictions(turned).splitlines()
    assert ": holds (" in rate and "does NOT hold (0.5 times" in gap


def test_several_at_once_of_a_recording_that_broke_off():
    run = runs.load("relative_to_nvlink/h200-tcp-30-at-a-time")
    html = view.at_once_table([run]).as_raw_html()
    # 30 pulls of 4,096 tokens, 128 KiB each, until the last first token.
    last_ms = run.table("requests").query("arm == 'TCP' and phase == '30 at a time 4096'")["ttft_ms"].max()
    assert f"{30 * 4096 * 128 * 1024 / last_ms / 1e6:.3f}" in html
    # No pull of one arm was read from the ring, which leaves the others.
    assert "an unknown part" in view.user(run, view.ratios(run))
