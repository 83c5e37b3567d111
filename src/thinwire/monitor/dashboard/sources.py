"""Bounded readers of a run's files for the dashboard: replicas, links, rounds, journal and JSON objects."""

from __future__ import annotations

import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from thinwire.errors import DataError
from thinwire.files import open_regular
from thinwire.monitor.dashboard.chart_data import Curve
from thinwire.monitor.dashboard.findings_reader import Findings, LatestRows, latest_actions, text
from thinwire.monitor.detect.live import RecordWindow
from thinwire.runlog.reader import Records, check_header, converted, parse_line, parse_object
from thinwire.runlog.records import Communicator, Count, Direction, PathReading, Rank, Record, Span, TransferEnd
from thinwire.runlog.run_folder import (
    ROUNDS,
    ErrorMetrics,
    EvaluationMetrics,
    StepMetrics,
    WarningMetrics,
    end_of,
    join_evaluations,
    operation_of,
    parse_metrics,
)
from thinwire.runlog.run_numbers import RATE_WINDOW_S
from thinwire.runlog.tailer import JsonlTailer

_MOST_QUOTED = 12
_MOST_OBJECT_BYTES = 256 * 1024
_MOST_MEMBERS, _MOST_MESSAGES, _MOST_ROUNDS = 512, 30, 24
_Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]


class RejectedLines:
    """Rejected lines and files: counted, and the first few quoted."""

    def __init__(self) -> None:
        self.count = 0  # number of lines and files
        self._quoted: list[str] = []

    def add(self, where: str, reason: str) -> None:
        """Count one, and quote it if it is among the first."""
        self.count += 1
        if len(self._quoted) < _MOST_QUOTED:
            self._quoted.append(f"{where}: {reason[:300]}")

    def quoted(self) -> list[str]:
        """Return the quoted ones, and the number of the others."""
        left = self.count - len(self._quoted)
        return [*self._quoted, *([f"{left} more"] if left else [])]


class ObjectFile:
    """A file that holds one JSON object and is written whole: read again only when it changed."""

    def __init__(self, path: Path, refused: RejectedLines) -> None:
        self._path = path
        self._refused = refused
        self._seen: tuple[int, int, int] | None = None
        # the object; None while the file is missing or holds none
        self.value: dict[str, Any] | None = None
        # time of the last write, seconds since 1970; None while the file is missing
        self.changed_at: float | None = None

    def poll(self) -> bool:
        """Read the file if it changed, and return whether it did."""
        try:
            with open_regular(self._path) as file:
                found = os.fstat(file.fileno())
                seen = (found.st_ino, found.st_mtime_ns, found.st_size)
                if seen == self._seen:
                    return False
                content = file.read(_MOST_OBJECT_BYTES + 1)
        except OSError:
            is_gone = self._seen is not None
            self._seen, self.value, self.changed_at = None, None, None
            return is_gone
        self._seen, self.changed_at = seen, found.st_mtime
        try:
            self.value = parse_object(content)
        except ValueError as error:
            self.value = None
            self._refused.add(self._path.name, str(error))
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEntry:
    """A line of the coordinator's journal about a member, or one that left; secrets in the line are not taken."""

    replica: Rank
    host: str = ""
    state: str = ""
    step: Count = 0
    loss: _Finite = 0.0
    tokens_s: _Finite = 0.0
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEntry:
    """A line of `rounds-replica-N.jsonl`."""

    round: Count
    fragment: Count
    launch_step: Count
    at_s: _Finite
    members: list[Rank]
    is_counted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEntry:
    """A line of `transfers-replica-N.jsonl`."""

    kind: str
    peer: Rank
    direction: Direction
    wire_bytes: Count
    started_s: _Finite
    finished_s: _Finite
    error: str = ""


