"""The round engine: launches and applies the rounds that the schedule names."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch
from torch import nn

from thinwire.adaptive_timeout import Deadlines
from thinwire.averaging.exchange import BoundExchange, Exchange
from thinwire.averaging.round_context import Average, RoundContext
from thinwire.averaging.topology import Peers
from thinwire.errors import DeadlineExceeded, DesyncError, ThinwireError
from thinwire.events import FIRST_LAST_ROUND
from thinwire.shared_random import derive_seed
from thinwire.sync.catch_up import CatchUp, QuorumCatchUp
from thinwire.sync.consistency_check import check_hashes
from thinwire.sync.engine_counts import EngineState, SyncStatistics, UncountedWork
from thinwire.sync.in_flight import Arrived, InFlight, RoundObserver, drive_exchange, mark_launch
from thinwire.sync.method import Method
from thinwire.sync.schedule import Round
from thinwire.transport.base import Transport, step_aside

# Paced rounds use this share of their overlap. The rest is for the receiver's work and for steps below the median.
_PACED_SHARE = 0.75
# Polling interval in seconds while results for late members are outstanding.
_POLL_S = 0.005


class RoundEngine:
    """Drives one method on one replica.

    Args:
        model: The replica's model.
        inner: Its optimizer, for methods that read or replace its state.
        method: The five parts.
        transport: Joins the replicas.
        deadlines: Turns measured times into deadlines.
        catch_up: Chooses the steps that this replica passes over when it is behind; `QuorumCatchUp` by default.
        seed: Base of the streams of stochastic codecs.
        pace: Whether to spread outgoing bytes over the inner steps until a round is applied.

    Attributes:
        observers: Receive every round.
        checks: Called now and then with a round that is waited for; raise where the others cannot send it any more.
        state: In-flight rounds and counted work.

    Raises:
        ValueError: The method does not fit the model or the number of replicas.
    """

    def __init__(
        self, model: nn.Module, *, method: Method, transport: Transport, deadlines: Deadlines,
        inner: torch.optim.Optimizer | None = None, catch_up: CatchUp | None = None, seed: int = 0, pace: bool = False,
    ) -> None:  # fmt: skip
        count = transport.num_replicas
        self.method = method
        self.transport = transport
        self.deadlines = deadlines
        self.view = method.view.bind(model, inner=inner)
        self.num_fragments = self.view.parameters.num_fragments
        self._where = {"num_fragments": self.num_fragments, "replica": transport.replica}
        self.exchanges = [self._bind(e, channel) for channel, e in enumerate(method.exchanges(count))]
        last = method.last_exchange
        self._last_exchange = self.exchanges[0] if last is None else self._bind(last(count), 0)
        self.update = method.update(count)
        self.program = self.update.program
        self.update_state = self.update.init(self.view, inner=inner)
        self.statistics = SyncStatistics()
        self.state = EngineState(work=UncountedWork(num_fragments=self.num_fragments))
        self.observers: list[RoundObserver] = []
        self.checks: list[Callable[[Round], None]] = []
        self._seed = seed
        self._pace = pace
        # in steps: how far the others may get ahead of a round that this replica has launched
        self.drift_steps = method.schedule.sync_interval * method.drift_intervals
        self.catch_up = QuorumCatchUp() if catch_up is None else catch_up
        self.catch_up.bind(self)
        method.schedule.check(num_fragments=self.num_fragments, num_replicas=count)

    @property
    def in_flight(self) -> tuple[Round, ...]:
        """The rounds between launch and apply, in the order of their launch."""
        return tuple(flight.round for flight in self.state.in_flight.values())

    @property
    def has_memory(self) -> bool:
        """Whether any exchange keeps a residual."""
        return any(exchange.has_memory for exchange in self.exchanges)

    def advancing(
        self, step: int, *, stop: int | None = None, may_be_infinite: bool = False
    ) -> Generator[Callable[[], None], None, int]:
        """Yield what is due at inner step `step`, counted from 1: launches and applies, each to be called at once.

        Args:
            step: The step.
            stop: A step that must not be passed over.
            may_be_infinite: Whether replicas may send infinity.

        Returns:
            The step that the replica is at now: `step`, one that it has caught up to, or the one before `step` where
            the catch-up policy holds it back.

        Raises:
            TransportError: A peer was lost, was late or sent something wrong.
            DesyncError: Replicas hold different global parameters.
            NonFiniteError: A replica sent NaN or infinity.
        """
        self._refuse_after_failed_round()
        reached = step - 1
        for reached in self.catch_up.steps(step, stop=stop):
            for round in self.catch_up.launches(reached):
                yield partial(self.launch, round, may_be_infinite=may_be_infinite)
            self.state.reached_step = reached
            for round in self.catch_up.applies(reached):
                yield partial(self.apply, round)
            if self.state.applied_early:
                self.state.applied_early -= {r.id for r in self.method.schedule.applies(reached, **self._where)}
        self.statistics.steps_passed += max(0, reached - step)
        for flight in self.state.in_flight.values():
            flight.poll(reached)
        self.state.drop_settled()
        return reached

    def launches(self, step: int) -> Sequence[Round]:
        """Return the rounds that the schedule launches after a step."""
        return self.method.schedule.launches(step, **self._where)

    def applies(self, step: int) -> Sequence[Round]:
        """Return the rounds to apply after a step, without those that `flush` applied early."""
        due = self.method.schedule.applies(step, **self._where)
        return [round for round in due if round.id not in self.state.applied_early]

    def has_arrived(self, round: Round, *, step: int) -> bool:
        """Return whether a round's result is here, or the round is not in flight; `step` ends a grace period."""
        flight = self.state.in_flight.get(round.id)
        return flight is None or flight.poll(step)

    def launch(
        self, round: Round, *, tensor: torch.Tensor | None = None, is_last: bool = False, may_be_infinite: bool = False
    ) -> None:
        """Start the exchange of one round.

        Args:
            round: The round.
            tensor: What is exchanged; None reads it from the view.
            is_last: Whether it belongs to the final exchange, which covers all replicas whatever the topology.
            may_be_infinite: Whether replicas may send infinity, which a GradScaler checks for; a residual must not be.
        """
        began_s = time.perf_counter()
        me, exchange = self.transport.replica, self.exchanges[round.channel]
        everyone = tuple(range(self.transport.num_replicas))
        num_tokens, num_steps = self.state.work.since(round.fragment)
        if is_last:
            exchange, peers = self._last_exchange, Peers(me=me, members=everyone)
            tensor = self.view.read_last(round.fragment)
            num_tokens, num_steps = 1, 1  # all replicas weigh the same, however long ago their last round was
        else:
            peers = self.method.topology.peers(round_id=round.id, me=me, alive=everyone)
            tensor = self.view.read(round) if tensor is None else tensor
        on_arrival = mark_launch(round, tensor, observers=self.observers)
        num_bytes = exchange.sent_bytes(tensor.numel(), num_replicas=len(peers.members))
        self.state.work.launch(round)
        context = RoundContext(
            peers=peers, transport=self.transport, round_id=round.id, fragment=round.fragment, step=round.launch_step,
            reference_hash=self._reference_hash(round, exchange),
            must_be_finite=not may_be_infinite or exchange.has_memory,
            seed=derive_seed(self._seed, "round", round.id, me), spread_s=self._spread_s(round),
            num_tokens=num_tokens, num_steps=num_steps,
            is_closed=not is_last and round.launch_step <= self.catch_up.closed_step,
            reached=lambda: self.state.reached_step, hear=partial(self.catch_up.hear, round),
        )  # fmt: skip
        # while this round is in flight, so many inner steps pass at most, here and at the peers
        steps_meanwhile = self.drift_steps - self.method.schedule.sync_interval
        deadline_s = self.deadlines.deadline_s(steps=steps_meanwhile, num_bytes=num_bytes)
        steps = exchange.steps(tensor, context)
        del tensor  # the generator frees it as soon as it is encoded
        try:
            first = next(steps)  # encodes and starts to send
        except StopIteration as end:  # an exchange that sends nothing
            on_arrival()
            self.state.in_flight[round.id] = Arrived(end.value, round=round)
        else:
            self.state.in_flight[round.id] = drive_exchange(
                steps, first, round=round, deadline_s=deadline_s, in_background=self.transport.runs_in_background,
                num_bytes=num_bytes, let_others=self._let_others, on_arrival=on_arrival,
                check=partial(self._check, round),
            )  # fmt: skip
        self.statistics.rounds_launched += 1
        self.statistics.launching_s += time.perf_counter() - began_s

    def apply(self, round: Round, *, is_last: bool = False) -> None:
        """Wait for a round's result and apply it; the final exchange sets the global value without an outer step."""
        average = self._take(round)
        began_s = time.perf_counter()
        if is_last:
            self.update.merge(self.update_state, round.fragment, average.mean)
        else:
            self.update.apply(self.update_state, round, average)
        self.statistics.applying_s += time.perf_counter() - began_s
        for observer in self.observers:
            observer.on_applied(round, average)

    def apply_overdue(self) -> None:
        """Wait for all rounds that are due and apply them: the global parameters are then those of the last step."""
        for round in self.catch_up.overdue():
            self.apply(round)

    def exchange(self, round: Round, tensor: torch.Tensor) -> Average:
        """Exchange a tensor in a round and wait for the result, for updates that drive the step themselves."""
        self.launch(round, tensor=tensor)
        return self._take(round)

    def flush(self) -> None:
        """Apply all rounds in flight before they are due, in launch order, then wait for late members."""
        self.apply_overdue()
        for round in self.in_flight:
            self.apply(round)
            self.state.applied_early.add(round.id)  # the schedule names it again if the run continues
        while self.state.settling:
            if self._let_others() or not self.state.settling:
                continue
            if not self.transport.runs_in_background:
                late = ", ".join(str(flight.round.id) for flight in self.state.settling)
                raise DeadlineExceeded(f"no replica in this process can still request the results of the rounds {late}")
            time.sleep(_POLL_S)

    def merge_everything(self, step: int) -> None:
        """Flush, then set every fragment's global value to the mean of the local ones: the end of a run.

        Args:
            step: The last inner step done; all replicas must call this after the same one.
        """
        self.flush()
        # ids above all scheduled ones: those count launches, at most one a step and fragment
        first = FIRST_LAST_ROUND + step * self.num_fragments
        for fragment in range(self.num_fragments):
            round = Round(id=first + fragment, fragment=fragment, launch_step=step, apply_step=step)
            self.launch(round, is_last=True)
        for round in self.in_flight:
            self.apply(round, is_last=True)

    def wait(self, flight: InFlight) -> Average:
        """Wait for a round's result, which stays in flight, and check the peers' reference hashes."""
        began_s = time.perf_counter()
        # a result requested early still has the rest of its grace period
        left = max(0, flight.round.apply_step - max(self.state.reached_step, flight.round.launch_step))
        try:
            average = flight.result(grace_s=left * self.deadlines.median_step_s())
        except ThinwireError:
            self.state.failed = flight.round
            raise
        self.statistics.stalled_s += time.perf_counter() - began_s
        self.deadlines.observe_round(flight.duration_s, num_bytes=flight.num_bytes)
        check_hashes(average.reference_hashes, round=flight.round)
        return average

    def _check(self, round: Round) -> None:
        for check in self.checks:
            check(round)

    def _take(self, round: Round) -> Average:
        """Wait for a round's result and end the round."""
        flight = self.state.in_flight[round.id]
        average = self.wait(flight)
        del self.state.in_flight[round.id]
        if not flight.is_settled():
            self.state.settling.append(flight)
        self.state.work.settle(round, is_counted=average.is_counted)
        self.statistics.rounds_applied += 1
        self.statistics.rounds_missed += not average.is_counted
        return average

    def _bind(self, exchange: Exchange, channel: int) -> BoundExchange:
        shapes = [self.view.shapes(fragment=fragment, channel=channel) for fragment in range(self.num_fragments)]
        return exchange.bind(shapes, replica=self.transport.replica, num_replicas=self.transport.num_replicas)

    def _reference_hash(self, round: Round, exchange: BoundExchange) -> int:
        """Return the view's hash combined with the exchange state that all members must share."""
        found = self.view.reference_hash(round)
        shared = exchange.shared_hash(round.fragment) if found else 0
        return zlib.crc32(shared.to_bytes(4, "little"), found) if shared else found

    def _spread_s(self, round: Round) -> float:
        """Return the seconds over which a paced round is sent: most of its overlap, at the median step time."""
        steps = round.apply_step - round.launch_step if self._pace else 0
        return _PACED_SHARE * steps * self.deadlines.median_step_s()

    def _let_others(self) -> bool:
        self.state.drop_settled()
        return step_aside(self.transport)

    def _refuse_after_failed_round(self) -> None:
        failed = self.state.failed
        if failed is not None and self.exchanges[failed.channel].shared_hash(failed.fragment):
            raise DesyncError(
                f"round {failed.id} failed on replica {self.transport.replica}, and others may have applied it, so the "
                f"state that {self.method.name} keeps at both ends differs from here on; resume all replicas from a "
                f"checkpoint before that"
            )
