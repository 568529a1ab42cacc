"""What kvlab import made is replayed by its notebook, to the end, and shows the imported figures."""

import json
import lzma
import re
from pathlib import Path

import pytest
import replayed
import vl_convert

from kvlab import runs
from kvlab.analysis import compare, cost
from kvlab.cli import main
from kvlab.views import descriptor_shape, few_large_regions

DATA = Path(__file__).parent.parent / "data"
FOREIGN = DATA / "foreign"
PAIR = [DATA / "metrics" / f"h200_decode_{when}.txt.xz" for when in ("before", "after")]
LOG = DATA.parent.parent / "data/which_transport/recorded/logs/h200_vllm_decode_tcp.log.gz"


@pytest.fixture(scope="module")
def quick():
    """Recordings beside the imported run are fitted once, with few resamples."""
    beside = {name: runs.load(name) for name in (descriptor_shape.CPU, descriptor_shape.GPU)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "DRAWS", 8)
        patch.setattr(compare, "DRAWS", 40)
        patch.setattr(
            descriptor_shape,
            "both",
            lambda run: [run, beside[descriptor_shape.CPU if descriptor_shape.on_gpu(run) else descriptor_shape.GPU]],
        )
        # Charts are checked against their schema and not drawn, which test_faults does.
        patch.setattr(vl_convert, "vegalite_to_svg", lambda spec: "<svg/>")
        patch.setattr(vl_convert, "vegalite_to_png", lambda spec, scale: b"")
        patch.setattr(few_large_regions, "_recorded", lambda: beside[descriptor_shape.GPU])
        yield


def imported(tmp_path, capsys, *words):
    assert main(["import", *map(str, words), "--out", str(tmp_path / "runs")]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def post_ms() -> float:
    """The mean post between the two dumps, straight from their text."""
    sums = []
    for path in PAIR:
        lines = lzma.decompress(path.read_bytes()).decode().splitlines()
        for name in ("vllm:nixl_post_time_seconds_sum", "vllm:nixl_post_time_seconds_count"):
            sums.append(sum(float(line.split()[-1]) for line in lines if line.startswith(name)))
    return 1e3 * (sums[2] - sums[0]) / (sums[3] - sums[1])


# A cell's call -> what stands in it; worked out by hand from the fixtures.
@pytest.mark.parametrize(
    ("words", "shows"),
    [
        ([LOG], {"view.answers(": r"tcp\s+lo\s+yes"}),
        # 16 MiB in 762 µs; two averages of unequal count give no interval and no baseline copy.
        ([FOREIGN / "nixlbench.log"], {"view.rate_chart(pair[0]": r"22\.017", "view.cost_table(": "GPU, VRAM +nixlb"}),
        ([FOREIGN / "nixlbench_two.txt.gz"], {"print(regions.conclude(": "cost model"}),
        (
            [FOREIGN / "nixlbench_old.txt"],
            {"view.post_chart(pair[0]": "not known apart", "view.fit_chart(pair[0]": "no cost model", "print(": "fit"},
        ),
        # Longest gaps of 40 and 25.5 ms; two requests done in 1.0 s and 236.6 ms, one failed.
        (
            [FOREIGN / "aiperf_profile_export.jsonl"],
            {"view.stall_table(summary)": r"1\.6 +3 +1 .* 33 ", "ranked": "[?]"},
        ),
        (
            [FOREIGN / "guidellm_benchmarks.json"],
            {"view.stall_table(summary)": r" 4\.0 +2 +0 ", "ranked": "gaps not k"},
        ),
        (
            [FOREIGN / "vllm_bench_replicas.json", FOREIGN / "vllm_bench_1p1d.json", "--arm", "mine", "--arm", "1P1D"],
            {"view.stall_table(summary)": r"mine +2\.0 +4 +1 .*\n +1P1D +2\.0 +4 +1 ", "ranked": "Tuned replicas"},
        ),
        (
            PAIR,
            {"view.split_table(": rf" – +\d+ .* {post_ms():,.2f} ", "ratio_chart": "one arm only", "print(v": "post"},
        ),
        ([*PAIR, "--prompt-tokens", 16384], {"published_split.pull_table(": r"16,384 +h200_decode_after +1\.00"}),
        ([PAIR[1]], {"published_split.split_chart(": "this run, h200_decode_after"}),
    ],
    ids=lambda v: getattr(v[0], "name", "") if isinstance(v, list) else "",
)
def test_its_notebook_runs_to_the_end(quick, tmp_path, capsys, words, shows):
    told = imported(tmp_path, capsys, *words)
    cells = replayed.replay(told["experiment"], told["run"], tmp_path / "replay")
    for call, pattern in shows.items():
        found = [text for source, text in cells if source.splitlines()[-1].startswith(call) or call in source]
        assert any(re.search(pattern, text) for text in found), (call, found)
    assert json.loads((tmp_path / "replay" / "summary.json").read_text("utf-8"))["verdict"]