class CoordinatorLog:
    """Members of an elastic run and their state, from the coordinator's journal."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all."""
        # by replica: host, membership state, and its progress when that last changed
        self.members: dict[int, dict[str, Any]] = {}
        self.is_finished = False  # whether the run is over
        self.is_there = False  # whether there was any line
        self.messages: deque[str] = deque(maxlen=_MOST_MESSAGES)

    def take(self, line: dict[str, Any]) -> None:
        """Add a line; a ValueError if a field is missing or invalid."""
        self.is_there = True
        match line.get("what"):
            case "member":
                entry = converted(line, MemberEntry)
                if entry.replica not in self.members and len(self.members) >= _MOST_MEMBERS:
                    self.members.pop(next(iter(self.members)))
                self.members[entry.replica] = {
                    "replica": entry.replica, "host": text(entry.host), "state": text(entry.state),
                    "step": entry.step, "loss": entry.loss, "samples_per_s": entry.tokens_s, "is_paused": entry.paused,
                }  # fmt: skip
            case "gone":
                own = self.members.get(converted(line, MemberEntry).replica)
                if own is not None and own["state"] != "done":
                    own["state"] = "gone"
            case "finding":
                self.messages.append(text(line.get("text")))
            case "finished":
                self.is_finished = True


def _round_row(replica: int, line: Mapping[str, Any]) -> dict[str, Any]:
    entry = converted(line, RoundEntry)
    return {
        "round": entry.round, "fragment": entry.fragment, "launch_step": entry.launch_step, "at": entry.at_s,
        "members": entry.members[:_MOST_MEMBERS], "is_counted": entry.is_counted, "reported_by": replica,
    }  # fmt: skip


RECENT_S = 10.0
_MOST_RECENT = 2000
_MOST_LINKS = 4096
_MOST_STREAMS = 64
_MOST_SHOWN = 200
# Part of the time from which a path, or its receiver, counts as the limit.
_BUSY_SHARE = 0.5
Cell = tuple[int, int]


@dataclass(slots=True)
class _Traffic:
    """One direction between two replicas, as one of them reports it."""

    num_bytes: int = 0
    messages: int = 0
    failed: int = 0
    recent: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=_MOST_RECENT))


@dataclass(slots=True, kw_only=True)
class _StreamTraffic:
    """Traffic that one replica sent in a stream; seconds are those in which transfers ended."""

    messages: int = 0
    num_bytes: int = 0
    most_bytes: int = 0
    second: int = 0
    second_bytes: int = 0
    peak_bytes: int = 0

    def add(self, num_bytes: int, *, done_s: float) -> None:
        self.messages += 1
        self.num_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, num_bytes)
        self.second_bytes = num_bytes + (self.second_bytes if int(done_s) == self.second else 0)
        self.second, self.peak_bytes = int(done_s), max(self.peak_bytes, self.second_bytes)


