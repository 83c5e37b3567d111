"""State of a round engine between two steps: costs, work that no round has counted, and rounds in flight.

A background thread drives the exchange of a round in flight, or the training loop does, step by step.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from thinwire.averaging.round_context import Average, Steps, Wait
from thinwire.errors import CheckpointError, DeadlineExceeded
from thinwire.events import RoundMark
from thinwire.sync.schedule import Round
from thinwire.transport.base import Pending, Received

# Seconds of a wait after which, and between which, it is checked whether the others can still send what is missing.
CHECK_S = 0.5
# Polling interval for watched messages in seconds: the longest unnecessary wait.
_POLL_S = 0.005


@dataclass(slots=True)
class SyncStatistics:
    """Costs of synchronisation on this replica so far.

    Attributes:
        rounds_launched: Rounds sent.
        rounds_applied: Rounds applied.
        rounds_missed: Rounds among them whose mean does not hold this replica's part, because it came too late.
        steps_passed: Steps that this replica passed over to catch up with faster ones.
        stalled_s: Seconds the training thread waited for the wire.
        launching_s: Seconds it spent on reading, encoding and starting to send.
        applying_s: Seconds it spent on outer steps and blends.
    """

    rounds_launched: int = 0
    rounds_applied: int = 0
    rounds_missed: int = 0
    steps_passed: int = 0
    stalled_s: float = 0.0
    launching_s: float = 0.0
    applying_s: float = 0.0

    @property
    def exchanging_s(self) -> float:
        """Seconds of the training thread that were not training: waiting, launching and applying."""
        return self.stalled_s + self.launching_s + self.applying_s


class UncountedWork:
    """Tokens and inner steps of one replica: all of them, and up to each fragment's last round that counted them.

    Args:
        num_fragments: How many fragments there are.

    Example:
        >>> work = UncountedWork(num_fragments=1)
        >>> work.add_step(num_tokens=5)
        >>> work.since(0)
        (5, 1)
    """

    def __init__(self, *, num_fragments: int) -> None:
        self._done = (0, 0)
        self._counted = [(0, 0)] * num_fragments
        self._launched: dict[int, tuple[int, int]] = {}

    @property
    def num_steps(self) -> int:
        return self._done[1]

    @property
    def num_missing_steps(self) -> int:
        """Inner steps since the last counted round of the fragment whose one lies furthest back."""
        return max((self._done[1] - num_steps for _, num_steps in self._counted), default=0)

    def add_step(self, *, num_tokens: int) -> None:
        self._done = (self._done[0] + num_tokens, self._done[1] + 1)

    def since(self, fragment: int) -> tuple[int, int]:
        """Return tokens and steps since the fragment's last round that counted this replica's part."""
        counted = self._counted[fragment]
        return self._done[0] - counted[0], self._done[1] - counted[1]

    def launch(self, round: Round) -> None:
        """Record the work in a round's part."""
        self._launched[round.id] = self._done

    def discard(self, round: Round) -> None:
        """Forget that a round was launched, since it exchanges no work of inner steps."""
        self._launched.pop(round.id, None)

    def settle(self, round: Round, *, is_counted: bool) -> None:
        """Record whether a round counted its part."""
        launched = self._launched.pop(round.id, None)
        if is_counted and launched is not None:
            self._counted[round.fragment] = launched

    def state_dict(self) -> dict[str, Any]:
        launched = {str(number): list(done) for number, done in self._launched.items()}
        return {"done": list(self._done), "counted": [list(one) for one in self._counted], "launched": launched}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: It is of another number of fragments.
        """
        if len(state["counted"]) != len(self._counted):
            raise CheckpointError(
                f"the checkpoint counts the work of {len(state['counted'])} fragments, this run has "
                f"{len(self._counted)}; resume with its method and model"
            )
        done, *counted = ((num_tokens, num_steps) for num_tokens, num_steps in [state["done"], *state["counted"]])
        self._done, self._counted = done, counted
        self._launched = {int(number): (tokens, steps) for number, (tokens, steps) in state["launched"].items()}


class RoundObserver(Protocol):
    """Receives the rounds of the engines whose `observers` it is in."""

    def on_mark(self, mark: RoundMark) -> None:
        """Receive a launched or arrived round; may be called from another thread."""

    def on_applied(self, round: Round, average: Average) -> None:
        """Receive an applied round and its mean."""


def mark_launch(round: Round, tensor: torch.Tensor, *, observers: Sequence[RoundObserver]) -> Callable[[], None]:
    """Report a launched round to observers; return the callback that reports its arrival."""
    num_elements, dtype = tensor.numel(), str(tensor.dtype).removeprefix("torch.")

    def report(*, is_done: bool = True) -> None:
        for observer in observers:
            observer.on_mark(
                RoundMark(
                    round_id=round.id, num_elements=num_elements, dtype=dtype, is_done=is_done, at_s=time.monotonic()
                )
            )

    report(is_done=False)
    return report


class InFlight:
    """One round between launch and apply. As it is here, its result has come: from a checkpoint, or nothing is sent.

    Args:
        round: The round.
        average: Its result; None until that is here.
        num_bytes: Payload bytes that this replica sends, at most.
        deadline_s: Seconds until a peer counts as hung.
        on_arrival: Called when the result is there, maybe in another thread.
        check: Called now and then by whoever waits for the result; raises where it cannot come any more.

    Attributes:
        duration_s: Seconds from launch to arrival, 0 where it was not measured or nothing has arrived.
    """

    def __init__(
        self, round: Round, average: Average | None = None, *, num_bytes: int = 0, deadline_s: float = 0.0,
        on_arrival: Callable[[], None] = lambda: None, check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.round = round
        self.num_bytes = num_bytes
        self.duration_s = 0.0
        self._average = average
        self._deadline_s = deadline_s
        self._on_arrival = on_arrival
        self._check = check
        self._step = round.launch_step

    def poll(self, step: int = 0) -> bool:
        """Progress without waiting; return whether the result (or an error) is there.

        Args:
            step: The step that this replica has come to: a grace is measured in them.
        """
        return True

    def result(self, *, grace_s: float = 0.0) -> Average:
        """Wait for the result, up to the deadline given at the launch.

        Args:
            grace_s: Seconds for which members are still waited for that the result can do without.

        Raises:
            TransportError: A peer was lost, was late, or sent something wrong.
        """
        assert self._average is not None
        return self._average

    def is_settled(self) -> bool:
        """Return, once the result is there, whether nothing remains to be done for late members.

        Raises:
            TransportError: Such a member was lost, did not come at all, or sent something wrong.
        """
        return True

    def _late(self, missing: list[int]) -> DeadlineExceeded:
        who = f"replica {missing[0]}" if len(missing) == 1 else f"replicas {', '.join(map(str, missing))}"
        return DeadlineExceeded(
            f"{who} did not send round {self.round.id} (fragment {self.round.fragment}) within {self._deadline_s:.3g} "
            f"s, the deadline that follows from measured times; see the log there"
        )


class Background(InFlight):
    """Drives an exchange from a thread, so that the wire is busy while the accelerator computes.

    Args:
        steps: The exchange; its first part (encode, start to send) has been run by `launch` already.
        first: What it waits for first.
        round: The round.
        options: See `InFlight`.
    """

    def __init__(self, steps: Steps, first: Wait, round: Round, **options: Any) -> None:
        super().__init__(round, **options)
        self._failure: BaseException | None = None
        self._grace_until_s = math.inf
        self._started_s = time.monotonic()
        self._until_s = self._started_s + self._deadline_s  # one deadline for all waits of the exchange
        self._has_ended = threading.Event()
        # A thread begins on the default stream. On the launching one's, what it decodes is ordered before what the
        # training thread makes of it.
        has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream() if has_gpu else None
        self._thread = threading.Thread(target=self._drive, args=(steps, first), name=f"round-{round.id}", daemon=True)
        self._thread.start()

    def poll(self, step: int = 0) -> bool:
        self._step = max(self._step, step)
        return self._has_ended.is_set()

    def result(self, *, grace_s: float = 0.0) -> Average:
        self._grace_until_s = min(self._grace_until_s, time.monotonic() + grace_s)
        while not self._has_ended.wait(CHECK_S):  # without a deadline: the waits in the thread have one
            self._check()
        if self._failure is not None:
            raise self._failure
        assert self._average is not None
        if not self._average.after:  # the thread is about to end: leave none behind
            self._thread.join()
        return self._average

    def is_settled(self) -> bool:
        if self._average is not None and self._average.after and self._thread.is_alive():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def _drive(self, steps: Steps, wait: Wait) -> None:
        with torch.cuda.stream(self._stream):
            try:
                while True:
                    while not _has_enough(wait, is_in_grace=self._is_in_grace(wait)):
                        self._pause(_missing(wait.watched), until_s=self._until_s)
                    wait = steps.send(_complete(wait, until_s=self._until_s))
            except StopIteration as stop:
                self._average = stop.value
                self._on_arrival()
            except BaseException as failure:  # handed to the training thread by result()
                self._failure = failure
            self.duration_s = time.monotonic() - self._started_s
            # the training thread may apply the result from here on; late members are answered meanwhile
            self._has_ended.set()
            try:
                after: Mapping[int, Pending] = {} if self._average is None else self._average.after
                until_s = time.monotonic() + self._deadline_s  # a new deadline: the result itself is here
                while missing := _missing(after):
                    self._pause(missing, until_s=until_s)
                for pending in after.values():
                    pending.wait(deadline_s=0.0)
            except BaseException as failure:  # handed to the training thread by is_settled()
                self._failure = failure

    def _is_in_grace(self, wait: Wait) -> bool:
        has_grace_steps = self._step - self.round.launch_step < wait.grace_steps
        return has_grace_steps and time.monotonic() < self._grace_until_s

    def _pause(self, missing: list[int], *, until_s: float) -> None:
        if time.monotonic() > until_s:
            raise self._late(missing)
        time.sleep(_POLL_S)


class Inline(InFlight):
    """Drives an exchange from the training loop itself, in one deterministic order.

    Where not all members are waited for, all that can come without this replica does come first: nobody is late there
    but who waits for something else.

    Args:
        steps: The exchange; its first part (encode, start to send) has been run by `launch` already.
        first: What it waits for first.
        round: The round.
        let_others: Lets the other replicas progress; returns whether one did.
        options: See `InFlight`.
    """

    def __init__(
        self, steps: Steps, first: Wait, round: Round, *, let_others: Callable[[], bool], **options: Any
    ) -> None:
        super().__init__(round, **options)
        self._steps = steps
        self._wait = first
        self._let_others = let_others

    def poll(self, step: int = 0) -> bool:
        self._step = max(self._step, step)
        if self._average is None and _missing(self._wait.watched):
            self._let_others()
        while self._average is None and self._can_go_on():
            self._advance()
        return self._average is not None

    def result(self, *, grace_s: float = 0.0) -> Average:
        # without time, grace lasts as long as any other replica can progress
        while self._average is None:
            self._check()
            # one thread serves all replicas: when no other can advance, what is missing will never come
            while _missing(self._wait.watched) and self._let_others():
                continue
            if not _has_enough(self._wait, is_in_grace=False):
                raise self._late(_missing(self._wait.watched))
            try:
                self._advance()
            except DeadlineExceeded:
                self._check()
                raise
        return self._average

    def is_settled(self) -> bool:
        assert self._average is not None
        if _missing(self._average.after):
            return False
        for pending in self._average.after.values():
            pending.wait(deadline_s=0.0)
        return True

    def _can_go_on(self) -> bool:
        # of a deterministic order, grace is counted in steps alone
        is_in_grace = self._step - self.round.launch_step < self._wait.grace_steps
        return all(p.done() for p in self._wait.receives) and _has_enough(self._wait, is_in_grace=is_in_grace)

    def _advance(self) -> None:
        try:
            self._wait = self._steps.send(_complete(self._wait, until_s=time.monotonic() + self._deadline_s))
        except StopIteration as stop:
            self._average = stop.value
            self._on_arrival()


def launch(steps: Steps, *, round: Round, in_background: bool, **options: Any) -> InFlight:
    """Start an exchange: encode and begin to send at once, then let it be driven; see `drive_exchange`."""
    try:
        first = next(steps)
    except StopIteration as end:  # an exchange that sends nothing
        options.get("on_arrival", lambda: None)()
        return InFlight(round, end.value)
    return drive_exchange(steps, first, round=round, in_background=in_background, **options)


def drive_exchange(
    steps: Steps, first: Wait, *, round: Round, in_background: bool, let_others: Callable[[], bool] = lambda: False,
    **options: Any,
) -> InFlight:  # fmt: skip
    """Let an exchange be driven.

    Args:
        steps: The exchange, which has been started.
        first: What it waits for first.
        round: The round.
        in_background: Whether a thread drives it.
        let_others: Where no thread does: lets the other replicas progress, and returns whether one did.
        options: `deadline_s`, `num_bytes`, `on_arrival` and `check`: see `InFlight`.
    """
    if in_background:
        return Background(steps, first, round, **options)
    return Inline(steps, first, round, let_others=let_others, **options)


def _missing(watched: Mapping[int, Pending]) -> list[int]:
    return [replica for replica, pending in watched.items() if not pending.done()]


def _has_enough(wait: Wait, *, is_in_grace: bool) -> bool:
    missing = len(_missing(wait.watched))
    return not missing or (not is_in_grace and len(wait.watched) - missing >= wait.least)


def _complete(wait: Wait, *, until_s: float) -> list[Received]:
    received = []
    for pending in wait.receives:
        message = pending.wait(deadline_s=max(0.0, until_s - time.monotonic()))
        assert message is not None
        received.append(message)
    for pending in wait.sends:
        pending.wait(deadline_s=max(0.0, until_s - time.monotonic()))
    return received


@dataclass(slots=True, kw_only=True)
class EngineState:
    """Engine state between two steps.

    Attributes:
        work: Tokens and steps that no round has counted yet.
        in_flight: Rounds between launch and apply, by id in the order of their launch.
        applied_early: Ids of rounds that a flush applied before they were due.
        settling: Applied rounds whose result late members may still request.
        failed: The round that failed last.
        reached_step: The last step whose rounds were launched.
    """

    work: UncountedWork
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    applied_early: set[int] = field(default_factory=set)
    settling: list[InFlight] = field(default_factory=list)
    failed: Round | None = None
    reached_step: int = 0

    def drop_settled(self) -> None:
        """Drop the rounds whose result no member can request any more."""
        if self.settling:
            self.settling = [flight for flight in self.settling if not flight.is_settled()]
