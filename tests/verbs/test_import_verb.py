"""kvlab import on small files of every format, and on bytes that are none."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import runs
from kvlab.capture import foreign
from kvlab.cli import main
from kvlab.errors import BadInput

DATA = Path(__file__).parent.parent / "data"
HERE = DATA / "foreign"


def imported(tmp_path, capsys, *words):
    assert main(["import", *map(str, words), "--out", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    run = runs.load(told["run"])
    assert run.manifest["outcome"] == "completed" and run.manifest["imported"]["unknown"] == told["unknown"]
    return told, run


def test_vllm_bench_becomes_arms(tmp_path, capsys):
    files = HERE / "vllm_bench_replicas.json", HERE / "vllm_bench_1p1d.json"
    told, run = imported(tmp_path, capsys, *files, "--arm", "replicas", "--arm", "1P1D")
    rows = run.table("requests")
    assert (told["experiment"], told["format"], told["rows"]) == ("chunk-first", "vllm-bench", {"requests": 8})
    one = rows.iloc[0]
    assert one["arm"] == "replicas" and one["ttft_ms"] == pytest.approx(200) and one["chunk_tokens"] == 2048
    assert list(one["gaps_ms"]) == pytest.approx([10, 100, 10]) and one["longest_gap_ms"] == pytest.approx(100)
    assert one["e2e_ms"] == pytest.approx(320) and rows["start_s"].tolist() == [0, 0.5, 1, 1.5] * 2
    assert rows["error"].fillna("").tolist() == ["", "", "", "Traceback Server disconnected"] * 2


def test_vllm_bench_without_details_names_the_flag(tmp_path, capsys):
    assert main(["import", str(HERE / "vllm_bench_summary.json"), "--out", str(tmp_path)]) == 2
    assert "--save-detailed" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_aiperf(tmp_path, capsys):
    _, run = imported(tmp_path, capsys, HERE / "aiperf_profile_export.jsonl")
    rows = run.table("requests")
    assert rows["ttft_ms"].tolist()[:2] == [255.5, 201.0] and rows["longest_gap_ms"].tolist()[:2] == [40.0, 25.5]
    assert rows["prompt_tokens"].tolist() == [550] * 3 and rows["start_s"][1] == pytest.approx(1.0, abs=1e-6)
    assert rows["error"][2] == "RequestCancellationError Request was cancelled after 0.000 seconds"


def test_guidellm_has_no_gaps_and_says_so(tmp_path, capsys):
    told, run = imported(tmp_path, capsys, HERE / "guidellm_benchmarks.json")
    rows = run.table("requests")
    assert rows["rate_rps"].tolist() == [1, 1, 1, 4, 4] and rows["longest_gap_ms"].isna().all()
    assert rows["e2e_ms"][0] == pytest.approx(1200) and rows["error"][2] == "connection refused"
    assert told["unknown"][0].startswith("gaps between tokens") and "keeps 2" in told["unknown"][-1]


def test_nixlbench_with_a_log_prefix(tmp_path, capsys):
    told, run = imported(tmp_path, capsys, HERE / "nixlbench.log")
    rows = run.table("pulls")
    assert told["experiment"] == "descriptor-shape" and run.manifest["parameters"]["memory"] == "VRAM"
    assert len(rows) == 8
    last = rows.iloc[-1]
    assert (last["descriptors"], last["descriptor_bytes"], last["bytes"]) == (256, 65536, 16 << 20)
    assert (last["post_us"], last["xfer_us"]) == (61.5, 762.0)


def test_nixlbench_of_before_has_no_post(tmp_path, capsys):
    _, run = imported(tmp_path, capsys, HERE / "nixlbench_old.txt")
    rows = run.table("pulls")
    # Avg Lat. is by block: two blocks of 24.6508 us each
    assert rows["post_us"].isna().all() and rows["xfer_us"].tolist() == [21.1726, 21.7391, 49.3016]


def test_two_configurations_in_one_compressed_file_are_two_arms(tmp_path, capsys):
    told, run = imported(tmp_path, capsys, HERE / "nixlbench_two.txt.gz")
    assert run.table("pulls")["arm"].nunique() == 2 and any("WRITE transfers" in u for u in told["unknown"])


def test_metrics_pair_gives_averages(tmp_path, capsys):
    pair = [DATA / "metrics" / f"h200_decode_{w}.txt.xz" for w in ("before", "after")]
    _, run = imported(tmp_path, capsys, *pair, "--prompt-tokens", 4096)
    row = run.table("pulls").iloc[0]
    assert row["case"].startswith("average of ") and row["prompt_tokens"] == 4096
    assert 0 < row["post_us"] <= row["xfer_us"] and run.has("engine_metrics")


def test_log(tmp_path, capsys):
    log = DATA.parent.parent / "data/which_transport/recorded/logs/h200_vllm_decode_tcp.log.gz"
    _, run = imported(tmp_path, capsys, log, "--arm", "mine")
    assert run.table("verdicts")[["arm", "transport"]].values.tolist() == [["mine", "tcp"]]


@pytest.mark.parametrize("words", [[HERE / "nixlbench.log", HERE / "vllm_bench_1p1d.json"], [Path(__file__)], ["no"]])
def test_what_cannot_be_read_is_one_line(tmp_path, capsys, words):
    assert main(["import", *map(str, words), "--out", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(["", "vllm_bench_1p1d.json", "nixlbench_old.txt"]), st.integers(0, 999))
def test_bytes_never_crash(tmp_path_factory, noise, name, at):
    whole = (HERE / name).read_bytes() if name else b""
    path = tmp_path_factory.mktemp("f") / "x"
    path.write_bytes(whole[:at] + noise + whole[at:])
    assert main(["import", str(path), "--out", str(path.parent / "runs")]) in (0, 2)


def test_an_empty_file_is_said_once(tmp_path, capsys):
    (tmp_path / "empty").touch()
    assert main(["import", str(tmp_path / "empty"), "--out", str(tmp_path / "runs")]) == 2
    assert "/empty is empty; kvlab import reads" in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_gzip_cut_short(tmp_path):
    (tmp_path / "x").write_bytes(gzip.compress(b"a" * 99)[:12])
    with pytest.raises(BadInput):
        foreign.recognise(str(tmp_path / "x"))