class LinkTotals:
    """Sums over all transfers that one replica wrote, by (from, to), and over those that it sent, by stream."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.restart()

    def restart(self) -> None:
        """Forget all transfers."""
        self._links: dict[Cell, _Traffic] = defaultdict(_Traffic)
        # what it sent, by the name of the stream
        self.streams: dict[str, _StreamTraffic] = defaultdict(_StreamTraffic)
        self.latest_s = 0.0  # the latest end of a transfer, on this replica's clock
        self.earliest_s = 0.0  # the earliest begin

    def add(self, one: TransferEntry) -> None:
        """Count one transfer; a ValueError where there are more links or streams than any replica has."""
        is_sent = one.direction == "sent"
        cell = (self.rank, one.peer) if is_sent else (one.peer, self.rank)
        if cell not in self._links and len(self._links) >= _MOST_LINKS:
            raise ValueError(f"more than {_MOST_LINKS} links of one replica")
        link = self._links[cell]
        self.earliest_s = one.started_s if not self.latest_s else min(self.earliest_s, one.started_s)
        self.latest_s = max(self.latest_s, one.finished_s)
        if one.error:
            link.failed += 1
            return
        link.messages += 1
        link.num_bytes += one.wire_bytes
        link.recent.append((one.started_s, one.finished_s, one.wire_bytes))
        if one.kind not in self.streams and len(self.streams) >= _MOST_STREAMS:
            raise ValueError(f"more than {_MOST_STREAMS} streams of one replica")
        if is_sent:
            self.streams[one.kind].add(one.wire_bytes, done_s=one.finished_s)

    def rows(self) -> dict[Cell, dict[str, Any]]:
        """Return each link's sums and its rates: over all, and over the latest seconds of this replica's clock.

        A transfer counts evenly over the time from its begin to its end, and a rate is over a second at least.
        """
        whole_s = max(self.latest_s - self.earliest_s, RATE_WINDOW_S)
        recent_s = min(RECENT_S, whole_s)
        since_s = self.latest_s - recent_s
        found = {}
        for cell, link in self._links.items():
            recent = sum(size * _share_after(since_s, *span) for *span, size in link.recent)
            found[cell] = {
                "from": cell[0], "to": cell[1], "bytes": link.num_bytes, "messages": link.messages,
                "failed": link.failed, "mean_bits_per_s": round(8 * link.num_bytes / whole_s, 1),
                "now_bits_per_s": round(8 * recent / recent_s, 1),
            }  # fmt: skip
        return found


def _share_after(since_s: float, started_s: float, done_s: float) -> float:
    """Return the share of a transfer that lies after a time, if it went evenly."""
    if done_s <= started_s:
        return float(done_s > since_s)
    return min(1.0, max(0.0, (done_s - since_s) / (done_s - started_s)))


class PathTraffic:
    """The latest readings of each planned path that one rank sends over."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.restart()

    def restart(self) -> None:
        """Forget all readings."""
        self._readings: dict[tuple[int, int], deque[PathReading]] = {}

    def add(self, reading: PathReading) -> None:
        """Add a reading; a ValueError where there are more paths than any replica has."""
        way = (reading.peer, reading.path)
        if way not in self._readings and len(self._readings) >= _MOST_LINKS:
            raise ValueError(f"more than {_MOST_LINKS} paths of one replica")
        known = self._readings.setdefault(way, deque(maxlen=_MOST_RECENT))
        if known and known[-1].num_bytes > reading.num_bytes:  # another process counts from 0
            known.clear()
        known.append(reading)
        while len(known) > 2 and known[1].at_s <= reading.at_s - RECENT_S:
            known.popleft()

    def rows(self) -> list[dict[str, Any]]:
        """Return each path's bytes, share and rate over the latest seconds, and what limits the rate."""
        found = []
        latest_s = max((known[-1].at_s for known in self._readings.values()), default=0.0)
        for (peer, path), known in sorted(self._readings.items()):
            first, last = known[0], known[-1]
            seconds = max(latest_s - first.at_s, RATE_WINDOW_S)
            busy_s, held_s = last.busy_s - first.busy_s, last.held_s - first.held_s
            found.append({
                "from": self.rank, "to": peer, "path": path, "source_port": last.source_port, "bytes": last.num_bytes,
                "now_bits_per_s": round(8 * (last.num_bytes - first.num_bytes) / seconds, 1), "share": last.share,
                "limit": last.limit, "is_up": last.is_up, "busy": round(min(1.0, busy_s / seconds), 3),
                "limited_by": _limited_by(last, busy=busy_s / seconds, held=held_s / max(busy_s, 1e-9)),
            })  # fmt: skip
        return found


def _limited_by(last: PathReading, *, busy: float, held: float) -> str:
    if not last.is_up:
        return "nothing arrives"
    if last.limit < 1:
        return "a finding"
    if busy < _BUSY_SHARE:
        return "what there is to send"
    return "the receiver" if held > _BUSY_SHARE else "the path"


def path_table(traffic: Mapping[int, PathTraffic]) -> dict[str, Any]:
    """Join the paths of all ranks; of many, those with the most bytes."""
    rows = [row for _, own in sorted(traffic.items()) for row in own.rows()]
    busiest = sorted(rows, key=lambda row: -row["bytes"])[:_MOST_SHOWN]
    shown = sorted(busiest, key=lambda row: (row["from"], row["to"], row["path"]))
    return {"paths": shown, "num_left_out": len(rows) - len(shown), "recent_s": RECENT_S}


def link_table(totals: Mapping[int, LinkTotals]) -> dict[str, Any]:
    """Join the totals of all replicas: a link's sender counts; its receiver if the sender's are missing.

    Rates are the receiver's where both are known: a sender's messages end in its kernel's buffer, ahead of the network.
    """
    joined: dict[Cell, dict[str, Any]] = {}
    arrived: dict[Cell, dict[str, Any]] = {}
    for rank, own in sorted(totals.items()):
        for cell, row in own.rows().items():
            if cell[0] == rank or cell not in joined:
                joined[cell] = {**row, "reported_by": rank}
            if cell[1] == rank:
                arrived[cell] = {name: row[name] for name in ("mean_bits_per_s", "now_bits_per_s")}
    joined = {cell: row | arrived.get(cell, {}) for cell, row in joined.items()}
    busiest = sorted(joined.values(), key=lambda link: -link["bytes"])
    shown = sorted(busiest[:_MOST_SHOWN], key=lambda link: (link["from"], link["to"]))
    return {
        "links": shown, "num_left_out": len(busiest) - len(shown), "recent_s": RECENT_S,
        "streams": _stream_rows(totals),
    }  # fmt: skip


