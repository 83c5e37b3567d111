"""All orders in which a few replicas and their coordinator may act: a breadth-first search over the real machines.

What runs here is `Coordinator`, `CoordinatorSession` and `RoundStateMachine` as they are in a run; only wires, blobs,
clocks and locks are modelled. A state is all of these; an event takes one step: a message arrives, a blob arrives, a
replica launches, time passes, something breaks. Messages of one connection keep their order, those of different ones do
not.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from thinwire.adaptive_timeout import AdaptiveTimeout
from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.coordinator_state import CoordinatorConfig
from thinwire.elastic.protocol import VERSION, decode, encode
from thinwire.elastic.round_driver import CastVote, GiveUp, RequestPart, RoundInputs, RoundStateMachine
from thinwire.elastic.rounds import Decision
from thinwire.version import __version__

Event = tuple[Any, ...]
# What passes in each: words are said again and late ones no longer waited for; votes and parts no longer waited for;
# the dead are noticed and parts no longer sought.
TIMES = {"short": 2.5, "medium": 12.0, "long": 500.0}
LIMIT_S = 10.0
# What happens where nothing breaks.
PLAIN = ("up", "down", "launch", "pull", "time")
# What says nothing about who takes part in what.
_BACKGROUND = ("progress", "pace", "finish")


class NoLock:
    """In the place of a condition where there is one thread."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def notify_all(self) -> None: ...


class Crash(Exception):
    """The coordinator is killed in the middle of its work."""


@dataclass
class Replica:
    """What one replica has."""

    number: int
    session: CoordinatorSession
    is_alive: bool = True
    is_gone: bool = False  # was let go, or left
    machines: dict[int, RoundStateMachine] = field(default_factory=dict)
    sources: set[tuple[int, int, int]] = field(default_factory=set)
    blobs: set[tuple[int, int]] = field(default_factory=set)
    applied: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def is_here(self) -> bool:
        return self.is_alive and not self.is_gone


