"""The round engine: launches and applies the rounds that the schedule names."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from thinwire.averaging.exchange import BoundExchange, Exchange, NeedsDirections
from thinwire.averaging.round_context import Average, RoundContext
from thinwire.averaging.topology import Peers
from thinwire.errors import DeadlineExceeded, ThinwireError
from thinwire.events import FIRST_LAST_ROUND
from thinwire.shared_random import derive_seed
from thinwire.sync.catch_up import CatchUp, ElasticCatchUp, QuorumCatchUp
from thinwire.sync.closure_methods import BoundProgram
from thinwire.sync.consistency_check import check_hashes
from thinwire.sync.deadlines import Deadlines
from thinwire.sync.engine_state import EngineState
from thinwire.sync.in_flight import InFlight, launch
from thinwire.sync.method import Method
from thinwire.sync.schedule import Round, needed_for
from thinwire.sync.statistics import SyncStatistics
from thinwire.sync.uncounted_work import UncountedWork
from thinwire.transport.base import Transport, step_aside

# The rest is for what the receiver does afterwards, and for steps that are quicker than the median.
_PACED_SHARE = 0.75
# Catching up takes time, in which the others go on; more than this often in a row would leave none for training.
_MOST_LEAPS = 3
_LOOK_S = 0.005


class Engine(EngineState):
    """Drives one method on one replica.

    Args:
        model: The replica's model.
        inner: Its optimizer, for methods that read or replace what it remembers.
        method: The five parts.
        transport: Joins the replicas.
        deadlines: Turns measured times into deadlines.
        seed: Base of the streams of stochastic codecs.
        pace: Whether to spread what is sent over the inner steps until it is applied.

    Raises:
        ValueError: The method does not fit the model or the number of replicas.
    """

    def __init__(
        self, model: nn.Module, *, method: Method, transport: Transport, deadlines: Deadlines, seed: int = 0,
        pace: bool = False, inner: torch.optim.Optimizer | None = None,
    ) -> None:  # fmt: skip
        self.method = method
        self.transport = transport
        self.view = method.view.bind(model, inner=inner)
        self.num_fragments = self.view.parameters.num_fragments
        self._where = {"num_fragments": self.num_fragments, "replica": transport.replica}
        self._exchanges = [self._bind(e, channel) for channel, e in enumerate(method.exchanges(transport.num_replicas))]
        self._last_exchange = self._exchanges[0]
        if method.last_exchange is not None:
            self._last_exchange = self._bind(method.last_exchange(transport.num_replicas), 0)
        self.update = method.update(transport.num_replicas).bind(self.view, inner=inner)
        self.statistics = SyncStatistics()
        self.deadlines = deadlines
        self._alive = tuple(range(transport.num_replicas))
        self._in_flight: dict[int, InFlight] = {}
        self._taken_early: set[int] = set()  # the schedule still names them, where a run goes on after its end
        self._seed = seed
        self._pace = pace
        self._failed: Round | None = None
        self._bears = False
        self._overdue: deque[tuple[int, list[Round]]] = deque()
        self.on_exchanged = lambda step: None
        self.on_applied = lambda round, average: None
        self.is_whole, self.make_whole = lambda: True, lambda: None
        self.on_round = lambda mark: None
        self.work = UncountedWork(num_fragments=self.num_fragments)
        self._settling: list[InFlight] = []
        self._reached_step = 0
        self._drift_steps = method.schedule.sync_interval * method.drift_intervals
        self._pace_maker: CatchUp = QuorumCatchUp(self.work, drift_steps=self._drift_steps)
        method.schedule.check(num_fragments=self.num_fragments, num_replicas=transport.num_replicas)

    @property
    def in_flight(self) -> tuple[Round, ...]:
        """The rounds between launch and apply, in the order of their launch."""
        return tuple(flight.round for flight in self._in_flight.values())

    @property
    def has_memory(self) -> bool:
        """Whether any exchange remembers what it dropped."""
        return any(exchange.has_memory for exchange in self._exchanges)

    def advance(self, step: int, *, stop: int | None = None) -> int:
        """Launch and apply what is due at inner step `step`, counted from 1.

        Where others have closed rounds without this replica, it catches up: it passes over the steps up to where they
        are, without training in between, and takes in what was agreed on meanwhile. Where training may go on while
        results are overdue, it stays at a step as long as those are that the next launch needs, though others are past
        it: what it trains meanwhile counts later.

        Args:
            step: The step.
            stop: A step that must not be passed over.

        Returns:
            The step that the replica is at now: `step`, one that it has caught up to, or the one before `step`.

        Raises:
            TransportError: A peer was lost, was late or sent something wrong.
            DesyncError: Replicas hold different global parameters.
            NonFiniteError: A replica sent NaN or infinity.
        """
        self._refuse_after_failed_round()
        if self._lacks_results_at(step):
            self._tend()
            return step - 1
        self._exchange_at(step)
        for _ in range(_MOST_LEAPS):
            for passed in range(step + 1, self._pace_maker.target(stop=stop) + 1):
                if self._must_wait_at(passed) or self._lacks_results_at(passed):
                    break
                self._exchange_at(passed)
                self.statistics.steps_passed += 1
                step = passed
        for flight in self._in_flight.values():
            flight.poll(step)
        self._tend()
        return step

    def _must_wait_at(self, step: int) -> bool:
        """Tell whether the others may not have come to a step yet, and are needed there."""
        if step <= self._pace_maker.known_step:
            return False
        if self._bears:  # it waits only where a fragment is launched again whose last round has not come
            needed = {round.fragment for round in self.method.schedule.launches(step, **self._where)}
            due = [round for _, found in self._overdue for round in found if round.fragment in needed]
        else:
            due = self._due(step)
        # what is launched at the very step is not in flight yet, and waited for there
        flights = [self._in_flight[round.id] for round in due if round.id in self._in_flight]
        return not all(self.is_whole() and flight.poll(step) for flight in flights)

    def _lacks_results_at(self, step: int) -> bool:
        """Tell whether a launch cannot be done yet that others are past, or whose update cannot for long."""
        if not self._bears or (step > self._pace_maker.known_step and self.is_whole()):
            return False
        fragments = {round.fragment for round in self.method.schedule.launches(step, **self._where)}
        needed = needed_for(fragments, self._overdue)
        return not all(self.is_whole() and self._in_flight[round.id].poll(self._reached_step) for round in needed)

    def _exchange_at(self, step: int) -> None:
        for round in self.method.schedule.launches(step, **self._where):
            self._take_in_overdue_of(round.fragment)
            self._launch(round)
        self._reached_step = step
        self._overdue.append((step, self._due(step)))
        if self._taken_early:
            self._taken_early -= {round.id for round in self.method.schedule.applies(step, **self._where)}
        while self._overdue and not (self._bears and self._is_awaited(self._overdue[0][1])):
            self._take_in_next()

    def _is_awaited(self, due: list[Round]) -> bool:
        return not (self.is_whole() and all(self._in_flight[one.id].poll(self._reached_step) for one in due))

    def _take_in_next(self) -> None:
        """Apply the rounds of the earliest step whose rounds are not; waits for them."""
        self.make_whole()
        step, due = self._overdue.popleft()
        for round in due:
            self._apply(round.id)
        self.on_exchanged(step)

    def take_in_overdue(self) -> None:
        """Wait for all rounds that are due, and apply them: the global parameters are then those of the last step."""
        self.make_whole()
        while self._overdue:
            self._take_in_next()

    def _take_in_overdue_of(self, fragment: int) -> None:
        """Apply what is overdue of a fragment, and all that was due before: its next part refers to the result."""
        while any(round.fragment == fragment for _, due in self._overdue for round in due):
            self._take_in_next()

    def _due(self, step: int) -> list[Round]:
        """Return the rounds to apply at a step, except those that were applied early."""
        due = self.method.schedule.applies(step, **self._where)
        return [round for round in due if round.id not in self._taken_early]

    def drive(self, step: int, oracle: Callable[[], Any]) -> Any:
        """Let the update do step `step` with gradients that it requests itself, and exchange what it yields.

        Args:
            step: Counted from 1.
            oracle: Puts the gradients at the model's present parameters into their `.grad`, and returns the loss.

        Returns:
            What the update makes of the losses.

        Raises:
            TransportError: A peer was lost, was late or sent something wrong; the parameters are those before the step.
            DesyncError: Replicas hold different parameters.
            NonFiniteError: A replica sent NaN or infinity.
        """
        assert isinstance(self.update, BoundProgram)
        program = self.update.program(self.method.schedule.launches(step, **self._where), oracle)
        try:
            round, tensor = next(program)
            while True:
                self._launch(round, tensor=tensor)
                round, tensor = program.send(self._land(round.id))
        except StopIteration as end:
            return end.value
        finally:
            program.close()

    def flush(self) -> None:
        """Wait for all rounds in flight and apply them, in the order of their launch; then for members still late.

        They come in before they are due; the schedule still names them, where a run goes on after its end.
        """
        self.take_in_overdue()
        for number in list(self._in_flight):
            self._apply(number)
            self._taken_early.add(number)
        while self._settling:
            if self._let_others() or not self._settling:
                continue
            if not self.transport.runs_in_background:
                late = ", ".join(str(flight.round.id) for flight in self._settling)
                raise DeadlineExceeded(f"nobody in this process can still ask for the results of the rounds {late}")
            time.sleep(_LOOK_S)

    def _tend(self) -> None:
        """See which rounds nothing is left of."""
        self._settling = [flight for flight in self._settling if not flight.is_settled()]

    def _let_others(self) -> bool:
        self._tend()
        return step_aside(self.transport)

    def merge_everything(self, step: int) -> None:
        """Flush, then set every fragment's global value to the mean of the local ones: the end of a run.

        Args:
            step: The last inner step done; all replicas must call this after the same one.
        """
        self.flush()
        # numbers that no scheduled round has or will have: those count launches, at most one a step and fragment
        first = FIRST_LAST_ROUND + step * self.num_fragments
        for fragment in range(self.num_fragments):
            round = Round(id=first + fragment, fragment=fragment, launch_step=step, apply_step=step)
            self._launch(round, is_last=True)
        for number in list(self._in_flight):
            self._apply(number, is_last=True)

    def _bind(self, exchange: Exchange, channel: int) -> BoundExchange:
        shapes = [self.view.shapes(fragment=fragment, channel=channel) for fragment in range(self.num_fragments)]
        if isinstance(exchange, NeedsDirections):
            parameters = self.view.parameters
            exchange = exchange.with_directions([parameters.directions(f) for f in range(self.num_fragments)])
        return exchange.bind(shapes, replica=self.transport.replica, num_replicas=self.transport.num_replicas)

    def _launch(self, round: Round, *, is_last: bool = False, tensor: torch.Tensor | None = None) -> None:
        began_s = time.perf_counter()
        me = self.transport.replica
        exchange = self._last_exchange if is_last else self._exchanges[round.channel]
        if is_last:  # the final exchange covers all replicas, whatever groups the topology formed before
            tensor, peers = self.view.read_last(round.fragment), Peers(me=me, members=self._alive)
        else:
            peers = self.method.topology.peers(round_id=round.id, me=me, alive=self._alive)
            tensor = self.view.read(round) if tensor is None else tensor
        on_arrival = self._mark(round, tensor)
        num_bytes = exchange.sent_bytes(tensor.numel(), num_replicas=len(peers.members))
        # the final exchange weights all replicas alike, however long ago their last round was
        num_tokens, num_steps = (1, 1) if is_last else self.work.since(round.fragment)
        self.work.launch(round)
        delivery = RoundContext(
            peers=peers,
            transport=self.transport,
            round_id=round.id,
            fragment=round.fragment,
            step=round.launch_step,
            reference_hash=self._reference_hash(round, exchange),
            # gradients may be infinite, since a GradScaler checks for that; a residual must not be
            must_be_finite=self.method.view.moment != "before_inner_step" or exchange.has_memory,
            seed=derive_seed(self._seed, "round", round.id, me),
            spread_s=self._spread_s(round),
            num_tokens=num_tokens,
            num_steps=num_steps,
            is_closed=not is_last and round.launch_step <= self._pace_maker.closed_step,
            reached=lambda: self._reached_step,
            hear=partial(self._pace_maker.hear, round),
        )
        # while this round is on its way, so many inner steps pass at most, here and at the peers
        steps_meanwhile = self._drift_steps - self.method.schedule.sync_interval
        deadline_s = self.deadlines.deadline_s(steps=steps_meanwhile, num_bytes=num_bytes)
        steps = exchange.steps(tensor, delivery)
        del tensor  # the generator holds it as long as it needs it
        self._in_flight[round.id] = launch(
            steps, round=round, deadline_s=deadline_s, in_background=self.transport.runs_in_background,
            num_bytes=num_bytes, let_others=self._let_others, on_arrival=on_arrival,
        )  # fmt: skip
        self.statistics.rounds_launched += 1
        self.statistics.launching_s += time.perf_counter() - began_s

    def _reference_hash(self, round: Round, exchange: BoundExchange) -> int:
        """Return the view's hash, and in it what the exchange remembers and all members must hold alike."""
        found = self.view.reference_hash(round)
        shared = exchange.shared_hash(round.fragment) if found else 0
        return zlib.crc32(shared.to_bytes(4, "little"), found) if shared else found

    def _spread_s(self, round: Round) -> float:
        """Return over how long a round may be sent: most of the steps until it is needed, as long as steps take now."""
        steps = round.apply_step - round.launch_step if self._pace else 0
        return _PACED_SHARE * steps * self.deadlines.median_step_s()

    def _apply(self, number: int, *, is_last: bool = False) -> None:
        flight = self._in_flight[number]
        average = self._land(number)
        began_s = time.perf_counter()
        if is_last:
            self.update.merge(flight.round.fragment, average.mean)
        else:
            self.update.apply(flight.round, average)
        self.statistics.applying_s += time.perf_counter() - began_s
        self.on_applied(flight.round, average)

    def _land(self, number: int) -> Average:
        """Wait for a round's result, and take the round from those in flight."""
        flight = self._in_flight[number]
        average = self._arrival(flight)
        del self._in_flight[number]
        if not flight.is_settled():
            self._settling.append(flight)
        self.work.settle(flight.round, is_counted=average.is_counted)
        self.statistics.rounds_applied += 1
        if not average.is_counted:
            self.statistics.rounds_missed += 1
        return average

    def _arrival(self, flight: InFlight) -> Average:
        began_s = time.perf_counter()
        # the grace that is left, where a state is requested before it ends
        left = max(0, flight.round.apply_step - max(self._reached_step, flight.round.launch_step))
        try:
            average = flight.result(patience_s=left * self.deadlines.median_step_s())
        except ThinwireError:
            self._failed = flight.round
            raise
        self.statistics.stalled_s += time.perf_counter() - began_s
        self.deadlines.observe_round(flight.duration_s, num_bytes=flight.num_bytes)
        check_hashes(average.reference_hashes, round=flight.round)
        return average

    def follow(
        self, known: Callable[[], int], *, patience_steps: float, bears: bool = False,
        aim: Callable[[int], int] = lambda reached: 0,
    ) -> None:  # fmt: skip
        """Follow a step that is reported from outside, as in an elastic run; see `ElasticCatchUp`.

        Args:
            known: Returns that step.
            patience_steps: By so many steps this replica may be behind and still do all of them.
            bears: Whether training goes on while a round that is due has not come: it is applied as soon as it is
                there, in the order in which rounds are due, and at the latest before its fragment's next launch.
            aim: See `ElasticCatchUp`.
        """
        self._bears = bears
        reached = partial(getattr, self, "_reached_step")
        self._pace_maker = ElasticCatchUp(known=known, reached=reached, patience_steps=patience_steps, aim=aim)

    def launched_at(self, step: int) -> tuple[int, ...]:
        """Return the fragments of the rounds that are launched after a step."""
        return tuple(round.fragment for round in self.method.schedule.launches(step, **self._where))

    def has_work(self, fragment: int) -> bool:
        """Tell whether this replica has trained anything that no round of a fragment has counted."""
        return self.work.since(fragment)[1] > 0

    def begin_at(self, step: int) -> None:
        """Go on from the global values that hold after a step: take part in the rounds that are in flight there."""
        self._reached_step = step
        overlapped = range(max(1, step - self.method.schedule.sync_interval), step + 1)
        for launched in overlapped:
            for round in self.method.schedule.launches(launched, **self._where):
                if round.apply_step > step:
                    self._launch(round)