def _stream_rows(totals: Mapping[int, LinkTotals]) -> list[dict[str, Any]]:
    """Join what all replicas sent by stream; the fullest second is that of one replica."""
    rows: dict[str, dict[str, Any]] = {}
    for own in totals.values():
        for name, sent in own.streams.items():
            row = rows.setdefault(name, dict.fromkeys(("messages", "bytes", "most_bytes", "peak_bits_per_s"), 0))
            row["messages"] += sent.messages
            row["bytes"] += sent.num_bytes
            row["most_bytes"] = max(row["most_bytes"], sent.most_bytes)
            row["peak_bits_per_s"] = max(row["peak_bits_per_s"], 8 * sent.peak_bytes)
    return [{"stream": text(name), **row} for name, row in sorted(rows.items(), key=lambda one: -one[1]["bytes"])]


_MOST_EVALUATIONS = 1000
_MOST_WARNINGS = 10
_MOST_TEXT = 500
# A live replica writes a line an interval, but evaluating and compiling take time between two.
_LEAST_SILENCE_S, _INTERVALS = 60.0, 3.0


class Replica:
    """The lines of one replica's metrics."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.restart()

    def restart(self) -> None:
        """Forget all lines: the file is read again."""
        self.first: StepMetrics | None = None  # its first line about steps; None before it
        self.last: StepMetrics | None = None  # its latest line about steps; None before the first
        self.loss = Curve()  # its training loss by step
        self.speed = Curve()  # its samples per second, by seconds of its training
        # its parts of the latest evaluations, by step
        self.evaluations: dict[int, EvaluationMetrics] = {}
        # the latest, with their steps
        self.warnings: deque[tuple[int, str]] = deque(maxlen=_MOST_WARNINGS)
        self.error = ""  # the error with which it ended; empty while it goes on
        self._interval_s = 0.0

    def take(self, values: dict[str, Any]) -> tuple[StepMetrics, StepMetrics | None] | None:
        """Add a line of metrics, else a DataError; return a line about steps together with the one before it."""
        match parse_metrics(values, source="the line"):
            case StepMetrics() as line:
                before = self.last if self.last is not None and self.last.step < line.step else None
                self.first = self.first or line
                self.last, self.error = line, ""  # a resumed run goes on after an error
                if before is not None:
                    self._interval_s = max(0.0, line.time_s - before.time_s)
                self.loss.add(line.step, line.loss)
                self.speed.add(line.time_s, line.samples_per_s)
                return line, before
            case EvaluationMetrics() as part:
                self.evaluations[part.step] = part
                if len(self.evaluations) > _MOST_EVALUATIONS:
                    self.evaluations.pop(next(iter(self.evaluations)))
            case ErrorMetrics(message=message):
                self.error = message[:_MOST_TEXT]
            case WarningMetrics(step=step, message=message):
                self.warnings.append((step, message[:_MOST_TEXT]))
        return None

    @property
    def silence_s(self) -> float:
        """Seconds without a line after which it counts as silent, if it writes at its log intervals only."""
        return max(_LEAST_SILENCE_S, _INTERVALS * self._interval_s)

    def to_json(self) -> dict[str, Any]:
        """Return the row of the page, from its latest line."""
        line = self.last
        if line is None:
            return {"replica": self.number, "error": self.error}
        return {
            "replica": self.number, "error": self.error, "step": line.step, "loss": line.loss,
            "unit": line.unit,
            line.unit: line.samples, f"{line.unit}_per_s": line.samples_per_s, "computing": line.computing,
            "sent_bytes": line.sent_bytes, "received_bytes": line.received_bytes,
            "sent_bits_per_s": line.sent_bits_per_s, "peak_bits_per_s": line.peak_bits_per_s,
            "rounds_in_flight": line.rounds_in_flight, "time_s": line.time_s,
        }  # fmt: skip


MOST_RECORDS = 6_000
_MOST_PARTS = 1 << 13


class RunWindow:
    """Latest records of all ranks: from their recorders, or from their lines of metrics and transfers without one."""

    def __init__(self) -> None:
        self._kept = RecordWindow(most_records=MOST_RECORDS)
        self._parts: dict[int, dict[tuple[int, int, str], int]] = {}
        self.ranks: set[int] = set()  # ranks with files
        self.recorded: set[int] = set()  # of these, those with a recorder, which reports open operations too

    def restart(self, rank: int) -> None:
        """Forget what a rank has written."""
        self._kept.forget(rank)
        self._parts.pop(rank, None)

    def add_record(self, rank: int, record: Record) -> None:
        """Add a record of a rank's own recorder; it is more exact than metrics, which are forgotten."""
        if rank not in self.recorded:
            self.restart(rank)
            self.recorded.add(rank)
        if not isinstance(record, Communicator) and record.rank != rank:
            raise ValueError(f"a record of rank {record.rank} in the file of rank {rank}")
        self._kept.add(record)

    def add_transfer(self, rank: int, line: dict[str, Any]) -> None:
        """Add a line of a run's transfers; a ValueError if it holds what cannot be."""
        parts = self._parts.setdefault(rank, defaultdict(int))
        for key in list(parts)[: len(parts) - _MOST_PARTS]:  # rounds that are long over
            del parts[key]
        self._kept.add(end_of(line, rank, parts))

    def add_steps(self, rank: int, line: StepMetrics, before: StepMetrics | None) -> None:
        """Add the work between a line of metrics and the one before, with the waiting at its end."""
        begin_s = before.time_s if before is not None else 0.0
        if line.time_s > begin_s:
            work_s = (line.time_s - begin_s) * min(1.0, max(0.0, line.compute_fraction))
            self._kept.add(Span(rank=rank, kind="compute", step=line.step, started_s=begin_s, done_s=begin_s + work_s))

    def records(self) -> Records:
        """Return the records that are kept; each replica without a recorder has a clock of its own."""
        found = self._kept.records()
        if self.ranks and not self.recorded:
            ranks = tuple(sorted(self.ranks))
            hosts = tuple(f"replica-{rank}" for rank in ranks)
            found.communicators[ROUNDS] = Communicator(communicator=ROUNDS, ranks=ranks, hosts=hosts)
        rounds: dict[int, dict[int, list[TransferEnd]]] = defaultdict(lambda: defaultdict(list))
        for end in found.transfers:
            if end.rank not in self.recorded:
                rounds[end.rank][end.operation].append(end)
        for own in rounds.values():
            found.operations += [operation_of(own[round], sequence=round) for round in sorted(own)]
        return found


