"""State of the coordinator of an elastic run, its replay from the journal, and the lines of a compacted journal."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.elastic.data_leases import DataLeases, Lease
from thinwire.elastic.one_time_invitations import UsedInvitations
from thinwire.elastic.part_disputes import PartDisputes
from thinwire.elastic.roster import LEAST_SILENCE_S, SUSPECT_SILENCE_S, MemberState, Roster, RosterMember
from thinwire.elastic.rounds import MESSAGE_S, Decision, ElasticRounds
from thinwire.elastic.routing import DetourTable, SiteTable
from thinwire.elastic.snapshots import StateSnapshots
from thinwire.events import FIRST_LAST_ROUND
from thinwire.roles import ROLES, checked_role

# A host asks once a second: one heard of within this time is there.
HEARD_S = 5.0
_MAX_HOSTS, _MAX_VACANCIES, _MAX_NOTED = 256, 64, 256


@dataclass(slots=True, kw_only=True)
class _StandbyHost:
    host: str
    heard_s: float
    is_called: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacancy:
    """The place of a lost replica."""

    replica: int
    host: str  # may fill it: the replica's own, or a standby host
    since_s: float  # start of the wait for that host
    is_called: bool = False  # it is a standby host


class StandbyHosts:
    """Standby hosts and vacancies.

    Attributes:
        vacancies: Places that no host has filled yet, the oldest first.

    Example:
        >>> spares = StandbyHosts()
        >>> spares.ask(b"s", "gamma", now_s=0.0), spares.waiting(now_s=1.0)
        (False, ('gamma',))
        >>> spares.lost(1, "beta", now_s=1.0)
        >>> spares.due(now_s=10.0, patience_s=20.0), spares.due(now_s=22.0, patience_s=20.0)
        ([], [])
        >>> spares.ask(b"s", "gamma", now_s=22.5), spares.due(now_s=23.0, patience_s=20.0)
        (False, [(1, 'gamma')])
        >>> spares.ask(b"s", "gamma", now_s=23.5), spares.waiting(now_s=23.5)
        (True, ())
    """

    def __init__(self) -> None:
        self.vacancies: list[Vacancy] = []
        self._has_changed = False
        self._hosts: dict[bytes, _StandbyHost] = {}
        # replicas whose standby host was called by an earlier process, which may have ended before it answered
        self._unanswered: set[int] = set()

    def ask(self, token: bytes, host: str, *, now_s: float) -> bool:
        """Note that a standby host waits; return whether it is to join."""
        for old in [old for old, one in self._hosts.items() if now_s - one.heard_s > HEARD_S]:
            del self._hosts[old]
        spare = self._hosts.get(token)
        if spare is None:
            if len(self._hosts) >= _MAX_HOSTS:
                return False
            spare = self._hosts[token] = _StandbyHost(host=host, heard_s=now_s)
        spare.heard_s = now_s
        if not spare.is_called:  # one that was called before this process began and still asks is called again
            called = [
                one.replica for one in self.vacancies if one.host == spare.host and one.replica in self._unanswered
            ]
            spare.is_called = bool(called)
            self._unanswered -= set(called[:1])
        return spare.is_called

    def waiting(self, *, now_s: float) -> tuple[str, ...]:
        """Return the standby hosts that wait and were not called, the first to come first."""
        return tuple(one.host for one in self._free(now_s))

    def lost(self, replica: int, host: str, *, now_s: float) -> None:
        """Add the vacancy of a lost replica."""
        self._change([*self.vacancies, Vacancy(replica=replica, host=host, since_s=now_s)])

    def joined(self, host: str) -> None:
        """Note that a replica of a host has joined: it fills the oldest vacancy of that host."""
        if found := next((vacancy for vacancy in self.vacancies if vacancy.host == host), None):
            self._change([vacancy for vacancy in self.vacancies if vacancy is not found])

    def call(self, replica: int, *, now_s: float) -> str | None:
        """Call a standby host for a replica's place, and return its name; None where none waits."""
        free = self._free(now_s)
        if not free:
            return None
        free[0].is_called = True
        # if it does not join in time, another one is called
        others = [vacancy for vacancy in self.vacancies if vacancy.replica != replica]
        self._change([*others, Vacancy(replica=replica, host=free[0].host, since_s=now_s, is_called=True)])
        self._unanswered.discard(replica)
        return free[0].host

    def due(self, *, now_s: float, patience_s: float) -> list[tuple[int, str]]:
        """Call standby hosts for the vacancies older than `patience_s`; return the replicas and their new hosts."""
        found = []
        for vacancy in [vacancy for vacancy in self.vacancies if now_s - vacancy.since_s > patience_s]:
            host = self.call(vacancy.replica, now_s=now_s)
            if host is None:
                break
            found.append((vacancy.replica, host))
        return found

    def take_change(self) -> list[list[int | str]] | None:
        """Return the vacancies for the journal, once after they have changed."""
        has_changed, self._has_changed = self._has_changed, False
        return self.to_json() if has_changed else None

    def to_json(self) -> list[list[int | str]]:
        """Return the vacancies as JSON values."""
        return [[vacancy.replica, vacancy.host, int(vacancy.is_called)] for vacancy in self.vacancies]

    def load(self, values: Sequence[Sequence[int | str]], *, now_s: float) -> None:
        """Load the vacancies from the journal; their times begin again, since hosts have to find this process first.

        A called host that asks again has not received the answer, and is called again at once.
        """
        self.vacancies = [
            Vacancy(replica=int(replica), host=str(host), since_s=now_s, is_called=bool(is_called))
            for replica, host, is_called in values
        ][-_MAX_VACANCIES:]
        self._unanswered = {vacancy.replica for vacancy in self.vacancies if vacancy.is_called}

    def _free(self, now_s: float) -> list[_StandbyHost]:
        return [one for one in self._hosts.values() if not one.is_called and now_s - one.heard_s <= HEARD_S]

    def _change(self, vacancies: list[Vacancy]) -> None:
        self.vacancies = vacancies[-_MAX_VACANCIES:]
        self._has_changed = True


