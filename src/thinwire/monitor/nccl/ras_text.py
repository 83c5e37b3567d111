"""One answer of NCCL's RAS in its text form, taken in line by line.

It names the ranks of groups that are small (up to a quarter of the communicator and up to ten; with `verbose`, below
half), and only counts the others. Where all groups but one are named, the rest are that one: so the many that are
behind the few that RAS prints are known too (github.com/NVIDIA/nccl/issues/1911).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from thinwire.monitor.nccl.values import CommunicatorState, Member, Process, Snapshot
from thinwire.monitor.runlog.reader import short
from thinwire.monitor.runlog.records import MOST_RANKS

HEADER = re.compile(r"^NCCL version \S+ compiled with CUDA", re.MULTILINE)
# Numbers are of at most 18 digits, so that none is too long to be one.
_ROW = re.compile(
    r"\s*(?P<group>\d{1,9})\s+\d{1,9}\s+\d{1,9}\s+\d{1,9}(?:-\d{1,9})?\s+(?P<size>\d{1,9})\s+\d{1,9}"
    r"\s+[A-Z]{1,20}\s+(?P<errors>[A-Z,]{2,60})"
)
_NO_COMMUNICATORS = "No communicator data collected!"
_COMMUNICATOR = re.compile(r"#(?P<group>\d{1,9})-(?P<number>\d{1,9}) \((?P<hash>[0-9a-f]{1,16})\) (?P<state>[A-Z]+)")
_PROCESS = re.compile(r"Process (?P<pid>\d{1,18}) on node (?P<host>\S{1,200}) managing GPUs? (?P<gpus>.{1,400})")
_RANK = re.compile(
    r"Rank (?P<rank>\d{1,9})(?: has status (?P<status>[A-Z]{1,20})| has launched up to operation (?P<count>\d{1,18})"
    r"| (?P<none>has not launched any operations)| reported (?P<error>.{1,60}?))?"
    r"(?: -- (?:GPU (?P<gpu>\d{1,6})(?: \(NVML \d{1,6}\))? managed by process (?P<pid>\d{1,18}) on node "
    r"(?P<host>\S{1,200})|\[process information not found\]))?"
)
_GROUP = re.compile(
    r"(?P<num>\d{1,9}) ranks (?:have status (?P<status>[A-Z]{1,20})|have launched up to operation (?P<count>\d{1,18})"
    r"|(?P<none>have not launched any operations)|reported (?P<error>.{1,60}))"
)
_DIFFERENT = re.compile(r"Communicator ranks have different (?:(?P<kind>\w{1,40}) operation counts|(?P<status>status))")
_LISTED = re.compile(r"The (?P<what>missing|unknown) ranks?: (?P<ranks>\d{1,9}(?:,\d{1,9})*)")
_SAID = re.compile(
    r"(Missing communicator data from|Encountered) \d+ |\d+ job process(es are| is) considered dead|\[could not find "
)
_UNKNOWN, _NOCOMM = "UNKNOWN", "NOCOMM"
_ERRORS = ("init_error", "async_error")


@dataclass(slots=True)
class _Group:
    """Ranks of a communicator that have one value in common, and those of them that are named."""

    value: Any
    num: int
    ranks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Communicator:
    """What was told of a communicator so far."""

    communicator: str
    size: int
    errors: str
    members: dict[int, dict[str, Any]] = field(default_factory=dict)
    # by what they differ in: the kind of a collective, or `status`
    groups: dict[str, list[_Group]] = field(default_factory=dict)
    topic: str = ""

    def member(self, rank: int) -> dict[str, Any]:
        if rank >= (self.size if self.size > 0 else MOST_RANKS):
            raise ValueError(f"rank is not below the communicator's size: {rank}")
        return self.members.setdefault(rank, {"rank": rank, "counts": {}})


class StatusText:
    """Takes the lines of one answer.

    Args:
        source: The file.
        budget: How many ranks may still be told that are not named, shared by all answers of a file: a forged size
            would fill the memory else.

    Attributes:
        is_complete: Whether its list of communicators has come.
    """

    def __init__(self, source: str, budget: list[int]) -> None:
        self.is_complete = False
        self._source = source
        self._budget = budget
        self._rows: dict[int, tuple[int, str]] = {}
        self._communicators: dict[tuple[str, str, str], _Communicator] = {}
        self._processes: dict[str, list[Process]] = {"DEAD": [], "INCOMPLETE": []}
        self._section = ""
        self._now: _Communicator | None = None

    def take(self, line: str) -> bool:
        """Take a line in, and return whether it told anything.

        Raises:
            ValueError: It belongs to the answer, and cannot be understood.
        """
        told = line.strip()
        if not line.startswith(" "):
            return self._take_title(told)
        if (row := _ROW.fullmatch(line)) is not None and not self._section:
            return self._take_row(row)
        if not self._section or _SAID.match(told) is not None:
            return False
        if self._now is None:
            if (process := _PROCESS.fullmatch(told)) is None:
                raise ValueError(f"no process of RAS: {short(told)}")
            made = Process(host=process["host"], pid=int(process["pid"]), gpus=process["gpus"])
            self._processes[self._section].append(made)
            return True
        return self._take_detail(self._now, told)

    def _take_row(self, row: re.Match[str]) -> bool:
        size = int(row["size"])
        if not 0 < size <= MOST_RANKS:
            raise ValueError(f"a communicator of so many ranks: {size}")
        self._rows[int(row["group"])] = size, row["errors"]
        return True

    def _take_title(self, told: str) -> bool:
        if told in self._processes:
            self._section, self._now = told, None
        elif (match := _COMMUNICATOR.fullmatch(told)) is not None:
            self._section = match["state"]
            size, errors = self._rows.get(int(match["group"]), (-1, ""))
            key = match["group"], match["number"], match["hash"]
            name = f"0x{int(match['hash'], 16):x}"
            self._now = self._communicators.setdefault(key, _Communicator(name, size, errors))
            self._now.topic = "lost" if self._section == "INCOMPLETE" else ""
        elif told.startswith("Group ") or told == _NO_COMMUNICATORS:
            self.is_complete, self._section, self._now = True, "", None
        elif told in ("Errors", "Warnings", "TIMEOUT"):
            self._section, self._now = "", None
        else:
            return False
        return True

    def _take_detail(self, now: _Communicator, told: str) -> bool:
        if (match := _DIFFERENT.match(told)) is not None:
            now.topic = match["kind"] or "status"
            now.groups[now.topic] = []
        elif (match := _RANK.fullmatch(told)) is not None:
            _take_rank(now, match)
        elif (match := _GROUP.fullmatch(told)) is not None:
            now.groups.setdefault(now.topic, []).append(_Group(_value_of(match), int(match["num"])))
        elif (match := _LISTED.fullmatch(told)) is not None:
            is_missing = match["what"] == "missing"
            for rank in map(int, match["ranks"].split(",")):
                now.member(rank).update({"lost": "unresponsive"} if is_missing else {"status": _NOCOMM})
        elif told.startswith(("Initialization error", "Asynchronous error")):
            now.topic = "init_error" if told.startswith("I") else "async_error"
        else:
            raise ValueError(f"nothing that RAS is known to say of a communicator: {short(told)}")
        return True

    def snapshot(self, at_s: float | None) -> Snapshot:
        """Return what was told."""
        told = {int(group) for group, _, _ in self._communicators}
        # of these RAS says that they are not well, and nothing more that could be read
        bare = [
            CommunicatorState(communicator=f"of group {group}", size=size, members={}, errors=errors)
            for group, (size, errors) in self._rows.items()
            if errors != "OK" and group not in told
        ]
        return Snapshot(
            source=self._source, at_s=at_s, communicators=(*map(self._state, self._communicators.values()), *bare),
            dead=tuple(self._processes["DEAD"]), unresponsive=tuple(self._processes["INCOMPLETE"]),
        )  # fmt: skip

    def _state(self, told: _Communicator) -> CommunicatorState:
        unlisted = []
        for topic, groups in told.groups.items():
            for group in groups:
                # of errors, those that are not named are not all others
                ranks = group.ranks or (list(self._rest(told, groups, group)) if topic not in _ERRORS else [])
                for rank in ranks:
                    _set(told, rank, topic, group.value)
                if not ranks and isinstance(group.value, int):
                    unlisted.append((topic, group.value, group.num))
        dead = {(process.host, process.pid) for process in self._processes["DEAD"]}
        for member in told.members.values():
            if (member.get("host"), member.get("pid")) in dead:
                member["lost"] = "dead"
        return CommunicatorState(
            communicator=told.communicator, size=told.size, errors=told.errors, unlisted=tuple(unlisted),
            members={rank: Member(**one) for rank, one in sorted(told.members.items())},
        )  # fmt: skip

    def _rest(self, told: _Communicator, groups: Iterable[_Group], group: _Group) -> Iterator[int]:
        """Return the ranks of the one group that is not named: all but those of the others, and but those missing."""
        others = [other for other in groups if other is not group]
        if told.size <= 0 or any(len(other.ranks) != other.num for other in others) or told.size > self._budget[0]:
            return iter(())
        named = {rank for other in others for rank in other.ranks}
        is_status = groups is told.groups.get("status")
        gone = {
            rank for rank, one in told.members.items()
            if one.get("lost") or (not is_status and one.get("status") == _NOCOMM)
        }  # fmt: skip
        rest = [rank for rank in range(told.size) if rank not in named and rank not in gone]
        if len(rest) != group.num:
            return iter(())
        self._budget[0] -= len(rest)
        return iter(rest)


def _take_rank(now: _Communicator, match: re.Match[str]) -> None:
    rank = int(match["rank"])
    member = now.member(rank)
    if match["host"] is not None:
        member.update(host=match["host"], pid=int(match["pid"]), gpu=int(match["gpu"]))
    value = _value_of(match)
    if now.topic == "lost":
        member["lost"] = "unresponsive"
    elif value is not None:
        now.groups.setdefault(now.topic, []).append(_Group(value, 1, [rank]))
    elif now.groups.get(now.topic):
        now.groups[now.topic][-1].ranks.append(rank)
    else:
        raise ValueError(f"a rank of no group: {rank}")


def _value_of(match: re.Match[str]) -> Any:
    """Return the count, status or error in a line; none where it has none."""
    if match["count"] is not None or match["none"] is not None:
        return int(match["count"] or 0)
    status = match["status"]
    return match["error"] or (_NOCOMM if status == _UNKNOWN else status)


def _set(told: _Communicator, rank: int, topic: str, value: Any) -> None:
    member = told.member(rank)
    if isinstance(value, int):
        member["counts"][topic] = value
    elif topic in ("status", *_ERRORS):
        member[topic] = str(value)