MOST_RANKS = 256
_MOST_ENTRIES = 20_000
_NAMED = re.compile(r"(metrics-replica|transfers-replica|rounds-replica|records-rank)-([0-9]{1,6})\.jsonl")
_Take = Callable[[int, bytes | None], object]


class Sources:
    """Contents of a run's JSONL files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, JsonlTailer] = {}
        # by number, from the metrics
        self.replicas: dict[int, Replica] = {}
        # by the rank that wrote them
        self.links: dict[int, LinkTotals] = {}
        # likewise
        self.paths: dict[int, PathTraffic] = {}
        self.window = RunWindow()  # the latest records
        # by replica, of elastic runs
        self.rounds: dict[int, LatestRows] = {}
        self.journal = CoordinatorLog()  # the coordinator's
        self.findings = Findings()  # from `findings.jsonl`
        self.actions = latest_actions()  # from `actions.jsonl`
        self.refused = RejectedLines()  # rejected lines
        self.num_left_out = 0  # files of more ranks than are followed
        self.changes = 0  # number of polls that read something

    def poll(self) -> bool:
        """Read what is new, a piece of each file, and return whether more is there."""
        self._find()
        for name, file in list(self._files.items()):
            is_restarted, lines = file.poll()
            take, restarts = self._taker(name)
            older = self._folder / f"{name.removesuffix('.jsonl')}.old.jsonl"
            if is_restarted and not older.exists():  # else its recorder has rotated it
                for restart in restarts:
                    restart()
            self.changes += bool(lines) or is_restarted
            for number, line in lines:
                try:
                    take(number, line)
                except (ValueError, DataError) as error:
                    self.refused.add(f"{name}:{number}", str(error))
        return any(file.is_behind for file in self._files.values())

    def has(self, start: str) -> bool:
        """Return whether there is a file whose name begins with `start`."""
        return any(name.startswith(start) and file.changed_at is not None for name, file in self._files.items())

    def changed_at(self, rank: int | None = None) -> float | None:
        """Return the time of the last write to a rank's files, or to any file; None if there is none."""
        end = "" if rank is None else f"-{rank}.jsonl"
        return max((file.changed_at for name, file in self._files.items() if name.endswith(end) and file.changed_at is
                    not None), default=None)  # fmt: skip

    def evaluations(self) -> list[EvaluationMetrics]:
        """Return the evaluations of the global parameters, in order of steps."""
        return join_evaluations(part for one in self.replicas.values() for part in list(one.evaluations.values()))

    def _find(self) -> None:
        """Find new files; names are matched, never made from the contents of files."""
        numbered: list[tuple[int, str]] = []
        try:
            with os.scandir(self._folder) as entries:
                for count, entry in enumerate(entries):
                    if count >= _MOST_ENTRIES:
                        self.refused.add(str(self._folder.name), f"more than {_MOST_ENTRIES} entries")
                        break
                    if entry.name in self._files or not entry.is_file():
                        continue
                    if match := _NAMED.fullmatch(entry.name):
                        numbered.append((int(match[2]), entry.name))
                    elif entry.name in ("findings.jsonl", "actions.jsonl", "coordinator.jsonl"):
                        self._files[entry.name] = JsonlTailer(self._folder / entry.name)
        except OSError:
            return
        known = {int(match[2]) for name in self._files if (match := _NAMED.fullmatch(name))}
        left_out = set()
        for number, name in sorted(numbered):
            if number in known or len(known) < MOST_RANKS:
                known.add(number)
                self._files[name] = JsonlTailer(self._folder / name)
            else:
                left_out.add(number)
        self.num_left_out = len(left_out)

    def _taker(self, name: str) -> tuple[_Take, list[Callable[[], None]]]:
        """Return the receiver of a file's lines with their numbers, and what to do when the file is read again."""
        if (match := _NAMED.fullmatch(name)) is None:
            readers: Mapping[str, Findings | LatestRows | CoordinatorLog] = {
                "findings.jsonl": self.findings, "actions.jsonl": self.actions, "coordinator.jsonl": self.journal,
            }  # fmt: skip
            reader = readers[name]
            return lambda at, line: reader.take(parse_object(line)), [reader.restart]
        rank, window = int(match[2]), self.window
        if match[1] == "rounds-replica":
            if rank not in self.rounds:
                self.rounds[rank] = LatestRows(partial(_round_row, rank), most=_MOST_ROUNDS)
            applied = self.rounds[rank]
            return lambda at, line: applied.take(parse_object(line)), [applied.restart]
        window.ranks.add(rank)
        forget = partial(window.restart, rank)
        if match[1] == "records-rank":
            return partial(self._take_record, rank), [forget]
        if match[1] == "metrics-replica":
            replica = self.replicas.setdefault(rank, Replica(rank))

            def take_metrics(at: int, line: bytes | None) -> None:
                found = replica.take(parse_object(line))
                if found is not None and rank not in window.recorded:
                    window.add_steps(rank, *found)

            return take_metrics, [replica.restart]
        links = self.links.setdefault(rank, LinkTotals(rank))

        def take_transfer(at: int, line: bytes | None) -> None:
            values = parse_object(line)
            transfer = converted(values, TransferEntry)
            links.add(transfer)
            if transfer.kind == "round" and rank not in window.recorded:
                window.add_transfer(rank, values)

        return take_transfer, [links.restart, *([] if rank in window.recorded else [forget])]

    def _take_record(self, rank: int, at: int, line: bytes | None) -> None:
        if at == 1:
            check_header(line, self._folder / f"records-rank-{rank}.jsonl")
            return
        record = parse_line(line)
        self.window.add_record(rank, record)
        if isinstance(record, PathReading):
            self.paths.setdefault(rank, PathTraffic(rank)).add(record)
        # a transfer that only the recorder reports is counted once it has ended
        if isinstance(record, TransferEnd) and f"transfers-replica-{rank}.jsonl" not in self._files and (
            record.done_s is not None or record.error
        ):  # fmt: skip
            self.links.setdefault(rank, LinkTotals(rank)).add(TransferEntry(
                kind="round", peer=record.peer, direction=record.direction, wire_bytes=record.num_bytes,
                started_s=record.posted_s, error=record.error,
                finished_s=record.posted_s if record.done_s is None else record.done_s,
            ))  # fmt: skip
