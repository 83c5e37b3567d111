"""All orders in which replicas may come, train, and go: the real coordinator and sessions through a whole small run.

Beside `model`, which looks closely at single rounds: here a run has a beginning and an end, steps, leases of data,
and states that are shown, fetched, kept and read again, and processes that come back. Parts of a round come at once
where one has them. Messages of one connection keep their order unless a fault changes it, those of different ones do
not.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from life_parts import Means, Person
from lives import INTERVAL, OVERLAP, SHARD, Life
from model import LIMIT_S, Crash, Event

from thinwire.adaptive_timeout import AdaptiveTimeout
from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_state import CoordinatorConfig
from thinwire.elastic.protocol import VERSION, decode, encode
from thinwire.elastic.roster import MemberState
from thinwire.errors import PayloadError
from thinwire.events import FIRST_LAST_ROUND
from thinwire.version import __version__

# What passes in each: words are said again and late ones no longer waited for; votes are no longer waited for; the dead
# are noticed and parts no longer sought.
TIMES = {"short": 2.5, "medium": 12.0, "long": 65.0}


class Town:
    """One state.

    Args:
        founders: So many begin together.
        comers: So many come later.
        last_step: Where the run ends.
        faults: So many things may go wrong.
        kinds: Of these kinds.
        lives: So often a process joins.
        part_share: See `Coordinator`; where it is large, parts are let go of soon.
    """

    plain = ("up", "down", "go", "come", "time")
    work = ("up", "down", "go", "come", "resume")

    def __init__(
        self, *, founders: int = 2, comers: int = 1, last_step: int = 6, faults: int = 0, kinds: tuple[str, ...] = (),
        lives: int = 2, part_share: float = 0.25, every: int = 2, is_begun: bool = True,
    ) -> None:  # fmt: skip
        self.now_s = 0.0
        self.last_step, self.every, self.faults, self.kinds, self.most_lives = last_step, every, faults, kinds, lives
        self.up: dict[bytes, list[bytes]] = {}
        self.down: dict[bytes, list[bytes]] = {}
        self.journal: list[str] = []
        self.crash_after = -1
        self.planned, self._part_share = founders, part_share
        self.states: dict[str, tuple[int, Means]] = {}
        self.given: dict[int, bytes] = {}
        self.truth: dict[int, tuple[tuple[int, int], ...]] = {}
        self.snaps: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        self.meant: dict[tuple[int, int], tuple[int, int]] = {}  # by life and shard, which windows are in a mean
        self.lives: dict[bytes, Life] = {}
        self.told_progress: dict[bytes, bytes] = {}
        self.coordinator = self._coordinator()
        self.people = [Person(name=chr(97 + number)) for number in range(founders + comers)]
        for person in self.people[:founders]:
            self.come(person)
        if is_begun:
            self._settle()

    # -- wires

    def now(self) -> float:
        return self.now_s

    def say(self, life: Life, kind: str, **fields: Any) -> None:
        raw = encode(kind, **fields)
        if raw not in self.up[life.token]:
            self.up[life.token].append(raw)

    def send(self, token: bytes, kind: str, fields: dict[str, Any]) -> None:
        raw = encode(kind, **fields)
        if kind == "welcome":
            assert self.given.setdefault(fields["replica"], token) == token, "a number was given twice"
        if kind == "progress":
            if self.told_progress.get(token) == raw:
                return
            self.told_progress[token] = raw
        life = self.lives.get(token)
        if life is not None and life.is_here and self.down[token][-1:] != [raw]:
            self.down[token].append(raw)

    def record(self, what: str, fields: dict[str, Any]) -> None:
        self.journal.append(json.dumps({"what": what, **fields}))
        if what == "decision":
            self._decided(fields["round_id"], fields["members"], fields["holders"])
            self._is_meant(fields["round_id"], fields["used"])
        if what == "revived":
            self.truth.clear()
        if self.crash_after >= 0:
            self.crash_after -= 1
            if self.crash_after < 0:
                raise Crash

    def _decided(self, round_id: int, members: tuple[int, ...], holders: tuple[int, ...]) -> None:
        assert round_id not in self.truth, "a round was decided twice"
        assert members and holders
        for holder in holders:
            held = self.lives[self.given[holder]].blobs
            assert all((round_id, one) in held for one in members), f"replica {holder} holds less than was decided"
            self.truth[round_id] = tuple((one, held[round_id, one]) for one in members)

    def _is_meant(self, round_id: int, used: dict[str, Any]) -> None:
        """Note what is in a mean, of those whose launch was heard: of others nobody knows what their parts hold."""
        for one in map(int, used):
            for shard, windows in self.snaps[round_id, one].items():
                self.meant[one, shard] = windows

    def _coordinator(self) -> Coordinator:
        made = Coordinator(
            CoordinatorConfig(
                job={"thinwire": __version__}, initial_replicas=self.planned, sync_interval=INTERVAL,
                overlap_steps=OVERLAP, shard_windows=SHARD, part_share=self._part_share,
            ),
            send=self.send, record=self.record, generation="g", clock=self.now,
        )  # fmt: skip
        made.state.rounds._spreads = AdaptiveTimeout(least_s=LIMIT_S, most_s=LIMIT_S)
        return made

    def life_of(self, number: int) -> Life | None:
        return self.lives[self.given[number]] if number in self.given else None

    def launched(self, life: Life, round_id: int) -> None:
        self.snaps[round_id, life.number] = {shard: (life.starts[shard], used) for shard, used in life.used.items()}

    def gives_up(self, life: Life, round_id: int, member: int) -> None:
        forgot = [one.number for one in self.lives.values() if one.is_here and (round_id, member) in one.let_go]
        assert not forgot, f"replica {life.number} needs round {round_id}, which {forgot} let go of"

    def come(self, person: Person) -> None:
        token = f"{person.name}{person.lives}".encode()
        person.lives += 1
        self.up[token], self.down[token] = [], []
        life = self.lives[token] = Life(self, person, token)
        self._ask_to_join(life)

    def _ask_to_join(self, life: Life) -> None:
        self.say(life, "join", version=VERSION, thinwire=__version__, host=life.person.name)

    def _settle(self) -> None:
        """Let all words arrive, and states be taken in, until those that begin train."""
        while not self.is_quiet() or any(life.phase == "loading" for life in self.lives.values()):
            todo = [event for event in self.events() if event[0] in ("up", "down", "go")]
            self.do(next(one for one in todo if one[0] != "go" or self.lives[one[1]].phase == "loading"))

    def arrive(self, token: bytes) -> None:
        raw = self.up[token].pop(0)
        with contextlib.suppress(PayloadError):  # as at the coordinator's port
            self.coordinator.handle(token, decode(raw, to_member=False), now_s=self.now_s)

    def hear(self, token: bytes) -> None:
        raw = self.down[token].pop(0)
        with contextlib.suppress(PayloadError):
            self.lives[token].hear(decode(raw, to_member=True))

    # -- what may happen

    def events(self) -> Iterator[Event]:
        for token, life in self.lives.items():
            if self.up[token]:
                yield "up", token
            if life.is_here and self.down[token]:
                yield "down", token
            if life.can_go():
                yield "go", token
        here = {life.person.name for life in self.lives.values() if life.is_here}
        for number, person in enumerate(self.people):
            if person.name not in here and not person.has_left and person.lives < self.most_lives:
                yield "come", number
        if self.is_quiet():
            yield from (("time", name) for name in TIMES)
            if any(member.is_paused for member in self.coordinator.state.roster) or self._rests():
                yield "resume", ""
        if self.faults:
            yield from self._faults()

    def _rests(self) -> bool:
        return any(life.is_here and life.has_session and life.session.view.is_paused for life in self.lives.values())

    def is_quiet(self) -> bool:
        """Tell whether nothing is on its way: then time passes, and else only as a fault, since wires are quick."""
        return not any(self.up.values()) and not any(life.is_here and self.down[t] for t, life in self.lives.items())

    def _faults(self) -> Iterator[Event]:
        here = [token for token, life in self.lives.items() if life.is_here]
        for kind in self.kinds:
            match kind:
                case "die":
                    yield from (("die", token) for token in here)
                case "lose" | "spoil" | "twice" | "swap":
                    least = 2 if kind == "swap" else 1
                    yield from ((kind, "up", token) for token, words in self.up.items() if len(words) >= least)
                    yield from ((kind, "down", token) for token in here if len(self.down[token]) >= least)
                case "crash":
                    yield from (("crash", is_heard) for is_heard in (True, False))
                    yield from (("crash in", t, after) for t, words in self.up.items() if words for after in range(3))
                case "hurry":
                    yield from (("hurry", name) for name in TIMES if not self.is_quiet())
                case "pause" | "leave":
                    yield from ((kind, str(life.number)) for life in self.lives.values() if life.phase == "training")

    def do(self, event: Event) -> None:
        match event:
            case ("up", token):
                self.arrive(token)
            case ("down", token):
                self.hear(token)
            case ("go", token):
                self.lives[token].go()
            case ("come", number):
                self.come(self.people[number])
            case ("time", name):
                self._pass(TIMES[name])
            case ("resume", target):
                self._command("resume", target)
            case _:
                self.faults -= 1
                self._break(event)
        self._follow()

    def _follow(self) -> None:
        for life in [*self.lives.values()] * 2:
            life.move()
        for life in self.lives.values():
            if not life.is_here:
                self.down[life.token].clear()

    def _break(self, event: Event) -> None:
        match event:
            case ("die", token):
                self.lives[token].is_alive = False
            case ("lose", way, token):
                getattr(self, way)[token].pop(0)
            case ("spoil", way, token):
                words = getattr(self, way)[token]
                words[0] = words[0][: len(words[0]) // 2] + b"\x00" + words[0][len(words[0]) // 2 :]
                (self.arrive if way == "up" else self.hear)(token)
            case ("twice", way, token):
                words = getattr(self, way)[token]
                words.append(words[0])
            case ("swap", way, token):
                words = getattr(self, way)[token]
                words[:2] = words[1::-1]
            case ("hurry", name):
                self._pass(TIMES[name])
            case ("crash", is_heard):
                self._restart(is_heard=is_heard)
            case ("crash in", token, after):
                self.crash_after = after
                with contextlib.suppress(Crash):
                    self.arrive(token)
                self.crash_after = -1
                self._restart(is_heard=True)
            case (verb, target):
                self._command(verb, target)

    def _command(self, verb: str, target: str) -> None:
        message = decode(encode("command", verb=verb, target=target), to_member=False)
        self.coordinator.handle(b"person", message, now_s=self.now_s)

    def _restart(self, *, is_heard: bool) -> None:
        for token in self.up:
            self.up[token].clear()
            if not is_heard:
                self.down[token].clear()
        self.told_progress.clear()
        self.coordinator = self._coordinator()
        self.coordinator.replay([json.loads(line) for line in self.journal], now_s=self.now_s)

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        for token, life in self.lives.items():
            member = self.coordinator.state.roster.by_token(token)
            if not life.is_here:
                continue
            if member is not None:
                self.coordinator.state.roster.hear(member, now_s=self.now_s, is_beat=False)
            if not life.has_session:
                self._ask_to_join(life)
                continue
            is_news = member is None or member.step < life.session.step or not member.step_s
            if not is_news and life.session.view.roster_number == self.coordinator.state.roster_number:
                life.session._next_beat_s = self.now_s + 1.0  # the beat would change nothing
            life.session.view.heard_s = self.now_s  # of each tick's words only those are modelled that say something
            life.session.tick()
        self.coordinator.tick(self.now_s)

    # -- what must hold

    def check(self) -> None:
        self._check_states()
        self._check_data()

    def _check_states(self) -> None:
        active = [self.lives[m.token] for m in self.coordinator.state.roster if m.state is MemberState.ACTIVE]
        training = [life for life in active if life.is_here and life.phase in ("training", "last", "done")]
        longest = max((life.means for life in training), key=len, default=())
        for life in training:
            assert life.means == longest[: len(life.means)], f"replica {life.number} has another past than others"
            last = life.means[-1][0] if life.means else -1
            if last < FIRST_LAST_ROUND:
                assert last == len(life.means) - 1, f"replica {life.number} left a round out"
                assert (last + 1) * INTERVAL <= life.step < (last + 3) * INTERVAL + OVERLAP
            for round_id, mean in life.means:
                assert self.truth.get(round_id, mean) == mean, f"replica {life.number} applied another mean"

    def _check_data(self) -> None:
        """No window is lost: what counts as trained on is in a mean, and the rest is somebody's, or will be."""
        roster = self.coordinator.state.roster
        state = self.coordinator.state.leases.state_dict()
        counted = dict.fromkeys(map(str, range(state["next"])), SHARD) | state["returned"]
        for number, leases in state["leases"].items():
            assert roster.get(int(number)) is not None, f"data is lost with replica {number}, which is gone"
            counted |= {str(lease["shard"]): lease["counted"] for lease in leases}
        times = Counter[tuple[int, int]]()
        for (_, shard), (start, stop) in self.meant.items():
            times.update((shard, window) for window in range(start, stop))
        for shard, stop in counted.items():
            lost = [window for window in range(stop) if not times[int(shard), window]]
            assert not lost, f"windows {lost} of shard {shard} are counted, and in no mean"
        twice = [place for place, number in times.items() if number > 1]
        assert len(twice) <= state["repeated"], f"windows {twice} are in two means, unsaid"

    def is_over(self) -> bool:
        """Tell whether the run has come to its end for all that are there, and nobody would come any more."""
        return not any(life.is_here for life in self.lives.values()) and not any(
            person.lives < self.most_lives and not person.has_left for person in self.people
        )

    def key(self) -> bytes:
        """Return what tells states apart; of times, whether they are over."""
        state, now_s = self.coordinator.state, self.now_s
        rounds = [
            (
                number, sorted(one.launched), one.called, sorted((n, sorted(v.has)) for n, v in one.votes.items()),
                now_s > one.first_s + 2.3, bool(one.votes) and now_s >= one.first_vote_s + state.rounds.vote_s,
            )
            for number, one in sorted(state.rounds.open_rounds.items())
        ]  # fmt: skip
        members = [(m.describe(), m.is_awaited, m.held_step, now_s - m.heard_s > 3.0) for m in state.roster]
        cuts = [
            (c.step, sorted(c.holders), sorted(c.joiners), sorted(c.missed), c.asked) for c in state.snapshots.wanted()
        ]
        there = [self._key_of(life) for life in self.lives.values()]
        found = (
            rounds, sorted(self.truth), sorted(state.rounds.late), members, cuts, sorted(state.snapshots.waiting),
            there, state.leases.state_dict(), sorted(self.up.items()), sorted(self.down.items()), self.faults,
            state.reviver, state.is_from_disk, state.era, sorted(state.notes), state.has_finished, state.kept_step,
        )  # fmt: skip
        return repr(found).encode()

    def _key_of(self, life: Life) -> tuple[Any, ...]:
        person = life.person
        found = life.token, life.phase, life.is_alive, life.step, life.means, person.held, person.disk, person.lives
        if not life.has_session:
            return found
        view = life.session.view
        flights = [
            (n, one.machine.has, one.machine.has_voted, sorted(one.asked)) for n, one in sorted(life.flights.items())
        ]
        return (
            *found, life.offer, flights, sorted(life.blobs), sorted(life.shown), life.used, life.lease,
            sorted(view.calls.items()), sorted(view.decisions), view.step, view.floor_step, view.kept_step,
            sorted(view.captures), view.offers, view.leases, view.is_paused, view.leave_why, view.roster_number,
            sorted(life.session._unanswered),
        )  # fmt: skip
