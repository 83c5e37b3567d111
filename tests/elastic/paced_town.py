"""Replicas of different speeds in virtual time: the real coordinator, sessions, own paces and the engine's own order.

What is modelled are inner steps, wires and parts: a step, a word and a part take the times that are given. Each replica
is a thread, of which one at a time runs, so a run is the same every time.
"""

import random
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from thinwire.elastic.adaptive_local_steps import AdaptiveLocalSteps
from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.coordinator_state import CoordinatorConfig
from thinwire.elastic.engine_driver import ElasticDriver
from thinwire.elastic.protocol import VERSION, decode, encode
from thinwire.elastic.rounds import grace_steps
from thinwire.simulate.virtual_clock import VirtualClock
from thinwire.sync.in_flight import EngineState, SyncStatistics, UncountedWork
from thinwire.sync.round_engine import RoundEngine
from thinwire.sync.schedule import Round, Schedule
from thinwire.training.elastic.stay import StepThroughput
from thinwire.version import __version__

WORD_S, PART_S = 0.005, 0.02


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run is.

    Attributes:
        schedule: Of the method.
        num_fragments: Of the model.
        overlap_steps: tau.
        step_s: Each replica's time of a step.
        num_steps: Where it ends.
        jitter: Standard deviation of a step's time, as a share of it.
        has_own_pace: Whether slow replicas aim ahead.
        allows_overdue: Whether training goes on where a result is overdue.
        cut: Replicas that the coordinator does not reach, and from when until when, seconds; messages come late.
    """

    schedule: Schedule
    num_fragments: int
    overlap_steps: int
    step_s: tuple[float, ...]
    num_steps: int
    jitter: float = 0.0
    has_own_pace: bool = True
    allows_overdue: bool | None = None
    cut: tuple[tuple[int, ...], float, float] = ((), 0.0, 0.0)

    @property
    def tolerates_overdue(self) -> bool:
        return self.overlap_steps > 0 if self.allows_overdue is None else self.allows_overdue


class _Flight:
    """A round at one replica."""

    def __init__(self, round: Round, runner: "Runner") -> None:
        self.round = round
        self._runner = runner
        self.voted = False

    def poll(self, step: int = 0) -> bool:
        return self.round.id in self._runner.session.view.decisions


def advanced(engine: RoundEngine, step: int, *, stop: int) -> int:
    """Do what is due at a step, as the step driver does; return the step that the engine is at."""
    due = engine.advancing(step, stop=stop)
    while True:
        try:
            launch_or_apply = next(due)
        except StopIteration as end:
            return int(end.value)
        launch_or_apply()


class PacedEngine(RoundEngine):
    """The engine's order of launches, leaps and results; the rounds themselves are words only."""

    def __init__(self, runner: "Runner", setting: Setting, driver: ElasticDriver) -> None:
        self.runner = runner
        self.method = cast(Any, SimpleNamespace(schedule=setting.schedule))
        self._where = {"num_fragments": setting.num_fragments, "replica": 0}
        self.statistics = SyncStatistics()
        self.state = EngineState(work=UncountedWork(num_fragments=setting.num_fragments))
        self.catch_up = driver
        self.update = None
        self.offered: dict[int, int] = {}
        driver.bind(self)

    @property
    def trained(self) -> int:
        return self.state.work.num_steps

    def launch(self, round: Round, **rest: Any) -> None:
        self.state.in_flight[round.id] = cast(Any, _Flight(round, self.runner))
        self.state.work.launch(round)
        self.offered[round.id] = self.trained
        if round.id not in self.runner.session.view.decisions:
            self.runner.session.launch(round.id, launch_step=round.launch_step)
            self.runner.gather()

    def apply(self, round: Round, **rest: Any) -> None:
        self.runner.wait_until(self.state.in_flight[round.id].poll)
        del self.state.in_flight[round.id]
        self.runner.session.settle(round.id)
        decision = self.runner.session.view.decisions[round.id]
        is_counted = self.runner.replica in decision.members
        self.state.work.settle(round, is_counted=is_counted)
        if is_counted:
            self.runner.parts[round.id] = self.offered[round.id]