class World:
    """One state."""

    plain, work = PLAIN, ("up", "down", "launch", "pull")

    def __init__(self, *, replicas: int = 3, rounds: int = 1, faults: int = 0, kinds: tuple[str, ...] = ()) -> None:
        self.now_s = 0.0
        self.rounds, self.faults, self.kinds = rounds, faults, kinds
        self.up: dict[int, list[bytes]] = {n: [] for n in range(replicas)}
        self.down: dict[int, list[bytes]] = {n: [] for n in range(replicas)}
        self.journal: list[dict[str, Any]] = []
        self.decided: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.crash_after = -1
        self.cut: set[frozenset[int]] = set()
        self.planned = replicas
        self.coordinator = self._coordinator()
        self.replicas: dict[int, Replica] = {}
        for number in range(replicas):
            self._move_in(number)
        self._settle_in()

    # -- wires

    def now(self) -> float:
        return self.now_s

    def send(self, token: bytes, kind: str, fields: dict[str, Any]) -> None:
        number = int(token)
        raw = encode(kind, **fields)
        is_there = number not in self.replicas or self.replicas[number].is_here
        if kind not in _BACKGROUND and is_there and self.down[number][-1:] != [raw]:
            self.down[number].append(raw)

    def record(self, what: str, fields: dict[str, Any]) -> None:
        self.journal.append({"what": what, **fields})
        if what == "decision":
            assert fields["round_id"] not in self.decided, "a round was decided twice"
            self.decided[fields["round_id"]] = tuple(fields["members"]), tuple(fields["holders"])
        if self.crash_after >= 0:
            self.crash_after -= 1
            if self.crash_after < 0:
                raise Crash

    def _coordinator(self) -> Coordinator:
        made = Coordinator(
            CoordinatorConfig(
                job={"thinwire": __version__}, initial_replicas=self.planned, sync_interval=10, overlap_steps=1,
                shard_windows=8,
            ),
            send=self.send, record=self.record, generation="g",
        )  # fmt: skip
        made.state.rounds._spreads = AdaptiveTimeout(least_s=LIMIT_S, most_s=LIMIT_S)
        return made

    def _move_in(self, number: int) -> None:
        def say(kind: str, **fields: Any) -> None:
            self._arrive(number, encode(kind, **fields))

        say("join", version=VERSION, thinwire=__version__, host=str(number))
        session = CoordinatorSession(
            replica=number, interval_steps=10, send=Mouth(self, number), now=self.now, on_roster=meet
        )
        session.changed = NoLock()  # type: ignore[assignment]
        session.transfer_timeout = AdaptiveTimeout(least_s=LIMIT_S, most_s=LIMIT_S)
        session._next_beat_s = float("inf")
        self.replicas[number] = Replica(number=number, session=session)
        say("here", address="127.0.0.1", port=1, corpus="c", windows=1, held=0, era=0, disk=0)

    def _settle_in(self) -> None:
        for number in self.replicas:
            self._arrive(number, encode("active", step=0))
            self._arrive(number, encode("beat", step=0, step_s=0.01, roster=0))
        for number in self.replicas:
            while self.down[number]:
                self._hear(number)

    def _arrive(self, number: int, raw: bytes) -> None:
        self.coordinator.handle(b"%d" % number, decode(raw, to_member=False), now_s=self.now_s)

    def _hear(self, number: int) -> None:
        replica = self.replicas[number]
        replica.session.receive(decode(self.down[number].pop(0), to_member=True))
        if replica.session.view.expelled_why:
            self._go(replica)

    # -- what may happen

    def events(self) -> Iterator[Event]:
        for number, replica in self.replicas.items():
            if self.up[number]:
                yield "up", number
            if replica.is_here:
                yield from self._events_of(replica)
        if self.is_quiet():
            yield from (("time", name) for name in TIMES)
        elif self.faults and "hurry" in self.kinds:
            yield from (("hurry", name) for name in TIMES)
        if self.faults:
            yield from self._faults()

    def _events_of(self, replica: Replica) -> Iterator[Event]:
        if self.down[replica.number]:
            yield "down", replica.number
        if len(replica.machines) < self.rounds and len(replica.applied) == len(replica.machines):
            yield "launch", replica.number
        for round_id, member, source in sorted(replica.sources):
            if self._is_served(replica, round_id, member, source) is not None:
                yield "pull", replica.number, round_id, member, source

    def is_quiet(self) -> bool:
        """Tell whether nothing is on its way: then time passes, and else only as a fault, since wires are quick."""
        return not any(self.up.values()) and not any(one.is_here and self.down[n] for n, one in self.replicas.items())

    def _faults(self) -> Iterator[Event]:
        here = [replica.number for replica in self.replicas.values() if replica.is_here]
        if "die" in self.kinds and len(here) > 1:
            yield from (("die", number) for number in here)
        if "lose" in self.kinds:
            yield from (("lose", number) for number in here if self.up[number] or self.down[number])
        if "cut" in self.kinds:
            yield from (("cut", one, other) for one in here for other in here if one < other)
        if "crash" in self.kinds:
            yield "crash", True
            yield "crash", False
            for number, words in self.up.items():
                if words:
                    yield "crash in", number, 0

    def do(self, event: Event) -> None:
        match event:
            case ("up", number):
                self._arrive(number, self.up[number].pop(0))
            case ("down", number):
                self._hear(number)
            case ("launch", number):
                self._launch(self.replicas[number])
            case ("pull", number, round_id, member, source):
                self._pull(self.replicas[number], round_id, member, source)
            case ("time", name):
                self._pass(TIMES[name])
            case _:
                self.faults -= 1
                self._break(event)
        for replica in self.replicas.values():
            self._move(replica)

    def _break(self, event: Event) -> None:
        match event:
            case ("die", number):
                self.replicas[number].is_alive = False
                self.down[number].clear()
            case ("lose", number):
                self.up[number].clear()
                self.down[number].clear()
            case ("hurry", name):
                self._pass(TIMES[name])
            case ("cut", one, other):
                self.cut.add(frozenset({one, other}))
            case ("crash", is_heard):
                self._restart(is_heard=is_heard)
            case ("crash in", number, after):
                self.crash_after = after
                with contextlib.suppress(Crash):
                    self._arrive(number, self.up[number].pop(0))
                self.crash_after = -1
                self._restart(is_heard=True)

    def _restart(self, *, is_heard: bool) -> None:
        for number in self.up:
            self.up[number].clear()
            if not is_heard:
                self.down[number].clear()
        self.coordinator = self._coordinator()
        self.coordinator.replay(self.journal, now_s=self.now_s)
        for replica in self.replicas.values():
            if replica.is_here:
                self._beat(replica)

    def _beat(self, replica: Replica) -> None:
        member = self.coordinator.state.roster.by_token(b"%d" % replica.number)
        if member is not None:
            member.heard_s, member.step_s = self.now_s, 0.01
        else:
            self.send(b"%d" % replica.number, "unknown", {"generation": "g"})

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        for replica in self.replicas.values():
            if replica.is_here:
                self._beat(replica)
                replica.session.tick()
        self.coordinator.tick(self.now_s)

    def _launch(self, replica: Replica) -> None:
        round_id = len(replica.machines)
        is_offered = round_id not in replica.session.view.decisions
        replica.machines[round_id] = RoundStateMachine(replica=replica.number, has_part=is_offered)
        if is_offered:
            replica.blobs.add((round_id, replica.number))
            replica.session.reach(10 * (round_id + 1))
            replica.session.launch(round_id, launch_step=10 * (round_id + 1))

    def _is_served(self, replica: Replica, round_id: int, member: int, asked: int) -> bool | None:
        """Tell whether an ask ends with a part, or in vain; None for not yet."""
        source = self.replicas[asked]
        if not source.is_here or frozenset({replica.number, source.number}) in self.cut:
            return False
        return True if (round_id, member) in source.blobs else None

    def _pull(self, replica: Replica, round_id: int, member: int, source: int) -> None:
        if self._is_served(replica, round_id, member, source):
            replica.blobs.add((round_id, member))
            replica.machines[round_id].on_part(member)
            replica.sources = {one for one in replica.sources if one[:2] != (round_id, member)}
        else:
            replica.machines[round_id].on_failure(member, now_s=self.now_s, source=source)
            replica.sources.remove((round_id, member, source))

    def _move(self, replica: Replica) -> None:
        """Do what `RoundDriver.wait` does in a turn."""
        round_id = len(replica.machines) - 1
        if not replica.is_here or round_id < 0 or round_id in replica.applied:
            return
        machine, session = replica.machines[round_id], replica.session
        view = session.view
        decision = view.decisions.get(round_id)
        if decision is not None:
            session.settle(round_id)
        seen = RoundInputs(
            called=view.calls.get(round_id), decision=decision, active=session.active(),
            neighbours=tuple(view.neighbours), limit_s=session.transfer_timeout.limit_s,
        )  # fmt: skip
        for action in machine.advance(seen, now_s=self.now_s):
            match action:
                case RequestPart(source=source, member=member):
                    replica.sources.add((round_id, member, source))
                case CastVote(has=has):
                    session.vote(round_id, has=has, reference_hash=0)
                case GiveUp():
                    session.send("stuck", round=round_id, why="nobody gives it")
                    self._go(replica)
                    return
        if decision is not None and not machine.num_lacking(decision):
            self._apply(replica, round_id, decision)

    def _apply(self, replica: Replica, round_id: int, decision: Decision) -> None:
        replica.applied[round_id] = decision.members
        replica.sources = {one for one in replica.sources if one[0] != round_id}

    def _go(self, replica: Replica) -> None:
        replica.is_gone = True
        replica.sources.clear()
        self.down[replica.number].clear()

    # -- what must hold

    def check(self) -> None:
        decisions = self.decided
        for replica in self.replicas.values():
            for round_id, members in replica.applied.items():
                assert members == decisions[round_id][0], f"replica {replica.number} applied another mean"
                needed = {(round_id, member) for member in members}
                assert needed <= replica.blobs, f"replica {replica.number} applied parts that it lacks"
        for round_id, (members, holders) in decisions.items():
            assert members and holders
            for holder in holders:
                held = {member for found, member in self.replicas[holder].blobs if found == round_id}
                assert held.issuperset(members), f"replica {holder} holds no more than {held}"

    def is_over(self) -> bool:
        """Tell whether all that are here have applied all rounds."""
        return all(len(one.applied) == self.rounds for one in self.replicas.values() if one.is_here)

    def key(self) -> bytes:
        """Return what tells states apart; of times, whether they are over."""
        now_s, book = self.now_s, self.coordinator.state.rounds
        rounds = [
            (
                number, sorted(one.launched), one.called, one.launch_step,
                sorted((n, sorted(v.has)) for n, v in one.votes.items()),
                now_s > one.first_s + book.grace_s(step_s=0.01),
                bool(one.votes) and now_s >= one.first_vote_s + book.vote_s,
            )
            for number, one in sorted(book.open_rounds.items())
        ]  # fmt: skip
        members = [(m.replica, str(m.state), m.is_suspect) for m in self.coordinator.state.roster]
        there = [self._key_of(replica) for replica in self.replicas.values()]
        state = (
            rounds, sorted(self.decided.items()), sorted(book.late), members, there, self.faults,
            sorted(map(sorted, self.cut)), list(self.up.values()), list(self.down.values()),
        )  # fmt: skip
        return repr(state).encode()

    def _key_of(self, replica: Replica) -> tuple[Any, ...]:
        view, now_s = replica.session.view, self.now_s
        machines = [
            (
                machine.has,
                sorted(
                    (n, tuple(at), now_s >= max(at.values()) + LIMIT_S * 2 ** (len(at) - 1))
                    for n, at in machine._asked.items()
                ),
                sorted((n, now_s > at + 0.2) for n, at in machine._failed.items()), machine.has_voted,
                machine.called_s is not None and now_s > machine.called_s + LIMIT_S,
                machine._num_parts, machine._num_parts >= 0 and now_s > machine._until_s,
                sorted((n, turn % 6) for n, turn in machine._turns.items()),
            )
            for machine in replica.machines.values()
        ]  # fmt: skip
        active = sorted((one.replica, one.is_active) for one in view.neighbours.values())
        return (
            replica.is_alive, replica.is_gone, machines, sorted(replica.sources), sorted(replica.blobs),
            sorted(replica.applied.items()), sorted(view.calls.items()), sorted(view.decisions), active,
            sorted(replica.session._unanswered),
        )  # fmt: skip


def meet(neighbours: object) -> None:
    """Connect to nobody: whoever is there is reached."""


class Mouth:
    """What a session says goes into its connection; what stands there already is not said again."""

    def __init__(self, world: World, number: int) -> None:
        self._world, self._number = world, number

    def __call__(self, kind: str, **fields: Any) -> None:
        raw = encode(kind, **fields)
        if raw not in self._world.up[self._number]:
            self._world.up[self._number].append(raw)
