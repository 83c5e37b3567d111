"""Choice of the reader for a file: records, Flight Recorder dumps, NCCL files, or a run's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from thinwire.errors import DataError
from thinwire.monitor import flight_recorder as flight_recorder
from thinwire.monitor.nccl import inspector as nccl_inspector
from thinwire.monitor.nccl import ras as nccl_ras
from thinwire.monitor.runlog import reader as reading
from thinwire.monitor.runlog import run_files
from thinwire.monitor.runlog.reader import Records

RECORDS = "records-rank-*.jsonl"
_HEAD = 4096


def read_files(paths: Iterable[Path]) -> Records:
    """Read all files of one job, whatever they are.

    A folder that holds records of ranks is read for these alone; several such folders may be of one job, one a host.
    Files of NCCL's tools are known by what they hold, whatever their names. A folder also tells which replicas of an
    elastic run were removed.

    Raises:
        DataError: A file cannot be read, or is none of those that can be diagnosed.
    """
    records = Records()
    runs: dict[Path, list[Path]] = {}
    dumps: list[Path] = []
    for path in paths:
        if path.is_dir():
            records.removed |= run_files.removed_replicas(path)
            if not _read_folder(records, path):
                runs[path] = _files_of_run(path)
        elif run_files.replica_of(path) is not None:
            runs.setdefault(path.parent, []).append(path)
        elif _is_dump(first := _head(path), path):
            dumps.append(path)
        else:
            (nccl_reader(first) or reading.read_into)(records, path)
    if len(runs) > 1:
        raise DataError(f"{' and '.join(map(str, runs))} are several runs; diagnose one at a time")
    for files in runs.values():
        run_files.read_run_files(records, sorted(set(files)))
    flight_recorder.read_dumps(records, dumps)
    return records


def nccl_reader(first: bytes) -> Callable[[Records, Path], None] | None:
    """Return the reader of a file of NCCL's tools that begins so; none where it is no such file."""
    if nccl_inspector.is_inspector(first):
        return nccl_inspector.read_inspector
    return nccl_ras.read_ras if nccl_ras.is_ras(first) else None


def _is_dump(first: bytes, path: Path) -> bool:
    if flight_recorder.is_pickle(first):
        raise DataError(
            f"{path} is a pickle, which could run any program when it is read; {flight_recorder.HOW_TO_JSON}"
        )
    return nccl_reader(first) is None and flight_recorder.is_dump(first)


def _read_folder(records: Records, folder: Path) -> bool:
    """Read a folder's records of ranks, or files of NCCL's tools where it holds neither these nor files of a run.

    Returns:
        Whether there are any.
    """
    # backwards, so that a rank's older file comes before the one that it writes now
    if recorded := sorted(filter(Path.is_file, folder.glob(RECORDS)), reverse=True):
        for one in recorded:
            reading.read_into(records, one)
        return True
    files = [path for path in sorted(folder.glob("*")) if path.is_file()]  # a pipe would be waited for
    if any(run_files.replica_of(path) is not None for path in files):
        return False
    known = [(read, path) for path in files if (read := nccl_reader(_head(path))) is not None]
    for read, path in known:
        read(records, path)
    return bool(known)


def _files_of_run(folder: Path) -> list[Path]:
    found = [path for path in sorted(folder.glob("*.jsonl")) if run_files.replica_of(path) is not None]
    found = [path for path in found if path.is_file()]  # a pipe would be waited for
    if not found:
        raise DataError(
            f"{folder} holds no records-rank-N.jsonl, transfers-replica-N.jsonl or metrics-replica-N.jsonl of a run, "
            "and no files of NCCL's Inspector or RAS"
        )
    return found


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
