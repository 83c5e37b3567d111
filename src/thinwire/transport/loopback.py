"""Several replicas in one process, in one deterministic order: for tests and simulations.

Each replica's code runs in a thread of its own, but only the one that holds the baton runs; it passes the baton when
it has to wait for a message or is done, always to the next replica in turn that can go on. So the same program gives
the same order of events on every run and machine, and a wait that nobody can end is found at once, without a clock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from thinwire.errors import DeadlineExceeded
from thinwire.transport.base import Envelope, Received, StreamLimits, check_peer
from thinwire.transport.message import Tamper, pack, unpack
from thinwire.transport.streams import ROUNDS, MessageAddress

T = TypeVar("T")
_Key = tuple[int, int, MessageAddress]


class LoopbackWorld:
    """The wire between `num_replicas` replicas that live in this process.

    Args:
        num_replicas: How many replicas, at least 1.

    Attributes:
        transports: One transport a replica.

    Example:
        >>> LoopbackWorld(3).run(lambda transport: transport.replica)
        [0, 1, 2]
    """

    def __init__(self, num_replicas: int) -> None:
        if num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, got {num_replicas}")
        self.num_replicas = num_replicas
        self.transports = [LoopbackTransport(self, replica) for replica in range(num_replicas)]
        self._mail: dict[_Key, deque[tuple[torch.Tensor, Callable[[], None]]]] = {}
        self._in_flight = StreamLimits()
        self._baton = threading.Lock()
        # one a replica: a turn wakes the replica whose it is, and not all that wait
        self._calls = [threading.Condition(self._baton) for _ in range(num_replicas)]
        self._turn = 0
        self._waits_for: list[_Key | None] = [None] * num_replicas
        self._is_finished = [True] * num_replicas

    def run(self, replica_main: Callable[[LoopbackTransport], T]) -> list[T]:
        """Run `replica_main(transport)` for every replica and return the results in the replicas' order.

        Raises:
            BaseException: The first error that any replica raised. The others end with `DeadlineExceeded` where they
                wait for it.
        """
        results: list[T | None] = [None] * self.num_replicas
        failures: list[BaseException] = []
        self._waits_for = [None] * self.num_replicas
        self._is_finished = [False] * self.num_replicas
        self._turn = 0

        def body(replica: int) -> None:
            try:
                with self._baton:
                    self._await_turn(replica)
                results[replica] = replica_main(self.transports[replica])
            except BaseException as failure:
                failures.append(failure)
            finally:
                with self._baton:
                    self._is_finished[replica] = True
                    self._pass_baton()

        threads = [
            threading.Thread(target=body, args=(replica,), name=f"replica-{replica}", daemon=True)
            for replica in range(self.num_replicas)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results  # type: ignore[return-value]

    def _post(self, key: _Key, message: torch.Tensor, envelope: Envelope) -> Callable[[], None]:
        with self._baton:
            end = self._in_flight.begin(envelope, link=key[:2])
            self._mail.setdefault(key, deque()).append((message, end))
            return end

    def _has_mail(self, key: _Key) -> bool:
        with self._baton:
            return bool(self._mail.get(key))

    def _collect(self, key: _Key, *, replica: int, what: str) -> torch.Tensor:
        with self._baton:
            if self._is_finished[replica] and not self._mail.get(key):
                raise DeadlineExceeded(f"{what} never came: outside of run() no other replica can send it")
            self._waits_for[replica] = key
            if not self._mail.get(key):
                self._pass_baton()
                self._await_turn(replica)
            self._waits_for[replica] = None
            queue = self._mail.get(key)
            if not queue:
                raise DeadlineExceeded(f"{what} never came: no replica in this process can still send it")
            message, end = queue.popleft()
            if not queue:
                del self._mail[key]
            end()
            return message

    def _step_aside(self, replica: int) -> bool:
        with self._baton:
            if self._is_finished[replica]:
                return False
            self._pass_baton()
            has_moved = self._turn != replica
            self._await_turn(replica)
            return has_moved

    def _await_turn(self, replica: int) -> None:
        self._calls[replica].wait_for(lambda: self._turn == replica)

    def _pass_baton(self) -> None:
        """Give the turn to the next replica that can go on; where none can, to one that waits in vain."""
        order = [(self._turn + offset) % self.num_replicas for offset in range(1, self.num_replicas + 1)]
        unfinished = [replica for replica in order if not self._is_finished[replica]]
        for replica in unfinished:
            key = self._waits_for[replica]
            if key is None or self._mail.get(key):
                self._turn = replica
                break
        else:
            # of those, first one that waits for a round: it sees which replica has ended before that round
            key_of = self._waits_for
            in_round = [r for r in unfinished if (key := key_of[r]) is not None and key[2].stream == ROUNDS.number]
            self._turn = (in_round or unfinished or [-1])[0]
        if unfinished:
            self._calls[self._turn].notify()


class LoopbackTransport:
    """One replica's end of a `LoopbackWorld`; messages are really packed, checked and copied.

    Attributes:
        tamper: Called with each packed message that this replica sends; returns what goes on the wire, or None to lose
            the message. For tests of faults.
    """

    runs_in_background = False

    def __init__(self, world: LoopbackWorld, replica: int) -> None:
        self._world = world
        self.replica = replica
        self.num_replicas = world.num_replicas
        self.tamper: Tamper | None = None

    def send(self, payload: torch.Tensor, *, to: int, envelope: Envelope) -> _Sent:
        """Put a copy of the payload into the other replica's mail."""
        check_peer(to, replica=self.replica, num_replicas=self.num_replicas)
        message: torch.Tensor | None = pack(payload, sender=self.replica, envelope=envelope)
        if self.tamper is not None and message is not None:
            message = self.tamper(message)
        if message is None:
            return _Sent(lambda: None)
        return _Sent(self._world._post(_key(self.replica, to, envelope), message, envelope))

    def receive(self, *, source: int, envelope: Envelope) -> _Awaited:
        """Return a handle on the message that `source` sends under this envelope."""
        check_peer(source, replica=self.replica, num_replicas=self.num_replicas)
        return _Awaited(self._world, self.replica, source, envelope)

    def step_aside(self) -> bool:
        """Give the others a turn each, up to where they have to wait; tell whether any of them could go on."""
        return self._world._step_aside(self.replica)

    def close(self) -> None:
        """Nothing is held."""


