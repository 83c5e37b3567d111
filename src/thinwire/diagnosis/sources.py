"""Which reader a file needs: records, dumps of the Flight Recorder, or the folder of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from thinwire.diagnosis import flight_recorder, reading, run_files
from thinwire.diagnosis.reading import Records
from thinwire.errors import DataError

RECORDS = "records-rank-*.jsonl"
_HEAD = 4096


def read_files(paths: Iterable[Path]) -> Records:
    """Read all files of one job, whatever they are.

    A folder that holds records of ranks is read for these alone; several such folders may be of one job, one a host.

    Raises:
        DataError: A file cannot be read, or is none of those that can be diagnosed.
    """
    records = Records()
    runs: dict[Path, list[Path]] = {}
    dumps: list[Path] = []
    for path in paths:
        if path.is_dir():
            # backwards, so that a rank's older file comes before the one that it writes now
            if recorded := sorted(filter(Path.is_file, path.glob(RECORDS)), reverse=True):
                for one in recorded:
                    reading.read_into(records, one)
            else:
                runs[path] = _files_of_run(path)
        elif run_files.replica_of(path) is not None:
            runs.setdefault(path.parent, []).append(path)
        else:
            first = _head(path)
            if flight_recorder.is_pickle(first):
                raise DataError(
                    f"{path} is a pickle, which could run any program when it is read; {flight_recorder.HOW_TO_JSON}"
                )
            if flight_recorder.is_dump(first):
                dumps.append(path)
            else:
                reading.read_into(records, path)
    if len(runs) > 1:
        raise DataError(f"{' and '.join(map(str, runs))} are several runs; diagnose one at a time")
    for files in runs.values():
        run_files.read_run_files(records, sorted(set(files)))
    flight_recorder.read_dumps(records, dumps)
    return records


def _files_of_run(folder: Path) -> list[Path]:
    found = [path for path in sorted(folder.glob("*.jsonl")) if run_files.replica_of(path) is not None]
    found = [path for path in found if path.is_file()]  # a pipe would be waited for
    if not found:
        raise DataError(
            f"{folder} holds no records-rank-N.jsonl, transfers-replica-N.jsonl or metrics-replica-N.jsonl of a run"
        )
    return found


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
