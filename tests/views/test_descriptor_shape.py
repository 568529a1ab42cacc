import json

import numpy as np
import pandas as pd
import pytest

from kvlab import runs
from kvlab.analysis import cost
from kvlab.views import descriptor_shape as view
from kvlab.views import few_large_regions as regions

MIB = 1 << 20
OVER = {"ipc": "cuda_ipc", "memory": "cma", "road": "tcp"}


def made(tmp_path, slow, memory="DRAM", threads=0, rounds=10):
    """A run whose pulls take 1 ms and ``slow[arm]`` us more a descriptor; a copy takes 0.5 ms."""
    own = {"arms": [{"label": arm} for arm in slow], "memory": memory, "shape": "scattered", "in_flight": 1}
    own |= {"poll_interval_ms": 0}
    run = runs.create("descriptor-shape", own, run_dir=tmp_path / "run")
    rows, limits = [], []
    for r in range(rounds):
        limits.append({"name": "copy", "kind": "memory", "bytes": MIB, "seconds": 5e-4, "gb_per_s": MIB / 5e5})
        limits[-1]["repetition"] = r
        for arm, us in slow.items():
            for size, variation in ((1 << 15, ""), (1 << 17, ""), (MIB, ""), (1 << 17, ", contiguous")):
                n = 1 if variation else MIB // size
                row = {"arm": arm, "case": f"1 MiB in {MIB // size:,} x {size >> 10} KiB{variation}", "descriptors": n}
                row |= {"descriptor_bytes": size, "bytes": MIB, "post_us": 10 + us * n, "in_flight": 1, "warmup": False}
                row |= {"xfer_us": (1000 + us * n) * (1 + r / 1000), "nixl_threads": threads, "repetition": r}
                rows.append(row | {"poll_interval_us": 0.0})
    run.write("pulls", pd.DataFrame(rows))
    run.write("limits", pd.DataFrame(limits))
    verdicts = [{"arm": arm, "transport": OVER[arm], "expected": "", "agrees": True} for arm in slow]
    run.write("verdicts", pd.DataFrame(verdicts))
    run.update(outcome="completed")
    return run


def held(checks):
    return {c["what"]: c["holds"] for c in checks}


def gained(*rows):
    return pd.DataFrame(rows, columns=["over", "ratio", "low", "high"]).assign(descriptor_bytes=128 << 10)


GOOD = pd.Series([0.1, -0.2, 0.24, 0.0])


def test_predictions_hold_where_the_whole_interval_lies_inside():
    rows = gained(("ipc", 40.0, 30.0, 50.0), ("memory", 1.1, 0.9, 1.5), ("road", 1.0, 0.8, 1.9))
    assert held(view.predictions(OVER, rows, GOOD, 0.94)) == {
        "ipc (cuda_ipc)": True,
        "memory (cma)": True,
        "road (tcp)": True,
        "the cost model": True,
        "60% of a device copy": True,
    }


def test_predictions_are_refuted_where_it_lies_outside():
    rows = gained(("ipc", 4.0, 3.0, 9.9), ("memory", 3.0, 2.1, 3.5), ("road", 5.0, 2.5, 6.0))
    found = view.predictions(OVER, rows, pd.Series([0.1, 0.3, -0.3, 0.0]), 0.59)
    assert set(held(found).values()) == {False}
    assert "50% of 4 shapes within 25%" in {c["text"] for c in found}


def test_predictions_are_open_where_it_reaches_across_or_is_missing():
    rows = gained(("ipc", 11.0, 9.0, 12.0), ("memory", 1.5, 1.0, 2.1), ("road", 1.0, np.nan, np.nan))
    found = view.predictions(OVER, rows, GOOD, np.nan)
    assert [c["holds"] for c in found] == [None, None, None, True], "no GPU: nothing is said of a device copy"
    assert found[2]["text"] == "128 KiB take 1 times one descriptor"


def test_an_arm_is_judged_by_its_evidence():
    rows = gained(("ipc", 1.0, 0.9, 1.1))
    assert held(view.predictions({"ipc": "tcp"}, rows, GOOD, np.nan))["ipc (tcp)"] is True
    assert held(view.predictions({}, rows, GOOD, np.nan)) == {"the cost model": True}


def test_verdict_of_a_made_run(tmp_path):
    # 8 descriptors against one: (1000 + 8 * 4000) / (1000 + 4000) = 6.6; (1000 + 8) / (1000 + 1) = 1.007
    run = made(tmp_path, {"ipc": 4000.0, "memory": 1.0}, memory="VRAM")
    ratio = view.gains(run).set_index("over")["ratio"]
    assert ratio["ipc"] == pytest.approx(6.6) and ratio["memory"] == pytest.approx(1008 / 1001)
    share = view.shares(run).set_index("arm")["share"]
    # A round's pull takes up to 0.9 percent longer, in the middle 0.45.
    assert share["memory"] == pytest.approx(500 / (1001 * 1.0045))
    text, numbers = view.verdict(run)
    assert "ipc (cuda_ipc) is REFUTED: 128 KiB take 6.6 (6.6 to 6.6) times one descriptor" in text
    assert "60% of a device copy is REFUTED: best arm 50%" in text
    assert numbers["shares"][-1]["arm"] == "memory"
    run.update(outcome="contradicted", contradictions=["ipc went over tcp"])
    assert "CONTRADICTS A LABEL: ipc went over tcp" in view.verdict(run)[0]