class _Sent:
    """A message in the other replica's mail, which counts as in flight until one of the two waits for it."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def done(self) -> bool:
        return True

    def wait(self, *, deadline_s: float) -> None:
        self._end()


class _Awaited:
    def __init__(self, world: LoopbackWorld, replica: int, source: int, envelope: Envelope) -> None:
        self._world, self._replica, self._source, self._envelope = world, replica, source, envelope
        self._key = _key(source, replica, envelope)

    def __str__(self) -> str:  # `measure_exchange` names what never comes by it
        return f"{self._envelope.describe()} from replica {self._source}"

    def done(self) -> bool:
        return self._world._has_mail(self._key)

    def wait(self, *, deadline_s: float) -> Received:
        message = self._world._collect(self._key, replica=self._replica, what=str(self))
        return unpack(message, source=self._source, envelope=self._envelope)


def _key(source: int, to: int, envelope: Envelope) -> _Key:
    return (source, to, envelope.address)


def single() -> LoopbackTransport:
    """Return the transport of a run with one replica, which never sends."""
    return LoopbackWorld(1).transports[0]


def run_replicas(num_replicas: int, replica_main: Callable[[LoopbackTransport], T]) -> Sequence[T]:
    """Run a function once per replica in a new `LoopbackWorld` and return the results in order."""
    return LoopbackWorld(num_replicas).run(replica_main)