# Intervals whose parts are kept for a replica that is behind.
_MAX_INTERVALS_BEHIND = 8
# Intervals that a replica may be ahead of what others have reached: it waits for the results of its rounds.
_MOST_INTERVALS_AHEAD = 2
# A replica that is further behind is removed once it has done no step for so many seconds, as one that is silent, and
# for so many times its usual step. So diagnosis has time to find a process that hangs.
_LEAST_STALL_S, _MAX_STEPS_STALLED = LEAST_SILENCE_S, 4.0
# Tokens of a step that a claimed rate may be of: in the job's batches, since a host may have a batch of its own, and
# where the job names none. Then steps that a replica may have done since its last report.
_MOST_BATCHES, _MOST_TOKENS_A_STEP, _STEPS_UNDER_WAY = 64, 1 << 24, 2
# Parts kept for replicas that may come back are at most this share of the state: beyond it, the state is cheaper.
_MAX_KEPT_SHARE = 0.5
_MAX_FINDINGS = 1000
# Latest replaced replicas and process orders: launchers read them once a second.
_MAX_ORDERS = 64
# Removed replicas in a compacted journal: the latest ones.
_MAX_GONE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Constants of a run."""

    job: Mapping[str, Any]  # what a replica must know to take part: `config` and numbers, as JSON values
    initial_replicas: int  # replicas that begin together
    sync_interval: int  # H, inner steps
    overlap_steps: int  # tau, inner steps
    shard_windows: int  # windows of the data in a lease
    part_share: float = 0.0  # bytes of the parts that a replica sends in an interval, over those of the state
    allows_overdue: bool = False  # whether training goes on where a round's result is overdue
    start_timeout_s: float = 60.0  # wait for initial replicas that are late
    resumed_step: int = 0  # step of the checkpoint that the run resumes from, 0 where it begins from the seed
    is_invite_only: bool = False  # whether other hosts join by invitations alone
    last_step: int = 0  # the run's last inner step, 0 where it has none
    message_s: float = MESSAGE_S  # seconds that messages of replicas may differ in on their way
    suspect_silence_s: float = SUSPECT_SILENCE_S  # a replica silent for so long is not waited for


@dataclass(slots=True, kw_only=True, eq=False)
class CoordinatorState:
    """All that a coordinator knows."""

    config: CoordinatorConfig

    # Rebuilt from the journal after a restart.
    roster: Roster = field(init=False)
    rounds: ElasticRounds = field(init=False)
    leases: DataLeases = field(init=False)
    snapshots: StateSnapshots = field(default_factory=StateSnapshots)
    disputes: PartDisputes = field(init=False)
    used_invitations: UsedInvitations = field(default_factory=UsedInvitations)
    standby_hosts: StandbyHosts = field(default_factory=StandbyHosts)
    has_started: bool = False
    has_finished: bool = False
    failure: str = ""  # why the run has failed for all
    findings: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_FINDINGS))  # the latest last
    corpus: tuple[str, int] | None = None  # identity of the data and its windows, from the first replica
    # by decision: the first step whose state holds it, its round, and the data account before it was counted
    accounts: deque[tuple[int, int, dict[str, Any]]] = field(default_factory=deque)
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)  # by replica, at the end of the run
    first_values: str | None = None  # hash of the values that the run began with, once they are chosen
    era: int = 0  # restarts from a checkpoint after all replicas were lost
    restart: dict[str, Any] | None = None  # the latest journal line about such a restart
    is_from_disk: bool = field(init=False)  # the next state comes from a checkpoint
    resumed_step: int = field(init=False)  # of the checkpoint whose data account the run began with, 0 for none
    member_lines: dict[int, dict[str, Any]] = field(default_factory=dict)  # the latest in the journal, by member

    # Of this process: replicas and users repeat it.
    sites: SiteTable = field(default_factory=SiteTable)
    detours: DetourTable = field(default_factory=DetourTable)
    is_paused: bool = False
    # to launchers: what to do to removed replicas' processes, and for which replicas a standby host was called
    orders: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MAX_ORDERS))
    replaced: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MAX_ORDERS))
    kept_step: int = 0  # parts are kept from it on
    reviver: int | None = None  # the replica that loads the checkpoint after all were lost
    first_s: float | None = None  # when the first replica was ready
    used: dict[int, dict[int, dict[int, int]]] = field(default_factory=dict)  # windows by open round, replica, shard
    leased: dict[int, tuple[int, Lease]] = field(default_factory=dict)  # the latest request's number and its answer
    recorded: dict[int, int] = field(default_factory=dict)  # number of the latest batch of records, by replica
    num_notices: dict[int, int] = field(default_factory=dict)
    noted: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_NOTED))  # what the latest notes were about
    refused: set[tuple[str, str]] = field(default_factory=set)  # hosts of refused replicas, and the reasons
    has_been_left: bool = False  # the last replica left by itself, without a fault
    hosts_with_bad_parts: set[str] = field(default_factory=set)  # their replicas were dropped for bad parts
    finish: dict[str, Any] | None = None  # the last message of the run

    def __post_init__(self) -> None:
        """Make the parts that need the constants of the run."""
        config = self.config
        self.roster = Roster(suspect_silence_s=config.suspect_silence_s)
        self.rounds = ElasticRounds(
            sync_interval=config.sync_interval, overlap_steps=config.overlap_steps,
            allows_overdue=config.allows_overdue,
            last_step=config.last_step or math.inf, message_s=config.message_s,
        )  # fmt: skip
        self.disputes = PartDisputes(self.roster.are_most)
        self.leases = DataLeases(shard_windows=config.shard_windows)
        self.resumed_step = config.resumed_step
        self.is_from_disk = config.resumed_step > 0

    # -- steps

    @property
    def roster_number(self) -> int:
        """A number that changes with the members and with the start."""
        return 2 * self.roster.number + self.has_started

    def furthest_step(self, *, now_s: float | None = None) -> int:
        """Return the furthest step that any replica can be at; without a time, at that of the latest message."""
        now_s = max((member.heard_s for member in self.roster), default=0.0) if now_s is None else now_s
        steps = [min(member.step, self.most_step(member, now_s=now_s)) for member in self.roster]
        return int(max([self.rounds.step, *steps]))

    def most_step(self, member: RosterMember, *, now_s: float) -> float:
        """Return the furthest step that a replica can be at now: a claim beyond it does not count.

        Replicas wait for each other's parts: none is far ahead of all others, nor of the rounds that are decided.
        """
        ahead = _MOST_INTERVALS_AHEAD * self.config.sync_interval + self.config.overlap_steps
        return max(self.roster.most_step(member, now_s=now_s), self.rounds.decided_step) + ahead

    def most_tokens_s(self, member: RosterMember, *, now_s: float) -> float:
        """Return the tokens a second that a replica can have trained, by the steps that it has done here."""
        first_step, first_s = member.first_move or (member.step, member.moved_s)
        steps = min(member.step, self.most_step(member, now_s=now_s)) - first_step + _STEPS_UNDER_WAY
        config = self.config.job.get("config", {})
        batch_size, seq_len = config.get("data", {}).get("batch_size"), config.get("model", {}).get("seq_len")
        most = _MOST_BATCHES * batch_size * seq_len if batch_size and seq_len else _MOST_TOKENS_A_STEP
        return float(max(0.0, steps) / max(1.0, now_s - first_s) * most)

    @property
    def most_steps_behind(self) -> int:
        """Steps that a replica may be behind: parts of older rounds are not kept for it."""
        return _MAX_INTERVALS_BEHIND * self.config.sync_interval

    def steps_behind(self, member: RosterMember) -> int:
        """Return the steps that a replica is behind what others are known to have reached."""
        return max(self.roster.witnessed_step(), self.rounds.decided_step) - member.step

    def stalled(self, *, now_s: float) -> list[RosterMember]:
        """Return the active replicas that stand still and have fallen too far behind to follow the others.

        A slow replica moves at each of its own steps, so its step shows that it works, however far it is behind.
        """
        if any(round_id >= FIRST_LAST_ROUND for round_id in (*self.rounds.open_rounds, *self.rounds.decisions)):
            return []  # at the end of the run there is nothing left to follow
        active = self.roster.in_state(MemberState.ACTIVE)
        return [
            member
            for member in active
            if self.steps_behind(member) > self.most_steps_behind
            and not (member.is_paused or member.is_awaited)
            and now_s - member.moved_s > max(_LEAST_STALL_S, _MAX_STEPS_STALLED * member.step_s)
        ]

    def floor_step(self) -> int:
        """Return a step up to which no replica needs rounds any more, nor states from before it.

        A replica further behind than `_MAX_INTERVALS_BEHIND` intervals, as after a long pause, joins again instead.
        """
        most_behind = self.furthest_step() - self.most_steps_behind
        steps = [max(member.step, most_behind) for member in self.roster.in_state(MemberState.ACTIVE)]
        # the step of the state that they fetch, also where another process of the coordinator offered it
        steps += [member.step for member in self.roster.in_state(MemberState.LOADING) if member.step]
        needed = self.snapshots.needed_step()
        return max(0, min([*steps, *([] if needed is None else [needed])], default=0) - 1)

    def keep_from(self) -> int:
        """Return, and fix, a step from which on parts are kept for replicas that may come back with their own state."""
        share = self.config.part_share * max(1, len(self.roster.active))
        intervals = min(_MAX_INTERVALS_BEHIND, _MAX_KEPT_SHARE / share) if share else _MAX_INTERVALS_BEHIND
        wished = self.furthest_step() - int(intervals * self.config.sync_interval)
        # the floor holds while a replica that comes back still needs them
        self.kept_step = max(self.kept_step, min(wished, self.floor_step()))
        return self.kept_step

    def can_resume(self, held_step: int, *, era: int) -> bool:
        """Return whether a replica can go on from its own state of a step."""
        if not held_step or era != self.era or self.is_from_disk or not self.roster.active:
            return False
        first_step, active = held_step - self.config.sync_interval, self.roster.in_state(MemberState.ACTIVE)
        since = [decision for decision in self.rounds.decisions.values() if decision.launch_step > first_step]
        # an active replica must have the rounds' parts: those that joined later may have none of them
        return self.keep_from() <= held_step <= self.furthest_step() and all(
            any(one.replica in decision.holders or one.begin_step <= decision.launch_step for one in active)
            for decision in since
        )

    # -- data

    def note_for_state(self, step: int | None = None) -> dict[str, Any]:
        """Return the note that goes with a state: the data account as of its step; None counts all decisions."""
        each = self.config.job.get("window_samples") or 0
        data = self.leases.state_dict()
        if step is not None:
            # rounds are decided before they are applied: a state of this step does not hold the later ones
            data = next((before for applied, _, before in self.accounts if applied > step), data)
        return {"tokens": data["counted"] * each, "data": data, "next_replica": self.roster.next_replica}

    def count(self, used: Mapping[str, Mapping[Any, int]], decision: Decision) -> None:
        """Count the data of a decided round, and keep the account before it for states that do not hold the round."""
        is_last = decision.round_id >= FIRST_LAST_ROUND
        applied = decision.launch_step + (0 if is_last else self.config.overlap_steps)
        self.accounts.append((applied, decision.round_id, self.leases.state_dict()))
        oldest = decision.launch_step - (_MAX_INTERVALS_BEHIND + 1) * self.config.sync_interval
        while self.accounts[0][0] < oldest:
            self.accounts.popleft()
        for replica, windows in used.items():
            shards = {int(shard): window for shard, window in windows.items()}
            self.leases.count(int(replica), shards, round_id=decision.round_id)
            if (member := self.roster.get(int(replica))) is not None:
                member.has_counted = True

    def uncount(self, replica: int, *, since: int) -> bool:
        """Undo the counting of a replica's data in rounds from one on; return whether the accounts have changed.

        Accounts for states of the steps since then count none of those rounds: data of other replicas in them may be
        trained again after a resume, and none is left out.
        """
        self.leases.uncount(replica, since=since)
        before = next((data for _, round_id, data in self.accounts if round_id >= since), None)
        if before is None:
            return False
        self.accounts = deque(
            (applied, round_id, before if round_id >= since else data) for applied, round_id, data in self.accounts
        )
        return True

    # -- journal

    def member_line(self, member: RosterMember) -> dict[str, Any]:
        """Return a member's journal line, and keep it for the compacted journal."""
        self.member_lines[member.replica] = {
            **member.describe(), "token": member.token.hex(), "held_step": member.held_step,
            "begin_step": member.begin_step, "disk_step": member.disk_step, "invitation": member.invitation,
            "first_values": member.first_values,
        }  # fmt: skip
        return self.member_lines[member.replica]

    def forget(self, member: RosterMember) -> None:
        """Remove a replica from all parts."""
        replica = member.replica
        self.roster.remove(replica)
        self.rounds.forget(replica)
        self.rounds.drop_empty()
        self.snapshots.forget(replica)
        self.disputes.forget(replica)
        self.leases.release(replica)
        for by_replica in (self.leased, self.notes, self.num_notices, self.member_lines):
            by_replica.pop(replica, None)
        self.sites.forget(replica)
        self.detours.forget(replica)
        self.used = {round_id: used for round_id, used in self.used.items() if round_id in self.rounds.open_rounds}

    def replay(self, lines: list[dict[str, Any]], *, now_s: float) -> None:
        """Rebuild the state from the journal of an earlier process of the coordinator."""
        for line in lines:
            self._replay_line(dict(line), now_s=now_s)
        for member in self.roster.in_state(MemberState.LOADING):
            self.first_s = now_s
            if not member.held_step:
                self.snapshots.waiting.add(member.replica)
        for replica in self.leases.borrowers():  # killed between the lines "gone" and "leases"
            if self.roster.get(replica) is None:
                self.leases.release(replica)

    def _replay_line(self, line: dict[str, Any], *, now_s: float) -> None:
        match line.pop("what"):
            case "decision":
                members, holders, used = tuple(line.pop("members")), tuple(line.pop("holders")), line.pop("used", {})
                decision = Decision(members=members, holders=holders, **line)
                self.rounds.adopt(decision)
                self.count(used, decision)
            case "member":
                self._replay_member(line, now_s=now_s)
            case "gone":
                self.roster.remove(line["replica"])
                self.member_lines.pop(line["replica"], None)
                self.notes.pop(line["replica"], None)
                self.leases.forget_undo(line["replica"])  # the next line about the leases says what it held
            case "vacancies":
                self.standby_hosts.load(line["vacancies"], now_s=now_s)
            case "leases":
                self.leases.load_state_dict(line)
            case "accounts":
                self.accounts = deque((applied, round_id, data) for applied, round_id, data in line["accounts"])
            case "invitation":
                self.used_invitations.used[line["invitation"]] = line["origin"]
            case "undo":
                self.leases.load_undo_state(line["rounds"])
            case what:
                self._replay_run_line(what, line)

    def _replay_run_line(self, what: str, line: Mapping[str, Any]) -> None:
        match what:
            case "numbers":
                self.roster.next_replica = line["next_replica"]
            case "started":
                self.has_started = True
            case "finished":
                self.has_finished = True
            case "failed":
                self.failure = line["why"]
            case "revived":
                self.rounds.restart(line["step"])
                self.accounts.clear()
                self.is_from_disk = not line["is_begun"]
                self.resumed_step = 0 if line["is_begun"] else self.resumed_step
                self.era, self.restart = line["era"], dict(line)
            case "first_values":
                self.first_values = line["first_values"]
            case "corpus":
                self.corpus = line["corpus"], line["windows"]
            case "note":
                self.notes[line["replica"]] = line["note"]
            case "finding":
                self.findings.append(line["text"])

    def _replay_member(self, line: dict[str, Any], *, now_s: float) -> None:
        before = self.roster.get(line["replica"])
        has_counted = line.pop("has_counted", False) or (before is not None and before.has_counted)
        self.member_lines[line["replica"]] = line
        self.roster.put(RosterMember(
            replica=line["replica"], token=bytes.fromhex(line["token"]), host=line["host"], heard_s=now_s,
            address=line["address"], port=line["port"], state=MemberState(line["state"]), step=line["step"],
            is_awaited=True, moved_s=now_s, held_step=line["held_step"], begin_step=line["begin_step"],
            disk_step=line["disk_step"], has_counted=has_counted, first_values=line.get("first_values", ""),
            invitation=line.get("invitation", 0), role=checked_role(line.get("role", ROLES[0])),
        ))  # fmt: skip

    def journal_lines(self) -> list[dict[str, Any]]:
        """Return lines whose replay gives the same state as that of all lines written so far.

        Call it between two messages: within one, lines may have been written whose effect is yet to come.
        """
        lines: list[dict[str, Any]] = [{"what": "numbers", "next_replica": self.roster.next_replica}]
        # post-mortem diagnosis reads from the journal which replicas have gone
        replicas = range(max(0, self.roster.next_replica - _MAX_GONE), self.roster.next_replica)
        lines += [{"what": "gone", "replica": one} for one in replicas if self.roster.get(one) is None]
        if self.restart is not None:  # before the decisions, since it forgets all of them
            lines.append({"what": "revived", **self.restart})
        if self.first_values is not None:
            lines.append({"what": "first_values", "first_values": self.first_values})
        if self.corpus is not None:
            lines.append({"what": "corpus", "corpus": self.corpus[0], "windows": self.corpus[1]})
        lines += [{"what": "started"}] if self.has_started else []
        used = self.used_invitations.used.items()
        lines += [{"what": "invitation", "invitation": number, "origin": origin} for number, origin in used]
        for member in self.roster:
            if member.replica in self.member_lines:
                own = self.member_lines[member.replica]
                lines.append({"what": "member", **own, "has_counted": member.has_counted})
            if member.replica in self.notes:
                lines.append({"what": "note", "replica": member.replica, "note": self.notes[member.replica]})
        lines.append({"what": "vacancies", "vacancies": self.standby_hosts.to_json()})
        # the leases hold already what the decisions counted
        lines.append({"what": "leases", **self.leases.state_dict()})
        lines.append({"what": "undo", "rounds": self.leases.undo_state()})
        lines += [{"what": "decision", **asdict(decision)} for decision in self.rounds.decisions.values()]
        # after the decisions, each of which appends one: the data account before it was counted
        lines.append({"what": "accounts", "accounts": [list(account) for account in self.accounts]})
        lines += [{"what": "finding", "text": text} for text in self.findings]
        lines += [{"what": "failed", "why": self.failure}] if self.failure else []
        lines += [{"what": "finished"}] if self.has_finished else []
        return lines
