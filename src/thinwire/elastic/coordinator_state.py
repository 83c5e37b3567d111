"""State of the coordinator of an elastic run and its outgoing messages; `Coordinator` makes the decisions."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.elastic.data_leases import Lease, Ledger
from thinwire.elastic.roster import Member, Roster, Standing
from thinwire.elastic.rounds import Decision, RoundBook
from thinwire.elastic.routing import DetourTable, SiteTable
from thinwire.elastic.snapshots import Cut, Cuts
from thinwire.elastic.standby_hosts import SpareHosts
from thinwire.events import FIRST_LAST_ROUND

# Intervals whose parts are kept for a replica that is behind.
_MOST_BEHIND = 8
# Parts that are kept for those that may come back are no more than such a share of the state.
_KEPT_SHARE = 0.5
MOST_FINDINGS = 1000
_MOST_SITES_TOLD, _MOST_DETOURS_TOLD = 20, 100
Send = Callable[[bytes, str, dict[str, Any]], None]
Record = Callable[[str, dict[str, Any]], None]


class Desk:
    """The state of a coordinator and its words to replicas.

    Args:
        job: What a replica must know to take part: `config` and numbers, as JSON values.
        planned: So many replicas begin together.
        sync_interval: H, inner steps.
        overlap_steps: tau, inner steps.
        part_share: Bytes of the parts that a replica sends in an interval, over those of the state.
        shard_windows: Windows of the data that a replica is lent at a time.
        send: Sends a message to a connection.
        record: Writes what must survive to the journal, before anything is sent.
        generation: Names this process of the coordinator.
        founding_s: For how long those that are late are waited for at the beginning.
        resumed_step: Step of the checkpoint that the run goes on from, 0 where it begins from the seed.
        bears: Whether training goes on where a round's result is overdue.
        clock: Gives the time of day, for those that compare theirs with it.

    Attributes:
        roster: Who takes part.
        book: The rounds.
        ledger: Who trains on what.
        cuts: States for those that come.
        has_started: Whether training has begun.
        has_finished: Whether it has come to its end.
        failure: Why it has failed for all, "" where it has not.
        is_paused: Whether all replicas were told to pause.
        findings: What people should know, the latest last.
        places: Groups of replicas that reach each other much faster than others.
        detours: Wires that are gone around, since they are much slower than others.
        spares: Hosts that wait to take a lost replica's place.
        replaced: Whose place a spare was called for, and its host, the latest last.
        orders: What launchers are to do to the processes of replicas that were let go, the latest last.
        keep_records: Takes what a replica recorded, in lines.
    """

    _notices: dict[int, int]
    _recorded: dict[int, int]
    findings: list[str]
    orders: list[dict[str, Any]]
    replaced: list[dict[str, Any]]
    keep_records: Callable[[int, str], None]

    def __init__(
        self, *, job: Mapping[str, Any], planned: int, sync_interval: int, overlap_steps: int, shard_windows: int,
        send: Send, record: Record, generation: str, founding_s: float = 60.0, resumed_step: int = 0,
        part_share: float = 0.0, bears: bool = False, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.roster = Roster()
        self.book = RoundBook(
            sync_interval=sync_interval, overlap_steps=overlap_steps, bears=bears,
            last_step=job.get("config", {}).get("steps") or math.inf,
        )  # fmt: skip
        self.ledger = Ledger(shard_windows=shard_windows)
        self.cuts = Cuts()
        self.has_started = False
        self.has_finished = False
        self.failure = ""
        self._bad_hosts: set[str] = set()  # where replicas were dropped because their parts held NaN or infinity
        self.is_paused = False
        self.places, self.detours, self.spares = SiteTable(), DetourTable(), SpareHosts()
        self.findings, self.orders, self.replaced = [], [], []
        self._job = dict(job)
        self._planned = planned
        self._sync_interval = sync_interval
        self._send = send
        self._record = record
        self._generation = generation
        self._founding_s = founding_s
        self._first_s: float | None = None
        self._overlap_steps = overlap_steps
        self._from_disk = resumed_step > 0
        self._resumed_step = resumed_step
        # by decision: the first step whose state holds it, its round, and the account of the data before it was counted
        self._accounts: deque[tuple[int, int, dict[str, Any]]] = deque()
        self._part_share = part_share
        self._era = 0
        self._revived: dict[str, Any] | None = None  # the latest line that the run goes on from a disk, or has
        self._written: dict[int, dict[str, Any]] = {}  # by replica that is there, its latest line in the journal
        self._kept_step = 0
        self._clock = clock
        self._reviver: int | None = None
        self._corpus: tuple[str, int] | None = None
        self._used: dict[int, dict[int, dict[int, int]]] = {}
        self._notes: dict[int, dict[str, Any]] = {}
        self._notices, self._recorded, self.keep_records = {}, {}, _keep_nothing
        self._finish: dict[str, Any] | None = None
        self._next_progress_s = 0.0
        self._lent: dict[int, tuple[int, Lease]] = {}

    def _tell(self, replica: int, kind: str, fields: dict[str, Any]) -> None:
        member = self.roster.get(replica)
        if member is not None:
            self._send(member.token, kind, fields)

    def _tell_all(self, kind: str, fields: dict[str, Any]) -> None:
        for member in self.roster:
            self._send(member.token, kind, fields)

    def _tell_roster(self, *, to: Member | None = None) -> None:
        there = [member.describe() for member in self.roster if member.standing is not Standing.ARRIVING]
        fields = {"members": there, "started": self.has_started, "number": self._roster_number()}
        for member in self.roster if to is None else (to,):
            self._send(member.token, "roster", fields)

    def _roster_number(self) -> int:
        return 2 * self.roster.number + self.has_started

    def _tell_decision(self, decision: Decision, *, to: Member) -> None:
        fields = {
            "round": decision.round_id, "launch_step": decision.launch_step, "members": list(decision.members),
            "holders": list(decision.holders), "step": decision.step, "closed": self.book.closed_step,
        }  # fmt: skip
        self._send(to.token, "decision", fields)

    def _tell_progress(self) -> None:
        fields = {
            "step": self.book.step, "closed": self.book.closed_step, "floor": self._floor(), "kept": self._keep(),
            "generation": self._generation,
        }  # fmt: skip
        self._tell_all("progress", fields)

    def _keep(self) -> int:
        """Return a step from which on parts are kept for replicas that died and may come back with their own state.

        What they lack then must be less to fetch than the state: half of it at most.
        """
        share = self._part_share * max(1, len(self.roster.active))
        intervals = min(_MOST_BEHIND, _KEPT_SHARE / share) if share else _MOST_BEHIND
        wished = self._furthest_step() - int(intervals * self._sync_interval)
        # one that comes back just now needs them until it is there
        self._kept_step = max(self._kept_step, min(wished, self._floor()))
        return self._kept_step

    def _may_go_on(self, held_step: int, *, era: int) -> bool:
        """Tell whether a replica can go on from a state that it holds itself."""
        if not held_step or era != self._era or self._from_disk or not self.roster.active:
            return False
        since = [found for found in self.book.decisions.values() if found.launch_step > held_step - self._sync_interval]
        is_in_bounds = self._keep() <= held_step <= self._furthest_step()
        return is_in_bounds and all(map(self._is_held, since))

    def _is_held(self, decision: Decision) -> bool:
        """Tell whether somebody who takes part has a round's parts: those that came later may have none of it."""
        active = self.roster.with_standing(Standing.ACTIVE)
        return any(one.replica in decision.holders or one.begin_step <= decision.launch_step for one in active)

    def _tell_pace(self) -> None:
        for text in self.detours.update(self.roster.active, num_rounds=self.book.num_decided):
            if self.detours.num_changes <= _MOST_DETOURS_TOLD:
                self._find(text)
        is_new = self.places.update(self.roster.active, ways=self.detours.ways())
        sites, detours = self.places.sites, [one.to_list() for one in self.detours.detours]
        if is_new and self.places.num_changes <= _MOST_SITES_TOLD:  # rates may go up and down for days
            named = "; ".join(", ".join(map(str, site)) for site in sites)
            self._find(f"sites by measured rates: {f'replicas {named}' if sites else 'none any more'}")
        fields = {"step_s": self.roster.step_s(), "sites": [list(site) for site in sites], "detours": detours}
        self._tell_all("pace", fields)

    def _write_member(self, member: Member) -> None:
        own = {"token": member.token.hex(), "held_step": member.held_step, "begin_step": member.begin_step}
        own["disk_step"] = member.disk_step
        self._written[member.replica] = {**member.describe(), **own}
        self._record("member", self._written[member.replica])

    def _write_revived(self, step: int, *, is_begun: bool) -> None:
        self._revived = {"step": step, "is_begun": is_begun, "era": self._era}
        self._record("revived", self._revived)

    def _find(self, text: str) -> None:
        self.findings.append(text)
        del self.findings[:-MOST_FINDINGS]
        self._record("finding", {"text": text})

    def report(self, text: str) -> None:
        """Add a finding that does not come from a message, as about the host's disk."""
        self._find(text)

    def _run_note(self, step: int | None = None) -> dict[str, Any]:
        """Return what is noted with a state: the account of the data as of its step; None for all that was decided."""
        seq_len = self._job.get("config", {}).get("seq_len") or 0
        data = self.ledger.state_dict()
        if step is not None:
            # rounds are decided before they are applied: a state of this step does not hold the later ones
            data = next((before for applied, _, before in self._accounts if applied > step), data)
        return {"tokens": data["counted"] * seq_len, "data": data, "next_replica": self.roster.next_replica}

    def _remember(self, decision: Decision) -> None:
        """Keep the account of the data before a decision is counted, for states that do not hold it."""
        is_last = decision.round_id >= FIRST_LAST_ROUND
        applied = decision.launch_step + (0 if is_last else self._overlap_steps)
        self._accounts.append((applied, decision.round_id, self.ledger.state_dict()))
        oldest = decision.launch_step - (_MOST_BEHIND + 1) * self._sync_interval
        while self._accounts[0][0] < oldest:
            self._accounts.popleft()

    def _uncount(self, replica: int, *, since: int) -> None:
        """Take back what a replica trained in rounds from one on, also in the accounts for states of the steps since.

        These count none of those rounds then: what other replicas trained in them may be trained again after a resume,
        and nothing is left out.
        """
        self.ledger.uncount(replica, since=since)
        before = next((data for _, round_id, data in self._accounts if round_id >= since), None)
        if before is not None:
            self._accounts = deque(
                (applied, round_id, before if round_id >= since else data) for applied, round_id, data in self._accounts
            )
            self._record("accounts", {"accounts": [list(account) for account in self._accounts]})

    def _forget_accounts(self) -> None:
        self._accounts.clear()

    def _furthest_step(self) -> int:
        return max([self.book.step, *(member.step for member in self.roster)])

    def _floor(self) -> int:
        """Return a step up to which nobody needs rounds any more, nor states from before it.

        One that is further behind than `_MOST_BEHIND` intervals, as after a long pause, joins again instead.
        """
        most_behind = self._furthest_step() - _MOST_BEHIND * self._sync_interval
        steps = [max(member.step, most_behind) for member in self.roster.with_standing(Standing.ACTIVE)]
        # what they fetch is of this step, also where another process of the coordinator told them of it
        steps += [member.step for member in self.roster.with_standing(Standing.LOADING) if member.step]
        needed = self.cuts.needed_step()
        return max(0, min([*steps, *([] if needed is None else [needed])], default=0) - 1)

    def _show(self, cut: Cut, *, to: tuple[int, ...]) -> None:
        agreed = cut.agreed
        if agreed is None:
            return
        state = {
            "step": cut.step, "root": agreed[0], "bytes": agreed[1], "holders": list(cut.agreeing()),
            "note": self._run_note(cut.step), "era": self._era,
        }  # fmt: skip
        for replica in to:
            self._tell(replica, "state", state)

    def _offer_from_nobody(self, replica: int, root: str, *, step: int = 0) -> None:
        """Offer a state that nobody shows: the seed's, that on a replica's own disk, or that which it holds itself."""
        fields = {"step": step, "root": root, "bytes": 0, "holders": [], "note": {}, "era": self._era}
        self._tell(replica, "state", fields)


def _keep_nothing(replica: int, text: str) -> None:
    """Let records go: a coordinator without a folder."""