class Runner:
    """One replica."""

    def __init__(self, town: "PacedTown", replica: int, setting: Setting) -> None:
        self.town, self.replica, self.setting = town, replica, setting
        self.parts: dict[int, int] = {}
        self.ended_s = self.waited_s = 0.0
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._waits_for: Callable[[], bool] | None = None
        self.session = CoordinatorSession(
            replica=replica, interval_steps=setting.schedule.sync_interval, send=self._say, now=lambda: town.clock.now_s
        )
        self.own = StepThroughput(
            self.session, interval_steps=setting.schedule.sync_interval, now=lambda: town.clock.now_s
        )
        self.engine = PacedEngine(self, setting, self._driver())
        self._chance = random.Random(replica)
        self.has_ended = False
        self.thread = threading.Thread(target=self._live, daemon=True)

    def _driver(self) -> ElasticDriver:
        setting, session, town = self.setting, self.session, self.town
        interval_steps, overlap_steps = setting.schedule.sync_interval, setting.overlap_steps
        own_pace = partial(
            AdaptiveLocalSteps, peers=session.pace, own_s=lambda: self.own.steps_s, interval_steps=interval_steps,
            slack_steps=overlap_steps / 4, now=lambda: town.clock.now_s,
        )  # fmt: skip
        return ElasticDriver(
            lambda: session.view.step, tolerates_overdue=setting.tolerates_overdue,
            grace_steps=grace_steps(sync_interval=interval_steps, overlap_steps=overlap_steps),
            own_pace=own_pace if setting.has_own_pace else None,
        )  # fmt: skip

    def begin(self) -> None:
        self._say("here", address="127.0.0.1", port=1 + self.replica, corpus="c", windows=1, held=0, era=0, disk=0)
        self._say("active", step=0)
        self.thread.start()
        self.town.clock.at(self.town.clock.now_s + 1.0, self.resume)
        self._tick()

    def _tick(self) -> None:
        if not self.has_ended:
            self.session.tick()
            self.town.clock.at(self.town.clock.now_s + 0.25, self._tick)

    def _say(self, kind: str, **fields: Any) -> None:
        message = decode(encode(kind, **fields), to_member=False)
        self.town.after(self.town.word_s(self.replica), lambda: self.town.hear(self.replica, message))

    def hear(self, message: dict[str, Any]) -> None:
        self.session.receive(message)
        self.gather()
        self.look()

    def gather(self) -> None:
        """Vote for what was called, as soon as the parts have come."""
        for number, called in list(self.session.view.calls.items()):
            flight = self.engine.state.in_flight.get(number)
            if flight is not None and not flight.voted and self.replica in called:
                flight.voted = True
                self.town.after(PART_S, lambda n=number, c=called: self.session.vote(n, has=c, reference_hash=1))

    # -- the thread

    def _live(self) -> None:
        self._turn.acquire()
        town, setting, session = self.town, self.setting, self.session
        now = lambda: town.clock.now_s  # noqa: E731
        session.pace.start(now_s=now())
        step = 0
        while step < setting.num_steps:
            took_s = setting.step_s[self.replica] * max(0.2, 1 + setting.jitter * self._chance.gauss(0, 1))
            self.sleep(took_s)
            self.engine.state.work.add_step(num_tokens=1)
            step = advanced(self.engine, step + 1, stop=setting.num_steps)
            self.own.add_step(took_s=took_s, step=step, tokens=1)
        self.ended_s = now()
        self.has_ended = True
        self._back.release()

    def sleep(self, seconds: float) -> None:
        self.town.after(seconds, self.resume)
        self._yield()

    def wait_until(self, what: Callable[[], bool]) -> None:
        if not what():
            self._waits_for, began_s = what, self.town.clock.now_s
            self._yield()
            self.waited_s += self.town.clock.now_s - began_s

    def look(self) -> None:
        if self._waits_for is not None and self._waits_for():
            self._waits_for = None
            self.town.after(0.0, self.resume)

    def _yield(self) -> None:
        self._back.release()
        self._turn.acquire()

    def resume(self) -> None:
        self._turn.release()
        self._back.acquire()


@dataclass
class Ended:
    """What a run came to.

    Attributes:
        seconds: By replica, how long it took.
        trained: By replica, how many steps it did itself.
        waited: By replica, how long its training waited for results, seconds.
        rounds: By round, whose parts its mean is made of.
        own_share: By replica, of how many of the rounds' means it is a part, but for the first interval's.
    """

    seconds: list[float]
    trained: list[int]
    waited: list[float]
    rounds: dict[int, tuple[int, ...]]
    own_share: list[float] = field(default_factory=list)


class PacedTown:
    """A coordinator and its replicas."""

    def __init__(self, setting: Setting) -> None:
        self.clock = VirtualClock()
        self.setting = setting
        self.coordinator = Coordinator(
            CoordinatorConfig(
                job={"thinwire": __version__}, initial_replicas=len(setting.step_s),
                sync_interval=setting.schedule.sync_interval, overlap_steps=setting.overlap_steps, shard_windows=8,
                allows_overdue=setting.tolerates_overdue,
            ),
            send=self._send, record=lambda what, fields: None, generation="g",
        )  # fmt: skip
        self.runners = [Runner(self, number, setting) for number in range(len(setting.step_s))]
        for number in range(len(self.runners)):
            self.hear(number, {"kind": "join", "version": VERSION, "thinwire": __version__, "host": f"h{number}"})

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.clock.at(self.clock.now_s + seconds, action)

    def word_s(self, number: int) -> float:
        """Return how long a message takes between the coordinator and a replica."""
        replicas, from_s, until_s = self.setting.cut
        is_cut = number in replicas and from_s <= self.clock.now_s < until_s
        return WORD_S + (until_s - self.clock.now_s if is_cut else 0.0)

    def hear(self, number: int, message: dict[str, Any]) -> None:
        self.coordinator.handle(b"%d" % number, message, now_s=self.clock.now_s)

    def _send(self, token: bytes, kind: str, fields: dict[str, Any]) -> None:
        message = decode(encode(kind, **fields), to_member=True)
        runner = self.runners[int(token)]
        self.after(self.word_s(runner.replica), lambda: runner.hear(message))

    def _tick(self) -> None:
        if not all(one.has_ended for one in self.runners):
            self.coordinator.tick(self.clock.now_s)
            self.after(0.05, self._tick)

    def run(self) -> Ended:
        for runner in self.runners:
            runner.begin()
        self._tick()
        self.clock.run()
        rounds = {number: found.members for number, found in self.coordinator.state.rounds.decisions.items()}
        first = self.setting.num_fragments
        counted = [members for number, members in sorted(rounds.items()) if number >= first]
        return Ended(
            seconds=[one.ended_s - 1.0 for one in self.runners],
            trained=[one.engine.trained for one in self.runners],
            waited=[one.waited_s for one in self.runners],
            rounds=rounds,
            own_share=[statistics.mean(one.replica in members for members in counted) for one in self.runners],
        )
