"""Files of a `thinwire train` run read as records: transfers, and steps with their loss."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import DataError
from thinwire.monitor.runlog.reader import MOST_RANKS, Records, numbered_lines, parse_line, parse_object
from thinwire.monitor.runlog.records import Communicator, Operation, Span, TransferEnd, to_line

_TRANSFERS = re.compile(r"transfers-replica-(\d{1,6})\.jsonl")
_METRICS = re.compile(r"metrics-replica-(\d{1,6})\.jsonl")
ROUNDS = "rounds"
MEMBERS_FILE, JOURNAL_FILE = "members.jsonl", "coordinator.jsonl"
# Messages of one round: fragments and phases are told apart, so that both ends find each other.
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

    None where the run was left with less than two members: then the loss of the others is the fault. The numbers of
    replicas are never given again. Of lines that hold something else nothing is taken.

    Args:
        folder: The run's folder on one host.
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
                    told = parse_object(line)
                    removed |= _ranks([told.get("replica")] if told.get("what") == "gone" else told.get("removed"))
                    present = len(_ranks(told["present"])) if "present" in told else present
        except DataError:  # it went away, or may not be read: what is known stays
            continue
    return frozenset(removed) if present >= _LEAST_PRESENT else frozenset()


def _ranks(told: object) -> set[int]:
    found = told[:_MOST_REMOVED] if isinstance(told, list) else []
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
        take = _take_transfers if _TRANSFERS.fullmatch(path.name) else _take_metrics
        take(records, path, rank)


def _take_transfers(records: Records, path: Path, rank: int) -> None:
    parts: dict[tuple[int, int, str], int] = defaultdict(int)
    rounds: dict[int, list[TransferEnd]] = defaultdict(list)
    for number, line in numbered_lines(path):
        records.num_lines += 1
        try:
            told = parse_object(line)
            if told.get("kind") != "round":
                continue
            end = end_of(told, rank, parts)
            records.add(end)
            rounds[end.operation].append(end)
        except (ValueError, KeyError, TypeError) as error:
            records.refuse(path.name, number, str(error) if isinstance(error, ValueError) else "fields are missing")
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


def end_of(told: dict[str, Any], rank: int, parts: dict[tuple[int, int, str], int]) -> TransferEnd:
    """Return a line of transfers as an end, checked as every record is.

    Args:
        told: The line's object.
        rank: The replica that wrote it.
        parts: Counts its messages by round, peer and direction; is counted up.

    Raises:
        ValueError: It holds what cannot be.
        KeyError: A field is missing.
        TypeError: A field is of a wrong type.
    """
    peer, round, direction = int(told["peer"]), int(told["round_id"]), str(told["direction"])
    part = parts[round, peer, direction] % _MOST_PARTS
    parts[round, peer, direction] += 1
    error = str(told.get("error", ""))[:500]
    made = TransferEnd(
        communicator=ROUNDS, rank=rank, peer=peer, direction="sent" if direction == "sent" else "received",
        operation=round, part=part, num_bytes=int(told["wire_bytes"]), posted_s=float(told["started_s"]),
        done_s=None if error else float(told["finished_s"]), error=error,
    )  # fmt: skip
    checked = parse_line(to_line(made).encode())
    assert isinstance(checked, TransferEnd)
    return checked


def _take_metrics(records: Records, path: Path, rank: int) -> None:
    """Take the lines about steps: what a replica computed since its last line, and its loss."""
    last_s, last_step = 0.0, 0
    for number, line in numbered_lines(path):
        records.num_lines += 1
        try:
            told = parse_object(line)
            if told.get("kind") != "step":
                continue
            time_s, step = float(told["time_s"]), int(told["step"])
            if time_s < last_s or step <= last_step:
                raise ValueError("steps run backwards")
            # what was waited for the wire is no work
            work_s = (time_s - last_s) * min(1.0, max(0.0, float(told["compute_fraction"]))) / (step - last_step)
            span = Span(
                rank=rank, kind="compute", step=step, started_s=last_s, done_s=last_s + work_s, loss=float(told["loss"])
            )
            records.add(parse_line(to_line(span).encode()))
            last_s, last_step = time_s, step
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            records.refuse(path.name, number, str(error) if type(error) is ValueError else "fields are missing")
