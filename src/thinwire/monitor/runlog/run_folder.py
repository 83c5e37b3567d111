"""A run's folder as values: its configuration, its metrics and transfers by replica, and its summary.

Files are read as they stand: the half-written last line of a run in progress is left out until it is whole. What
else is not a run's is refused with the file, the line and the remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from thinwire.errors import DataError
from thinwire.events import Transfer

CONFIG = "config.json"
SUMMARY = "summary.json"
_METRICS = re.compile(r"metrics-replica-([0-9]{1,6})\.jsonl")
_LONGEST_S = 1e9  # 32 years: no run takes that long, and no damaged time makes a reader count windows for ever
_LARGEST_NUMBER = 1e300  # a hostile file must not turn sums into infinities

Value = TypeVar("Value", bound="StepLine | EvaluationLine | Summary | Transfer | _WarningLine")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """What one replica wrote at one log interval.

    Attributes:
        step: Inner steps done.
        time_s: Seconds since this replica's training began.
        loss: Mean training loss since the previous line, nats per token.
        tokens: Tokens that this replica has seen.
        tokens_per_s: Its speed since the previous line.
        compute_fraction: Share of the time since the previous line in which it did not wait for the wire.
        sent_bytes: Wire bytes sent so far.
        received_bytes: Wire bytes received so far.
        sent_bits_per_s: Rate since the previous line.
        peak_bits_per_s: Highest rate in any 100 ms so far.
        rounds_in_flight: Rounds launched and not applied yet.
    """

    step: int
    time_s: float
    loss: float
    tokens: int
    tokens_per_s: float
    compute_fraction: float
    sent_bytes: int
    received_bytes: int
    sent_bits_per_s: float
    peak_bits_per_s: float
    rounds_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLine:
    """Loss of the global parameters on the held-out split, nats per token, after `step` inner steps.

    Replicas share an evaluation: `targets` tells over how many tokens this one's part is the mean.
    """

    step: int
    time_s: float
    tokens: int
    val_loss: float
    targets: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _WarningLine:
    step: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a finished run says of itself; byte counts and rates are those of one replica."""

    method: str
    replicas: int
    steps: int
    tokens: int
    val_loss: float
    wall_s: float
    tokens_per_s: float
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

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, source: str = SUMMARY) -> Summary:
        """Check and take the fields that a reader needs, and leave the others.

        Raises:
            DataError: A field is missing or of a wrong type; names it.
        """
        return parse(cls, values, source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRecord:
    """One replica's metrics and transfers, in order.

    `warnings` are steps and what was said after them; `error` is its last words when it failed.
    """

    steps: tuple[StepLine, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    warnings: tuple[tuple[int, str], ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """All that a run's folder says.

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
    evaluations: tuple[EvaluationLine, ...] = ()
    summary: Summary | None = None
    raw_summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's own name."""
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
        path=path,
        config=_read_object(path / CONFIG),
        replicas=replicas,
        evaluations=tuple(join_evaluations(parts)),
        summary=None if raw is None else Summary.from_json(raw, source=str(path / SUMMARY)),
        raw_summary=raw or {},
    )


def setting(config: Mapping[str, Any], section: str, name: str) -> Any:
    """Return one option of a run's `config.json`, None if it is not there."""
    options = config.get(section)
    return options.get(name) if isinstance(options, Mapping) else None


def join_evaluations(parts: Iterable[EvaluationLine]) -> list[EvaluationLine]:
    """Join the replicas' parts of each evaluation to one, in order of steps.

    Example:
        >>> parts = [
        ...     EvaluationLine(step=7, time_s=1.0, tokens=10, val_loss=2.0, targets=30),
        ...     EvaluationLine(step=7, time_s=1.1, tokens=10, val_loss=4.0, targets=10),
        ... ]
        >>> join_evaluations(parts)[0].val_loss
        2.5
    """
    by_step: dict[int, list[EvaluationLine]] = {}
    for part in parts:
        by_step.setdefault(part.step, []).append(part)
    joined = []
    for _, own in sorted(by_step.items()):
        targets = sum(part.targets for part in own)
        val_loss = sum(part.val_loss * part.targets for part in own) / targets
        joined.append(replace(own[0], val_loss=val_loss, targets=targets))
    return joined


def parse(kind: type[Value], values: Mapping[str, Any], *, source: str) -> Value:
    """Make a value of `kind` from a JSON object, each field checked and unknown ones left out.

    Raises:
        DataError: A field is missing or of a wrong type; names it and `source`.
    """
    taken: dict[str, Any] = {}
    for entry in fields(kind):
        if entry.name in values:
            taken[entry.name] = _checked(values[entry.name], str(entry.type), f"{entry.name!r} in {source}")
        elif entry.default is MISSING:
            raise DataError(f"{source} lacks {entry.name!r}; it was not written by a finished write of thinwire")
    return kind(**taken)


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, object) for every whole line; a half-written last line is left out.

    Raises:
        DataError: A whole line is no JSON object.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    # What follows the last line's end is still being written (or its writer was killed).
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        if line.strip():
            yield f"{path}:{number}", _object(line, f"{path}:{number}")


def _read_replica(path: Path, number: int) -> tuple[ReplicaRecord, list[EvaluationLine]]:
    steps: list[StepLine] = []
    evaluations: list[EvaluationLine] = []
    warnings: list[tuple[int, str]] = []
    error = ""
    for where, line in read_lines(path / f"metrics-replica-{number}.jsonl"):
        match line.get("kind"):
            case "step":
                steps.append(parse(StepLine, line, source=where))
                error = ""  # a resumed run goes on after an error
            case "eval":
                evaluations.append(parse(EvaluationLine, line, source=where))
            case "error":
                error = str(line.get("message", "unknown error"))
            case "warning":
                told = parse(_WarningLine, line, source=where)
                warnings.append((told.step, told.message))
            case other:
                raise DataError(f"{where} is a line of the unknown kind {other!r}; this file is not a run's metrics")
    transfers = path / f"transfers-replica-{number}.jsonl"
    records = [_transfer(line, where) for where, line in read_lines(transfers)] if transfers.is_file() else []
    record = ReplicaRecord(steps=tuple(_latest(steps)), transfers=tuple(records), warnings=tuple(warnings), error=error)
    return record, evaluations


def _transfer(line: Mapping[str, Any], where: str) -> Transfer:
    transfer = parse(Transfer, line, source=where)
    # What joins the replicas may lie before the start of training, so that a time may be below zero.
    if not -_LONGEST_S <= transfer.started_s <= transfer.finished_s <= _LONGEST_S:
        raise DataError(f"{where} ends before it starts, or never; the file is damaged, or it is not a run's")
    return transfer


Line = TypeVar("Line", StepLine, EvaluationLine)


def _latest(lines: Iterable[Line]) -> list[Line]:
    """Let lines after a resume take the place of those that the killed run wrote beyond its checkpoint."""
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


def _object(content: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON: {error}; the file is damaged, or it is not a run's") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} must hold a JSON object, not {type(value).__name__}")
    return value


def _checked(value: Any, kind: str, what: str) -> Any:
    """Return `value` if its type is `kind` (the text of an annotation), whole floats taken as integers."""
    if value is None and "None" in kind:
        return None
    if kind in ("str", "Direction"):
        if isinstance(value, str) and (kind == "str" or value in ("sent", "received")):
            return value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        finite = abs(value) <= _LARGEST_NUMBER
        if kind == "int" and finite and value == int(value):
            return int(value)
        if kind != "int" and (finite or not isinstance(value, int)):
            return float(value)
    raise DataError(f"{what} must be a {kind}, got {str(value)[:60]!r}; the file is damaged, or it is not a run's")