def test_variations_are_told_from_plain_cells_and_held_against_them(tmp_path):
    run = made(tmp_path, {"ipc": 4000.0})
    assert set(view.plain(run)["descriptor_bytes"]) == {1 << 15, 1 << 17, MIB}
    found = view.ratios(run)
    assert found[["over", "arm", "descriptor_bytes"]].to_numpy().tolist() == [["ipc", "contiguous", 1 << 17]]
    assert found["ratio"][0] == pytest.approx(5000 / 33000)


def test_a_run_without_limits_and_variations_still_reads(tmp_path):
    run = made(tmp_path, {"ipc": 4000.0})
    run.write("pulls", run.table("pulls").query("not case.str.contains('contiguous')"))
    (run.path / "limits.parquet").unlink()
    assert view.variations_chart(run) == "no variations were measured"
    assert view.shares(run).empty and "copy" not in view.verdict(run)[0]
    assert "GB/s" in view.rate_chart(run).bundle["image/svg+xml"]


def test_threads_part_the_model_at_nixls_split():
    names = list(view.models(runs.load(view.GPU)))
    assert [n for n in names if view.PART in n] == [
        "cuda_ipc, GET on, 4 threads · below 1,024",
        "cuda_ipc, GET on, 4 threads · 1,024 and up",
    ]
    below, above = regions.threaded([])
    assert below.ranges["descriptors"][1] < 1024 <= above.ranges["descriptors"][0]
    assert below.theta[1] == pytest.approx(12, abs=1) and above.theta[1] == pytest.approx(2.6, abs=0.3)


def test_the_published_pull_lies_on_both_readings_and_beyond_is_marked():
    byte, descriptor, roce = regions.b300()
    for fit, ms in ((byte, 28.7), (descriptor, 28.7), (roce, 20.9)):
        said = cost.predict(fit, 4250, 28.7e6 * 19).iloc[0]
        assert said["xfer_us"] == pytest.approx(ms * 1e3) and not said["extrapolated"]
    met = regions.break_evens()
    assert np.isnan(met["descriptors"].iloc[0]) and met["fewer"].iloc[0] == "RoCE"
    # 0.5453 GB at 900 GB/s take 0.606 ms; the other 28.094 are 6.610 us a descriptor; (20.9 - 0.606) / 6.610 us = 3070
    assert met["descriptors"].iloc[1] == pytest.approx(3070, rel=0.001)
    assert met["extrapolated"].iloc[1] and met["fewer"].iloc[1].startswith("NVLink")


def wire(low):
    row = {"parameter": "wire_per_descriptor_us", "value": 3.0, "low": low, "high": 4.0}
    model = regions.b300()[0]
    return cost.Fit("gpu", model.theta, model.draws, model.ranges, pd.DataFrame([row]), model.residuals)


def test_claim_follows_the_numbers():
    met = regions.break_evens()
    assert "speaks for the second reading" in regions.claim(wire(2.0), met)
    assert "nothing speaks for the second" in regions.claim(wire(0.0), met)
    assert "under no reading" in regions.claim(wire(2.0), met.assign(descriptors=np.nan))


def test_conclude_writes_the_summary_beside_a_recording(tmp_path):
    run = made(tmp_path, {"memory": 1.0, "road": 50.0})
    pair = view.both(run)
    assert [view.on_gpu(r) for r in pair] == [False, True]
    text = regions.conclude(pair)
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["verdict"] == text and text.count("prediction for") == 3 + 5
    assert set(summary["runs"]) == {r.id for r in pair}
    view.rate_chart(run), view.fit_chart(run), view.variations_chart(pair[1])
    assert {p.stem for p in (run.path / "charts").glob("*.png")} == {"rate_dram", "fit_dram", "variations_vram"}


def test_tables_carry_status_and_published_figures():
    text = regions.knobs_table([runs.load(view.GPU)]).as_raw_html()
    for figure in ("65,536 → 8,192", "3,528 → 1", "34,000 → 422", "1,661 → 687", "399 → 219", "263 → 197", "9,216 → 1"):
        assert figure in text
    rows = {(r["Machine"], r["Arm"]): (r["Post a descriptor (µs)"], r["Status"]) for r in regions.cost_rows()}
    assert rows["B300 (study)", "cuda_ipc over NVLink"] == ("2.7", "published")
    assert rows["vllm#50913", "one pull"] == ("3.8", "derived"), "6.7 ms over 1,785"
    assert rows["nixl#176", "transfer() call"] == ("40", "derived"), "0.6 s over 15,000"
