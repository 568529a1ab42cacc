"""The run folder: a manifest that tells how the run ended, and tidy Parquet tables.

::

    runs/EXPERIMENT/TIME-LABEL/
      manifest.json  summary.json  *.parquet  logs/  charts/  notebook.ipynb  report.html

Every file is written to a temporary name and renamed, so a crash leaves the old file or the new one.
"""

from __future__ import annotations

import datetime as dt
import gzip
import io
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pandas as pd

from kvlab import __version__, schema
from kvlab.errors import BadInput, Contradicted, KvlabError, RunFailed
from kvlab.paths import shared_dir

RUNNING = "running"


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` by a temporary name in the same folder, synced before the rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(temporary, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False, default=str, allow_nan=True) + "\n").encode()


def safe_name(text: str) -> str:
    """Turn ``text`` into one path component: letters, digits, ``._-``; never empty, never ``..``."""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.UNICODE).strip(".-") or "run"


class Run:
    """One run folder, open for reading; for writing too when this process made it.

    ``frozen`` runs (recordings under data/, or a run opened for replay) are never written to.
    """

    def __init__(self, path: Path, *, frozen: bool) -> None:
        self.path = path
        self.frozen = frozen
        self.manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text("utf-8"))
        #: where charts, summary and report of *this* execution go; None: nowhere (plain replay)
        self.out: Path | None = None if frozen else path
        #: values that no file of the run may hold
        self.secrets: set[str] = set()
        self._t0 = time.monotonic()

    @property
    def id(self) -> str:
        """EXPERIMENT/FOLDER, for captions and tooltips."""
        return f"{self.manifest['experiment']}/{self.path.name}"

    @property
    def logs(self) -> Path:
        """The folder of raw logs."""
        return self.path / "logs"

    def elapsed_s(self) -> float:
        """Seconds since this object opened the run, by the monotonic clock (a stepping clock is harmless)."""
        return time.monotonic() - self._t0

    def has(self, table: str) -> bool:
        """Tell whether the run holds ``table``."""
        return (self.path / f"{table}.parquet").is_file()

    def table(self, name: str) -> pd.DataFrame:
        """Load a tidy table, or an empty one with the schema's columns when the run has none."""
        if not self.has(name):
            if name not in schema.TABLES:
                raise BadInput(f"no table named {name!r}; known: {', '.join(schema.TABLES)}")
            return pd.DataFrame({c.name: [] for c in schema.TABLES[name]})
        try:
            return pd.read_parquet(self.path / f"{name}.parquet")
        except (OSError, ValueError) as error:
            raise BadInput(f"{self.path / name}.parquet cannot be read: {error}") from None

    def write(self, name: str, frame: pd.DataFrame) -> None:
        """Write (replace) a tidy table after checking it against the schema."""
        import pyarrow.parquet as pq

        buffer = io.BytesIO()
        pq.write_table(schema.conform(name, frame), buffer, compression="zstd")
        self._save(f"{name}.parquet", buffer.getvalue())

    def update(self, **entries: Any) -> None:
        """Merge ``entries`` into manifest.json."""
        from kvlab.capture.redact import without

        self.manifest.update(entries)
        self._save("manifest.json", without(_json(self.manifest).decode(), self.secrets).encode())

    def _save(self, name: str, data: bytes) -> None:
        if self.frozen:
            raise RuntimeError(f"{self.path} is a recording; it is never written to")
        try:
            write_atomic(self.path / name, data)
        except OSError as error:
            raise RunFailed(f"cannot write {name} into {self.path}: {error.strerror}") from None

    def conclude(self, verdict: str, **numbers: Any) -> None:
        """Write summary.json: the verdict in words and the numbers it was computed from."""
        if self.out is not None:
            who = {"experiment": self.manifest["experiment"], "run": str(self.path)}
            said = {"outcome": self.manifest.get("outcome"), "verdict": verdict, **numbers}
            write_atomic(self.out / "summary.json", _json(who | said))

    @contextmanager
    def recording(self) -> Iterator[Run]:
        """Keep the outcome in the manifest, whatever ends the block: completed, failed, interrupted.

        SIGTERM is turned into KeyboardInterrupt for the block, so that clean-up runs; a second signal, or click on
        the stop button, does not break it off.  Where the wall clock was set meanwhile, the manifest says by how many
        seconds (``clock_step_s``): its start and end are off by that.
        """
        with _stopped_once(), self._recorded():
            yield self

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        outcome, error = "failed", ""
        extra: dict[str, Any] = {}
        ahead_s = time.time() - time.monotonic()
        try:
            yield
            outcome = str(self.manifest["outcome"])
            outcome = "completed" if outcome == RUNNING else outcome
        except KeyboardInterrupt:
            outcome, error = "interrupted", "interrupted"
            raise
        except Contradicted as problem:
            outcome, error = "contradicted", str(problem)
            raise
        except KvlabError as problem:
            error = str(problem)
            extra = {"bad_input": True} if isinstance(problem, BadInput) else {}
            raise
        except BaseException as problem:
            error = f"{type(problem).__name__}: {problem}"
            raise
        finally:
            from kvlab.capture import redact

            with suppress(OSError):
                redact.hide(self.logs.rglob("*"), self.secrets)
            # Both clocks are slewed alike, so only a clock that is set (or a machine that slept) parts them.
            step_s = time.time() - time.monotonic() - ahead_s
            extra |= {"clock_step_s": round(step_s, 3)} if abs(step_s) > 0.1 else {}
            end = {"outcome": outcome, "end": _now(), **extra}
            # On a full disk the data error is the one to show, not the manifest's.
            try:
                self.update(**end, **({"error": error} if error else {}))
            except KvlabError:
                if outcome == "completed":
                    raise


@contextmanager
def _stopped_once() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGTERM or SIGINT in the block; later ones are not heard until its end."""

    def stop(signum: int, frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, lambda *_: None)
        raise KeyboardInterrupt(signal.Signals(signum).name)

    # Only the main thread hears signals; a shell's background job has SIGINT ignored, and so it stays.
    heard = [signal.SIGTERM, *([signal.SIGINT] if callable(signal.getsignal(signal.SIGINT)) else [])]
    main = threading.current_thread() is threading.main_thread()
    before = {s: signal.signal(s, stop) for s in heard if main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def new_folder(
    experiment: str, *, out: str | Path | None = None, run_dir: str | Path | None = None, label: str = ""
) -> Path:
    """Make and return the folder of a new run: ``run_dir``, or ``out``/EXPERIMENT/TIME-LABEL.

    Raises BadInput when it cannot be made.  Two runs started in the same second do not share one.
    """
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S")
    name = f"{stamp}-{safe_name(label)}" if label else stamp
    path = (Path(run_dir) if run_dir else Path(out or "runs") / experiment / name).resolve()
    with _making(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if run_dir:
            path.mkdir(exist_ok=True)
            return path
        for n in range(2, 1000):
            with suppress(FileExistsError):
                path.mkdir()
                return path
            path = path.with_name(f"{name}-{n}")
    raise BadInput(f"too many runs at {path.parent}")


@contextmanager
def _making(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(f"cannot make the run folder {path}: {error.strerror}; choose another with --out") from None


def create(
    experiment: str,
    params: Mapping[str, Any],
    *,
    out: str | Path | None = None,
    run_dir: str | Path | None = None,
    label: str = "",
) -> Run:
    """Make a run folder and its manifest.

    :param out: the folder that takes EXPERIMENT/TIME-LABEL; ``runs`` in the current one by default
    :param run_dir: the run folder itself, when the caller chose it (it may exist, without a manifest)
    :raises BadInput: when the folder cannot be made or holds a run already
    """
    from kvlab.capture import provenance
    from kvlab.capture.redact import redacted, secrets

    path = new_folder(experiment, out=out, run_dir=run_dir, label=label)
    with _making(path):
        if (path / "manifest.json").exists():
            raise BadInput(f"{path} holds a run already; choose another folder")
        (path / "logs").mkdir(exist_ok=True)
        (path / "charts").mkdir(exist_ok=True)
        manifest = {
            "experiment": experiment,
            "label": label,
            "kvlab": __version__,
            "outcome": RUNNING,
            "start": _now(),
            "pid": os.getpid(),
            # The folder's own place is not a parameter of the measurement.
            "parameters": redacted({k: v for k, v in params.items() if k != "run_dir"}),
            "commands": [],
            "provenance": provenance.collect(),
        }
        write_atomic(path / "manifest.json", _json(manifest))
    run = Run(path, frozen=False)
    run.secrets = secrets([dict(params), dict(os.environ)])
    return run


def find(name: str | Path) -> Path:
    """Return the run folder that ``name`` means: a path, or EXPERIMENT/NAME under data/.

    Raises BadInput when there is none.
    """
    for path in (Path(name), shared_dir("data") / str(name)):
        if (path / "manifest.json").is_file():
            return path.resolve()
    raise BadInput(f"no run at {str(name)!r}: a run folder holds manifest.json; `kvlab list` shows recordings")


def load(name: str | Path) -> Run:
    """Open a run folder or a recording for reading."""
    path = find(name)
    try:
        return Run(path, frozen=True)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path / 'manifest.json'} cannot be read: {error}") from None


#: a recording's logs larger than this are packed
PACKED_BYTES = 20_000


def archive(folder: str | Path, target: str | Path) -> Path:
    """Copy a run to ``target`` as a recording: tables, manifest, packed logs; no charts, rings or machine's paths.

    The run may come from another machine: which paths were its own is read from the manifest as well.
    Raises BadInput when ``target`` is there already.
    """
    source, target = find(folder), Path(target)
    if target.exists():
        raise BadInput(f"{target} is there already; a recording is not overwritten")
    left = shutil.ignore_patterns("charts", "telemetry", "notebook.ipynb", "report.html", "summary.json")
    shutil.copytree(source, target, ignore=left)
    manifest = json.loads((target / "manifest.json").read_text("utf-8"))
    out, model = manifest["parameters"].get("out", ""), str(manifest["parameters"].get("model") or "")
    places = {str(source): ".", sys.prefix: "$VENV", str(Path.cwd()): "$PWD", str(Path.home()): "~"}
    if out.startswith("/"):
        places |= {f"{out}/{manifest['experiment']}/{source.name}": ".", out: "runs"}
    if model.startswith("/"):
        places[str(Path(model).parent)] = "$MODELS"
    if "/params/" in (file := str(manifest.get("parameter_file") or "")):
        places[file.split("/params/")[0]] = "$PWD"
    manifest["parameters"]["out"] = "runs"
    write_atomic(target / "manifest.json", _json(manifest))
    # Longest first, so that a folder inside another one does not keep half a path.
    known = sorted(((place, word) for place, word in places.items() if len(place) > 1), key=lambda p: -len(p[0]))
    for path in [target / "manifest.json", *(target / "logs").rglob("*")]:
        if path.is_file():
            packed = path.suffix == ".gz"
            text = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
            for place, word in known:
                text = text.replace(place.encode(), word.encode())
            text = re.sub(rb"/[^\s\"']*/bin/(python[\d.]*)(?=[\s\"'])", rb"\1", text)
            log = path.suffix == ".log" and len(text) > PACKED_BYTES
            path.write_bytes(gzip.compress(text, mtime=0) if packed or log else text)
            if log:
                path.rename(path.with_name(path.name + ".gz"))
    return target
