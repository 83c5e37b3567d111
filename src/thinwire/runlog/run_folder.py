"""Reader of a run's folder: as a run with configuration, metrics, transfers and summary, or as records for diagnosis.

The half-written last line of a run in progress is left out until it is whole. Whatever else does not belong to a run is
refused with file, line and remedy.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from thinwire.errors import DataError
from thinwire.events import Transfer
from thinwire.runlog import flight_recorder, nccl_inspector, nccl_ras
from thinwire.runlog.measures import in_general
from thinwire.runlog.reader import Records, converted, numbered_lines, parse_object, read_into, record_of, short
from thinwire.runlog.records import MOST_RANKS, ROUND_BITS, Communicator, Count, Operation, Seconds, Span, TransferEnd

CONFIG = "config.json"
SUMMARY = "summary.json"
_METRICS = re.compile(r"metrics-replica-([0-9]{1,6})\.jsonl")
_LONGEST_S = 1e9  # 32 years: no run takes that long, and no damaged time makes a reader count windows for ever
_LARGEST_NUMBER = 1e300  # a hostile file must not turn sums into infinities

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one replica over one log interval.

    Attributes:
        time_s: Seconds since this replica's training began.
        loss: Mean training loss since the previous line, nats per sample.
        samples: Tokens, images or the like that this replica has seen.
        samples_per_s: Its speed since the previous line.
        compute_fraction: Share of the time since the previous line in which it did not wait for the wire.
        sent_bits_per_s: Rate since the previous line, see `thinwire.runlog.run_numbers`.
        peak_bits_per_s: Peak rate so far, see there.
        rounds_in_flight: Rounds launched and not applied yet.
        stalled_s: Seconds of waiting for the network so far; None in lines of earlier versions.
        unit: What the samples are.
    """

    step: int
    time_s: float
    loss: float
    samples: int
    samples_per_s: float
    compute_fraction: float
    sent_bytes: int
    received_bytes: int
    sent_bits_per_s: float
    peak_bits_per_s: float
    rounds_in_flight: int
    stalled_s: float | None = None
    unit: str = "tokens"

    @property
    def computing(self) -> float:
        """Share of the time since training began in which the training thread did not wait for the network."""
        if self.stalled_s is None or self.time_s <= 0:
            return self.compute_fraction
        return min(1.0, max(0.0, 1 - self.stalled_s / self.time_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMetrics:
    """Loss of the global parameters on the held-out split, nats per sample, after `step` inner steps.

    Replicas share an evaluation: `targets` is the number of samples that this one's part is the mean over.
    """

    step: int
    time_s: float
    samples: int
    val_loss: float
    targets: int = 1
    unit: str = "tokens"
    metric: tuple[str, str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningMetrics:
    """A warning of a replica, valid from `step` on."""

    step: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorMetrics:
    """The error with which a replica ended."""

    message: str = "unknown error"


MetricsLine = StepMetrics | EvaluationMetrics | WarningMetrics | ErrorMetrics
_METRICS_LINES: dict[str, type[MetricsLine]] = {
    "step": StepMetrics, "eval": EvaluationMetrics, "warning": WarningMetrics, "error": ErrorMetrics,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary of a finished run; byte counts and rates are those of one replica.

    Attributes:
        unit: What the samples are.
        metric: Name, unit and value of what the workload measures beside the loss.
    """

    method: str
    replicas: int
    steps: int
    samples: int
    val_loss: float
    wall_s: float
    samples_per_s: float
    payload_bytes: float
    wire_bytes_sent: float
    wire_bytes_received: float
    peak_bits_per_s: float
    compute_utilisation: float
    global_parameters_sha256: str
    model: str = ""
    parameters: int = 0
    allreduce_bytes: float = 0.0
    times_fewer_bytes: float | None = None
    unit: str = "tokens"
    metric: tuple[str, str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRecord:
    """One replica's metrics and transfers, in order.

    `warnings` are pairs of step and message; `error` is the message of a replica that failed.
    """

    steps: tuple[StepMetrics, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    warnings: tuple[tuple[int, str], ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Contents of a run's folder.

    Attributes:
        path: The folder.
        config: The configuration as it was written.
        replicas: Records by the replica's number.
        evaluations: Losses of the global parameters, in order of steps.
        summary: None while the run has not finished.
        raw_summary: The whole summary as it was written.
    """

    path: Path
    config: Mapping[str, Any]
    replicas: Mapping[int, ReplicaRecord]
    evaluations: tuple[EvaluationMetrics, ...] = ()
    summary: Summary | None = None
    raw_summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name or self.path.resolve().name

    def finished(self) -> Summary:
        """Return the summary.

        Raises:
            DataError: The run has not finished; says how far it came and how to go on.
        """
        if self.summary is not None:
            return self.summary
        last = max((lines.steps[-1].step for lines in self.replicas.values() if lines.steps), default=0)
        raise DataError(
            f"the run {self.path} has not finished: there is no {SUMMARY}, and its last step is {last}; wait for its "
            f"end, or go on with: thinwire train --resume {self.path}"
        )


def read_run(path: Path) -> RunRecord:
    """Read a run's folder, finished or in progress.

    Raises:
        DataError: The folder is missing, is no run, or holds what no run writes.
    """
    if not path.is_dir():
        raise DataError(f"there is no folder {path}; give the folder that `thinwire train --out` has written")
    if not (path / CONFIG).is_file():
        raise DataError(
            f"{path} is no run: it holds no {CONFIG}; give the folder that `thinwire train --out` has written"
        )
    numbers = sorted(int(match[1]) for entry in path.iterdir() if (match := _METRICS.fullmatch(entry.name)))
    replicas, parts = {}, []
    for number in numbers:
        replicas[number], found = _read_replica(path, number)
        parts += _latest(found)
    raw = _read_object(path / SUMMARY) if (path / SUMMARY).is_file() else None
    return RunRecord(
        path=path, config=_read_object(path / CONFIG), replicas=replicas, evaluations=tuple(join_evaluations(parts)),
        summary=None if raw is None else parse(Summary, raw, source=str(path / SUMMARY)), raw_summary=raw or {},
    )  # fmt: skip


def read_outcome(path: Path) -> tuple[Summary, dict[str, Any]]:
    """Read the summary and the configuration of a finished run, and none of its metrics.

    Raises:
        DataError: A file is missing, or is not a run's.
    """
    summary = parse(Summary, _read_object(path / SUMMARY), source=str(path / SUMMARY))
    return summary, _read_object(path / CONFIG)


def setting(config: Mapping[str, Any], section: str, name: str) -> Any:
    """Return one option of a run's `config.json`, None if it is not there."""
    options = config.get(section)
    return options.get(name) if isinstance(options, Mapping) else None


def join_evaluations(parts: Iterable[EvaluationMetrics]) -> list[EvaluationMetrics]:
    """Join the replicas' parts of each evaluation to one, in order of steps.

    Example:
        >>> parts = [
        ...     EvaluationMetrics(step=7, time_s=1.0, samples=10, val_loss=2.0, targets=30),
        ...     EvaluationMetrics(step=7, time_s=1.1, samples=10, val_loss=4.0, targets=10),
        ... ]
        >>> join_evaluations(parts)[0].val_loss
        2.5
    """
    by_step: dict[int, list[EvaluationMetrics]] = {}
    for part in parts:
        by_step.setdefault(part.step, []).append(part)
    joined = []
    for _, own in sorted(by_step.items()):
        targets = sum(part.targets for part in own)
        val_loss = sum(part.val_loss * part.targets for part in own) / targets
        metric = own[0].metric
        if metric is not None:
            values = [part.metric[2] * part.targets for part in own if part.metric is not None]
            metric = (*metric[:2], sum(values) / targets) if len(values) == len(own) else None
        joined.append(replace(own[0], val_loss=val_loss, targets=targets, metric=metric))
    return joined


_COUNTING: tuple[Any, ...] = (StepMetrics, EvaluationMetrics, Summary)


def parse(kind: type[Value], values: Mapping[str, Any], *, source: str) -> Value:
    """Return a JSON object as a value of `kind`; whole floats count as integers, unknown fields are left out.

    Raises:
        DataError: A field is missing or of a wrong type; names it and `source`.
    """
    try:
        known = in_general(values) if kind in _COUNTING else values
        return converted({name: _number(value) for name, value in known.items()}, kind)
    except ValueError as error:
        raise DataError(f"{source}: {error}; the file is damaged, or not a run's") from error


def parse_metrics(values: Mapping[str, Any], *, source: str) -> MetricsLine:
    """Return a line of a replica's metrics.

    Raises:
        DataError: It is of an unknown kind, or a field is missing or of a wrong type.
    """
    name = values.get("kind")
    kind = _METRICS_LINES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise DataError(f"{source} is a line of the unknown kind {short(name)}; this file is not a run's metrics")
    return parse(kind, values, source=source)


def _number(value: Any) -> Any:
    """Return a whole float as an integer, and other values as they are."""
    if isinstance(value, int | float) and _LARGEST_NUMBER < abs(value) < math.inf:
        raise ValueError(f"numbers may be at most {_LARGEST_NUMBER:g}, got {short(value)}")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, object) for every whole line; a half-written last line is left out.

    Raises:
        DataError: A whole line is no JSON object.
    """
    for number, line in numbered_lines(path):
        # What follows the last line's end is still being written (or its writer was killed).
        if line is None or line.endswith(b"\n"):
            yield f"{path}:{number}", _object(line, f"{path}:{number}")


def _read_replica(path: Path, number: int) -> tuple[ReplicaRecord, list[EvaluationMetrics]]:
    steps: list[StepMetrics] = []
    evaluations: list[EvaluationMetrics] = []
    warnings: list[tuple[int, str]] = []
    error = ""
    for where, values in read_lines(path / f"metrics-replica-{number}.jsonl"):
        match parse_metrics(values, source=where):
            case StepMetrics() as line:
                steps.append(line)
                error = ""  # a resumed run goes on after an error
            case EvaluationMetrics() as line:
                evaluations.append(line)
            case WarningMetrics(step=step, message=message):
                warnings.append((step, message))
            case ErrorMetrics(message=error):
                pass
    transfers: list[Transfer] = []
    if (file := path / f"transfers-replica-{number}.jsonl").is_file():
        for where, values in read_lines(file):
            transfer = parse(Transfer, values, source=where)
            # What joins the replicas may lie before the start of training, so that a time may be below zero.
            if not -_LONGEST_S <= transfer.started_s <= transfer.finished_s <= _LONGEST_S:
                raise DataError(f"{where} ends before it starts, or never; the file is damaged, or it is not a run's")
            transfers.append(transfer)
    return ReplicaRecord(
        steps=tuple(_latest(steps)), transfers=tuple(transfers), warnings=tuple(warnings), error=error
    ), evaluations


Line = TypeVar("Line", StepMetrics, EvaluationMetrics)


def _latest(lines: Iterable[Line]) -> list[Line]:
    """Replace lines that a killed run wrote beyond its checkpoint by those of the resumed run."""
    kept: list[Line] = []
    for line in lines:
        while kept and kept[-1].step >= line.step:
            kept.pop()
        kept.append(line)
    return kept


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return _object(content, str(path))


def _object(content: bytes | None, where: str) -> dict[str, Any]:
    try:
        return parse_object(content)
    except ValueError as error:
        raise DataError(f"{where}: {error}; the file is damaged, or not a run's") from error


_TRANSFERS = re.compile(r"transfers-replica-([0-9]{1,6})\.jsonl")
ROUNDS = "rounds"
MEMBERS_FILE, JOURNAL_FILE = "members.jsonl", "coordinator.jsonl"
# Messages of one round between two replicas are numbered, so that both ends match.
_MOST_PARTS = 1 << 20
_MOST_REMOVED = 4096
_LEAST_PRESENT = 2


def replica_of(path: Path) -> int | None:
    """Return the replica whose file of a run this is, or none if it is no such file.

    Example:
        >>> replica_of(Path("runs/demo/transfers-replica-3.jsonl")), replica_of(Path("notes.txt"))
        (3, None)
    """
    match = _TRANSFERS.fullmatch(path.name) or _METRICS.fullmatch(path.name)
    return int(match.group(1)) if match else None


def removed_replicas(folder: Path) -> frozenset[int]:
    """Return the replicas that an elastic run removed while others went on, by its `members.jsonl` and its journal.

    None if fewer than two members were left: then the loss of the others is the fault. Replica numbers are never
    reused. Other lines are ignored.
    """
    removed: set[int] = set()
    present = _LEAST_PRESENT
    for name in (MEMBERS_FILE, JOURNAL_FILE):
        path = folder / name
        if not path.is_file():
            continue
        try:
            for _, line in numbered_lines(path):
                if line is None or (b'"removed"' not in line and b'"gone"' not in line):
                    continue
                with contextlib.suppress(ValueError):
                    values = parse_object(line)
                    removed |= _ranks(
                        [values.get("replica")] if values.get("what") == "gone" else values.get("removed")
                    )
                    present = len(_ranks(values["present"])) if "present" in values else present
        except DataError:  # removed or unreadable: the rest counts
            continue
    return frozenset(removed) if present >= _LEAST_PRESENT else frozenset()


def _ranks(value: object) -> set[int]:
    found = value[:_MOST_REMOVED] if isinstance(value, list) else []
    return {one for one in found if type(one) is int and 0 <= one < MOST_RANKS}


def read_run_files(records: Records, paths: list[Path]) -> None:
    """Read files of a run; each replica has a clock of its own, since its times begin with its training.

    Rounds become operations: from the first message of a replica's round to its last.

    Raises:
        DataError: A file cannot be read.
    """
    replicas = sorted({rank for path in paths if (rank := replica_of(path)) is not None})
    hosts = tuple(f"replica-{rank}" for rank in replicas)
    records.add(Communicator(communicator=ROUNDS, ranks=tuple(replicas), hosts=hosts))
    for path in paths:
        rank = replica_of(path)
        assert rank is not None
        if not _TRANSFERS.fullmatch(path.name):
            _take_metrics(records, path, rank)
            continue
        parts: dict[tuple[int, int, str], int] = defaultdict(int)
        rounds: dict[int, list[TransferEnd]] = defaultdict(list)
        for number, line in numbered_lines(path):
            records.num_lines += 1
            try:
                values = parse_object(line)
                if values.get("kind") == "round":
                    end = end_of(values, rank, parts)
                    records.add(end)
                    rounds[end.operation].append(end)
            except ValueError as error:
                records.refuse(path.name, number, str(error))
        for sequence, round in enumerate(sorted(rounds)):
            records.add(operation_of(rounds[round], sequence=sequence))


def operation_of(ends: Sequence[TransferEnd], *, sequence: int) -> Operation:
    """Return one replica's round as an operation, from all its ends."""
    is_done = all(end.done_s is not None for end in ends)
    return Operation(
        communicator=ROUNDS, rank=ends[0].rank, sequence=sequence, kind="round", round=ends[0].operation,
        posted_s=min(end.posted_s for end in ends),
        done_s=max(end.done_s or end.posted_s for end in ends) if is_done else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundOfOwner:
    """Fields of a line of transfers that name a round."""

    round_id: Annotated[int, Meta(ge=0, lt=1 << ROUND_BITS)]
    owner: Annotated[int, Meta(ge=0, lt=1 << 53 - ROUND_BITS)] = 0


def end_of(line: dict[str, Any], rank: int, parts: dict[tuple[int, int, str], int]) -> TransferEnd:
    """Return a line of transfers as one end of a transfer, checked as every record is.

    Raises:
        ValueError: A field is missing or invalid.
    """
    error, of = str(line.get("error", ""))[:500], converted(line, _RoundOfOwner)
    fields = {
        "communicator": ROUNDS, "rank": rank, "peer": line.get("peer"), "direction": line.get("direction"),
        "operation": of.owner << ROUND_BITS | of.round_id, "num_bytes": line.get("wire_bytes"),
        "posted_s": line.get("started_s"), "done_s": None if error else line.get("finished_s"), "error": error,
    }  # fmt: skip
    end = record_of(TransferEnd, fields)
    key = end.operation, end.peer, end.direction
    part = parts[key] % _MOST_PARTS
    parts[key] += 1
    return replace(end, part=part)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepWork:
    """Fields of a line about steps that the diagnosis needs."""

    step: Count
    time_s: Seconds
    loss: float
    compute_fraction: float


def _take_metrics(records: Records, path: Path, rank: int) -> None:
    """Add the spans between lines about steps, with their loss."""
    last_s, last_step = 0.0, 0
    for number, line in numbered_lines(path):
        records.num_lines += 1
        try:
            values = parse_object(line)
            if values.get("kind") != "step":
                continue
            step = converted(values, _StepWork)
            if not step.time_s >= last_s or step.step <= last_step:
                raise ValueError("steps run backwards")
            # waiting for the network is no work
            work_s = (step.time_s - last_s) * min(1.0, max(0.0, step.compute_fraction)) / (step.step - last_step)
            fields = {
                "rank": rank, "kind": "compute", "step": step.step, "started_s": last_s, "done_s": last_s + work_s,
                "loss": step.loss,
            }  # fmt: skip
            records.add(record_of(Span, fields))
            last_s, last_step = step.time_s, step.step
        except ValueError as error:
            records.refuse(path.name, number, str(error))


RECORDS = "records-rank-*.jsonl"
Reader = Callable[[Records, Path], None]
_HEAD = 4096


def read_files(paths: Iterable[Path]) -> Records:
    """Read all files of one job, of any kind.

    Of a folder with records of ranks only these are read; one job may have several such folders, one a host. Files of
    NCCL's tools are recognised by their contents. A folder also names the removed replicas of an elastic run.

    Raises:
        DataError: A file cannot be read, or is none of those that can be diagnosed.
    """
    records = Records()
    runs: dict[Path, list[Path]] = {}
    dumps: list[Path] = []
    for path in paths:
        if path.is_dir():
            records.removed |= removed_replicas(path)
            if of_run := _read_folder(records, path):
                runs[path] = of_run
        elif replica_of(path) is not None:
            runs.setdefault(path.parent, []).append(path)
        else:
            first = _head(path)
            read = nccl_reader(first)
            if read is None and flight_recorder.is_dump(first):
                dumps.append(path)
            else:
                (read or read_into)(records, path)
    if len(runs) > 1:
        raise DataError(f"{' and '.join(map(str, runs))} are several runs; diagnose one at a time")
    for files in runs.values():
        read_run_files(records, sorted(set(files)))
    flight_recorder.read_dumps(records, dumps)
    return records


def nccl_reader(first: bytes) -> Reader | None:
    """Return the reader of a file of NCCL's tools by its first bytes; None for other files."""
    if nccl_inspector.is_inspector(first):
        return nccl_inspector.read_inspector
    return nccl_ras.read_ras if nccl_ras.is_ras(first) else None


def _read_folder(records: Records, folder: Path) -> list[Path]:
    """Read a folder's records of ranks, else return its files of a run, else read those of NCCL's tools."""
    files = [path for path in sorted(folder.glob("*")) if path.is_file()]  # a pipe would be waited for
    of_run = [path for path in files if replica_of(path) is not None]
    # backwards, so that a rank's older file comes before the one that it writes now
    readable: list[tuple[Reader, Path]] = [(read_into, path) for path in reversed(files) if path.match(RECORDS)]
    if not readable and not of_run:
        readable = [(read, path) for path in files if (read := nccl_reader(_head(path))) is not None]
    for read, path in readable:
        read(records, path)
    if not readable and not of_run:
        raise DataError(
            f"{folder} holds no records-rank-N.jsonl, transfers-replica-N.jsonl or metrics-replica-N.jsonl of a run, "
            "and no files of NCCL's Inspector or RAS"
        )
    return [] if readable else of_run


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
