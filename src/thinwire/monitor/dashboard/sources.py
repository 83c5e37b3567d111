"""Readers of the files of a run's folder, each read in bounded pieces."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from thinwire.errors import DataError
from thinwire.monitor.dashboard.elastic import AppliedRounds, Journal
from thinwire.monitor.dashboard.findings_reader import Actions, Findings
from thinwire.monitor.dashboard.links import LinkTotals
from thinwire.monitor.dashboard.rejected_lines import Refused
from thinwire.monitor.dashboard.replicas import Replica
from thinwire.monitor.dashboard.window import RankWindow, room_for
from thinwire.monitor.runlog.reader import check_header, parse_line, parse_object
from thinwire.monitor.runlog.records import TransferEnd
from thinwire.monitor.runlog.tailer import GrowingFile

MOST_RANKS = 256
_MOST_ENTRIES = 20_000
_NAMED = re.compile(r"(metrics-replica|transfers-replica|rounds-replica|records-rank)-([0-9]{1,6})\.jsonl")
_Take = Callable[[dict[str, Any]], object]


class _Keeper(Protocol):
    def restart(self) -> None: ...


class Sources:
    """All that was read of a run's files of lines.

    Args:
        folder: The run's folder.

    Attributes:
        replicas: By number, from the metrics.
        links: By the rank that wrote.
        windows: The latest records, by rank.
        rounds: By replica, of elastic runs.
        journal: Of the coordinator.
        findings: From `findings.jsonl`.
        actions: From `actions.jsonl`.
        refused: What was not taken.
        num_left_out: Files of more ranks than are followed.
        changes: Counts what was read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, GrowingFile] = {}
        self.replicas: dict[int, Replica] = {}
        self.links: dict[int, LinkTotals] = {}
        self.windows: dict[int, RankWindow] = {}
        self.rounds: dict[int, AppliedRounds] = {}
        self.journal = Journal()
        self.findings = Findings()
        self.actions = Actions()
        self.refused = Refused()
        self.num_left_out = 0
        self.changes = 0

    def look(self) -> bool:
        """Read what is new, a piece of each file, and return whether more is there."""
        self._find()
        for name, file in list(self._files.items()):
            is_anew, lines = file.look()
            take, kept = self._taker(name)
            if is_anew and not self._is_rotated(name):
                for keeper in kept:
                    keeper.restart()
            self.changes += bool(lines) or is_anew
            for number, line in lines:
                try:
                    self._take(name, number, line, take)
                except (ValueError, DataError) as error:
                    self.refused.add(f"{name}:{number}", str(error))
                except (KeyError, TypeError, OverflowError):
                    self.refused.add(f"{name}:{number}", "fields are missing or of a wrong type")
        return any(file.is_behind for file in self._files.values())

    def _is_rotated(self, name: str) -> bool:
        """Return whether a file is new because its recorder put the one before it aside: that is no new beginning."""
        return name.startswith("records-rank") and (self._folder / f"{name.removesuffix('.jsonl')}.old.jsonl").exists()

    def has(self, start: str) -> bool:
        """Return whether a file whose name begins so is there."""
        return any(name.startswith(start) and file.changed_at is not None for name, file in self._files.items())

    def changed_at(self, rank: int | None = None) -> float | None:
        """Return when a rank's files were last written to, or any file; none where there is none."""
        end = "" if rank is None else f"-{rank}.jsonl"
        return max((file.changed_at for name, file in self._files.items() if name.endswith(end) and file.changed_at is
                    not None), default=None)  # fmt: skip

    def _find(self) -> None:
        """Note the files that are there and were not; names are matched, never made from what files say."""
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
                        self._files[entry.name] = GrowingFile(self._folder / entry.name)
        except OSError:
            return
        known = {int(match[2]) for name in self._files if (match := _NAMED.fullmatch(name))}
        left_out = set()
        for number, name in sorted(numbered):
            if number in known or len(known) < MOST_RANKS:
                known.add(number)
                self._files[name] = GrowingFile(self._folder / name)
            else:
                left_out.add(number)
        self.num_left_out = len(left_out)

    def _taker(self, name: str) -> tuple[_Take, list[_Keeper]]:
        """Return who takes the lines of a file, and who is to forget when it is read anew."""
        if (match := _NAMED.fullmatch(name)) is None:
            told: Mapping[str, Findings | Actions | Journal] = {
                "findings.jsonl": self.findings, "actions.jsonl": self.actions, "coordinator.jsonl": self.journal,
            }  # fmt: skip
            return told[name].take, [told[name]]
        number = int(match[2])
        if match[1] == "rounds-replica":
            applied = self.rounds.setdefault(number, AppliedRounds(number))
            return applied.take, [applied]
        window = self.windows.setdefault(number, RankWindow(number))
        if match[1] == "metrics-replica":
            replica = self.replicas.setdefault(number, Replica(number))
            return lambda line: self._take_metrics(replica, window, line), [replica]
        if match[1] == "transfers-replica":
            links = self.links.setdefault(number, LinkTotals(number))
            kept: list[_Keeper] = [links] if window.is_recorded else [links, window]
            return lambda line: self._take_transfer(links, window, line), kept
        return lambda line: None, [window]

    def _take(self, name: str, number: int, line: bytes | None, take: _Take) -> None:
        if name.startswith("records-rank"):
            self._take_record(name, number, line)
        else:
            take(parse_object(line))

    def _take_record(self, name: str, number: int, line: bytes | None) -> None:
        if number == 1:
            check_header(line, self._folder / name)
            return
        rank = int(name.removesuffix(".jsonl").rpartition("-")[2])
        window = self.windows[rank]
        if not window.is_recorded:  # what was taken from the metrics is told better here
            window.restart()
            window.is_recorded = True
        record = parse_line(line)
        window.add(record, room=room_for(len(self.windows)))
        if isinstance(record, TransferEnd) and f"transfers-replica-{rank}.jsonl" not in self._files:
            self._count(rank, record)

    def _count(self, rank: int, end: TransferEnd) -> None:
        """Count a transfer that nobody else tells of, once it is over."""
        if end.done_s is not None or end.error:
            self.links.setdefault(rank, LinkTotals(rank)).add(
                peer=end.peer, is_sent=end.direction == "sent", num_bytes=end.num_bytes,
                done_s=end.posted_s if end.done_s is None else end.done_s, failed=bool(end.error),
            )  # fmt: skip

    def _take_metrics(self, replica: Replica, window: RankWindow, line: dict[str, Any]) -> None:
        found = replica.take(line)
        if found is not None and not window.is_recorded:
            window.add_steps(*found, room=room_for(len(self.windows)))

    def _take_transfer(self, links: LinkTotals, window: RankWindow, line: dict[str, Any]) -> None:
        links.add(
            peer=_whole(line["peer"]), is_sent=line["direction"] == "sent", num_bytes=_whole(line["wire_bytes"]),
            done_s=float(line["finished_s"]), failed=bool(line.get("error")),
        )  # fmt: skip
        if line["kind"] == "round" and not window.is_recorded:
            window.add_transfer(line, room=room_for(len(self.windows)))


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise ValueError(f"no whole number from 0: {str(value)[:40]!r}")
    return value
