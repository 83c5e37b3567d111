"""Rounds in flight: exchanges driven by a background thread, or step by step from the training loop."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from thinwire.averaging.round_context import Average, Steps, Wait
from thinwire.errors import DeadlineExceeded
from thinwire.events import RoundMark
from thinwire.sync.schedule import Round
from thinwire.transport.base import Pending, Received

# Seconds of a wait after which, and between which, it is checked whether the others can still send what is missing.
CHECK_S = 0.5
# Polling interval for watched messages in seconds: the longest unnecessary wait.
_POLL_S = 0.005


class RoundObserver(Protocol):
    """Receives the rounds of the engines whose `observers` it is in."""

    def on_mark(self, mark: RoundMark) -> None:
        """Receive a launched or arrived round; may be called from another thread."""
        ...

    def on_applied(self, round: Round, average: Average) -> None:
        """Receive an applied round and its mean."""
        ...


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


class InFlight(Protocol):
    """One round between launch and apply."""

    @property
    def round(self) -> Round:
        """The round."""
        ...

    @property
    def duration_s(self) -> float:
        """Seconds from launch to arrival, 0 where it was not measured or nothing has arrived."""
        ...

    @property
    def num_bytes(self) -> int:
        """Payload bytes that this replica sends, at most."""
        ...

    def poll(self, step: int = 0) -> bool:
        """Progress without waiting; return whether the result (or an error) is there.

        Args:
            step: The step that this replica has come to: a grace is measured in them.
        """
        ...

    def result(self, *, grace_s: float = 0.0) -> Average:
        """Wait for the result, up to the deadline given at the launch.

        Args:
            grace_s: Seconds for which members are still waited for that the result can do without.

        Raises:
            TransportError: A peer was lost, was late, or sent something wrong.
        """
        ...

    def is_settled(self) -> bool:
        """Return, once the result is there, whether nothing remains to be done for late members.

        Raises:
            TransportError: Such a member was lost, did not come at all, or sent something wrong.
        """
        ...


class Background:
    """Drives an exchange from a thread, so that the wire is busy while the accelerator computes.

    Args:
        steps: The exchange; its first part (encode, start to send) has been run by `launch` already.
        first: What it waits for first.
        round: The round.
        deadline_s: Seconds until a peer counts as hung.
        num_bytes: Payload bytes that this replica sends, at most.
        on_arrival: Called in that thread when the result is there.
        check: Called now and then by whoever waits for the result; raises where it cannot come any more.
    """

    def __init__(
        self, steps: Steps, first: Wait, *, round: Round, deadline_s: float, num_bytes: int = 0,
        on_arrival: Callable[[], None] = lambda: None, check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.round = round
        self._check = check
        self.num_bytes = num_bytes
        self.duration_s = 0.0
        self._on_arrival = on_arrival
        self._average: Average | None = None
        self._failure: BaseException | None = None
        self._deadline_s = deadline_s
        self._step = round.launch_step
        self._grace_until_s = math.inf
        self._started_s = time.monotonic()
        self._until_s = self._started_s + deadline_s  # one deadline for all waits of the exchange
        self._has_ended = threading.Event()
        # A thread begins on the default stream. On the launching one's, what it decodes is ordered before what the
        # training thread makes of it.
        has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream() if has_gpu else None
        self._thread = threading.Thread(
            target=self._drive_on_stream, args=(steps, first), name=f"round-{round.id}", daemon=True
        )
        self._thread.start()

    def poll(self, step: int = 0) -> bool:
        self._step = max(self._step, step)
        return self._has_ended.is_set()

    def result(self, *, grace_s: float = 0.0) -> Average:
        """See `InFlight.result`; every wait inside has the deadline, so it ends."""
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

    def _drive_on_stream(self, steps: Steps, wait: Wait) -> None:
        with torch.cuda.stream(self._stream):
            self._drive(steps, wait)

    def _drive(self, steps: Steps, wait: Wait) -> None:
        try:
            while True:
                self._await_enough(wait)
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
            self._settle()
        except BaseException as failure:  # handed to the training thread by is_settled()
            self._failure = failure

    def _await_enough(self, wait: Wait) -> None:
        while not _has_enough(wait, is_in_grace=self._is_in_grace(wait)):
            self._pause(_missing(wait.watched), until_s=self._until_s)

    def _is_in_grace(self, wait: Wait) -> bool:
        has_grace_steps = self._step - self.round.launch_step < wait.grace_steps
        return has_grace_steps and time.monotonic() < self._grace_until_s

    def _settle(self) -> None:
        after: Mapping[int, Pending] = {} if self._average is None else self._average.after
        until_s = time.monotonic() + self._deadline_s  # a new deadline: the result itself is here
        while missing := _missing(after):
            self._pause(missing, until_s=until_s)
        for pending in after.values():
            pending.wait(deadline_s=0.0)

    def _pause(self, missing: list[int], *, until_s: float) -> None:
        if time.monotonic() > until_s:
            raise _late(missing, round=self.round, deadline_s=self._deadline_s)
        time.sleep(_POLL_S)


class Inline:
    """Drives an exchange from the training loop itself, in one deterministic order.

    Where not all members are waited for, all that can come without this replica does come first: nobody is late there
    but who waits for something else.

    Args:
        steps: The exchange; its first part (encode, start to send) has been run by `launch` already.
        first: What it waits for first.
        round: The round.
        deadline_s: Seconds until a peer counts as hung.
        num_bytes: Payload bytes that this replica sends, at most.
        let_others: Lets the other replicas progress; returns whether one did.
        on_arrival: Called when the result is there.
        check: Called by whoever waits for the result; raises where it cannot come any more.
    """

    def __init__(
        self, steps: Steps, first: Wait, *, round: Round, deadline_s: float, num_bytes: int = 0,
        let_others: Callable[[], bool], on_arrival: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.round = round
        self._check = check
        self.num_bytes = num_bytes
        self.duration_s = 0.0
        self._on_arrival = on_arrival
        self._steps = steps
        self._wait = first
        self._average: Average | None = None
        self._deadline_s = deadline_s
        self._step = round.launch_step
        self._let_others = let_others

    def poll(self, step: int = 0) -> bool:
        self._step = max(self._step, step)
        if self._average is None and _missing(self._wait.watched):
            self._let_others()
        while self._average is None and self._can_go_on():
            self._advance()
        return self._average is not None

    def result(self, *, grace_s: float = 0.0) -> Average:
        """See `InFlight.result`; without time, grace lasts as long as any other replica can progress."""
        while self._average is None:
            self._check()
            # one thread serves all replicas: when no other can advance, what is missing will never come
            while _missing(self._wait.watched) and self._let_others():
                continue
            if not _has_enough(self._wait, is_in_grace=False):
                raise _late(_missing(self._wait.watched), round=self.round, deadline_s=self._deadline_s)
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


class Arrived:
    """A round whose result came from a checkpoint."""

    duration_s = 0.0
    num_bytes = 0

    def __init__(self, average: Average, *, round: Round) -> None:
        self.round = round
        self._average = average

    def poll(self, step: int = 0) -> bool:
        return True

    def result(self, *, grace_s: float = 0.0) -> Average:
        return self._average

    def is_settled(self) -> bool:
        """See `InFlight.is_settled`: nothing is left."""
        return True


def launch(
    steps: Steps, *, round: Round, deadline_s: float, in_background: bool, num_bytes: int = 0,
    let_others: Callable[[], bool] = lambda: False, on_arrival: Callable[[], None] = lambda: None,
) -> Background | Inline | Arrived:  # fmt: skip
    """Start an exchange: encode and begin to send at once, then let it be driven.

    Args:
        steps: The exchange, not yet started.
        round: The round.
        deadline_s: Seconds until a peer counts as hung.
        in_background: Whether a thread drives it.
        num_bytes: Payload bytes that this replica sends, at most.
        let_others: Where no thread does: lets the other replicas progress, and returns whether one did.
        on_arrival: Called, maybe in that thread, when the result is there.
    """
    try:
        first = next(steps)
    except StopIteration as stop:
        on_arrival()
        return Arrived(stop.value, round=round)
    return drive_exchange(
        steps, first, round=round, deadline_s=deadline_s, in_background=in_background, num_bytes=num_bytes,
        let_others=let_others, on_arrival=on_arrival,
    )  # fmt: skip


def drive_exchange(
    steps: Steps, first: Wait, *, round: Round, deadline_s: float, in_background: bool, num_bytes: int = 0,
    let_others: Callable[[], bool] = lambda: False, on_arrival: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> Background | Inline:  # fmt: skip
    """Let a started exchange be driven: `first` is what it waits for first, and the rest is as for `launch`.

    `check` is called now and then by whoever waits for the result; it raises where that cannot come any more.
    """
    if in_background:
        return Background(
            steps, first, round=round, deadline_s=deadline_s, num_bytes=num_bytes, on_arrival=on_arrival, check=check
        )
    return Inline(
        steps, first, round=round, deadline_s=deadline_s, num_bytes=num_bytes, let_others=let_others,
        on_arrival=on_arrival, check=check,
    )  # fmt: skip


def _missing(watched: Mapping[int, Pending]) -> list[int]:
    return [replica for replica, pending in watched.items() if not pending.done()]


def _has_enough(wait: Wait, *, is_in_grace: bool) -> bool:
    missing = len(_missing(wait.watched))
    return not missing or (not is_in_grace and len(wait.watched) - missing >= wait.least)


def _late(missing: list[int], *, round: Round, deadline_s: float) -> DeadlineExceeded:
    who = f"replica {missing[0]}" if len(missing) == 1 else f"replicas {', '.join(map(str, missing))}"
    return DeadlineExceeded(
        f"{who} did not send round {round.id} (fragment {round.fragment}) within {deadline_s:.3g} s, the deadline that "
        f"follows from measured times; see the log there"
    )


def _complete(wait: Wait, *, until_s: float) -> list[Received]:
    received = []
    for pending in wait.receives:
        message = pending.wait(deadline_s=max(0.0, until_s - time.monotonic()))
        assert message is not None
        received.append(message)
    for pending in wait.sends:
        pending.wait(deadline_s=max(0.0, until_s - time.monotonic()))
    return received
