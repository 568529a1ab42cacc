import json
import signal

import pandas as pd
import pytest

from kvlab import runs, schema
from kvlab.errors import BadInput, Contradicted, RunFailed

PULL = {"arm": "a", "bytes": 8, "post_us": 1.0, "xfer_us": 2.0}


@pytest.fixture
def run(tmp_path):
    return runs.create("post-vs-completion", {"x": 1}, out=tmp_path / "a b é")


def test_tables_keep_labels_and_units(run):
    run.write("pulls", pd.DataFrame([PULL | {"warmup": None, "verified": True}]))
    import pyarrow.parquet as pq

    field = pq.read_schema(run.path / "pulls.parquet").field("post_us")
    assert field.metadata == {b"label": b"Post", b"unit": "µs".encode()}
    assert runs.load(run.path).table("pulls")["post_us"].tolist() == [1.0]
    assert schema.label("pulls", "post_us") == "Post (µs)"


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (pd.DataFrame([PULL | {"posts": 1}]), "unknown column 'posts'"),
        (pd.DataFrame([{"arm": "a"}]), "'bytes' is missing"),
        (pd.DataFrame([PULL | {"post_us": "fast"}]), "'post_us' is not double"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(run, frame, says):
    with pytest.raises(BadInput, match=says):
        run.write("pulls", frame)
    assert not run.has("pulls")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "completed"),
        (RunFailed("x"), "failed"),
        (ValueError("x"), "failed"),
        (Contradicted("x"), "contradicted"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_manifest_tells_how_it_ended(run, error, outcome):
    def body():
        with run.recording():
            run.write("pulls", pd.DataFrame([PULL]))
            if error is not None:
                raise error

    if error is None:
        body()
    else:
        with pytest.raises(type(error)):
            body()
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["outcome"] == outcome
    assert runs.load(run.path).table("pulls").shape[0] == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_interrupts_and_a_second_one_does_not_break_off_the_clean_up(run, signum):
    before, cleaned = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)], False
    with pytest.raises(KeyboardInterrupt), run.recording():
        try:
            signal.raise_signal(signum)
        finally:
            signal.raise_signal(signal.SIGINT)
            cleaned = True
    assert cleaned and run.manifest["outcome"] == "interrupted"
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_recording_is_never_written_to(run):
    frozen = runs.load(run.path)
    with pytest.raises(RuntimeError):
        frozen.update(outcome="completed")
    with pytest.raises(RuntimeError):
        frozen.write("pulls", pd.DataFrame([PULL]))


def test_labels_cannot_leave_the_out_folder(tmp_path):
    run = runs.create("post-vs-completion", {}, out=tmp_path, label="../../../etc/$(x) ü")
    assert run.path.parent == (tmp_path / "post-vs-completion").resolve()


def test_two_runs_in_one_second_have_two_folders(tmp_path):
    made = {runs.create("e", {}, out=tmp_path, label="x").path for _ in range(3)}
    assert len(made) == 3


def test_a_folder_with_a_run_is_refused(run):
    with pytest.raises(BadInput, match="holds a run already"):
        runs.create("e", {}, run_dir=run.path)


def test_out_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(BadInput, match="choose another with --out"):
        runs.create("e", {}, out=tmp_path / "f")


def test_missing_run_says_where_to_look():
    with pytest.raises(BadInput, match="kvlab list"):
        runs.load("nothing/here")


def test_half_a_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "x"
    runs.write_atomic(target, b"old")
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        runs.write_atomic(target, b"new")
    assert target.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_recording_that_broke_off_replays_to_the_end(tmp_path):
    from kvlab import experiments, params

    chosen = params.validate(
        "relative-to-nvlink", {"replay": "relative_to_nvlink/h200-block-sizes", "run_dir": str(tmp_path / "own")}
    )
    run = experiments.run_or_replay(chosen)
    own = runs.load(tmp_path / "own").manifest
    assert run.manifest["outcome"] == own["recorded_outcome"] == "interrupted" and own["outcome"] == "completed"
