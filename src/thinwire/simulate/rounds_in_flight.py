"""Rounds in flight: start and end of each simulated round, and its restart when a replica dies.

A round of a group starts when all of its members have launched it, as a collective does, and ends for all of them at
the same time. Where members form no groups, as in a graph of neighbours, each sends when it launches, and the round
ends for each when all that it waits for has arrived.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from thinwire.simulate.cluster import IsWorking, SimCluster
from thinwire.simulate.exchange_model import ExchangeModel, LinkStage, RoundTimes
from thinwire.simulate.fluid_network import ActiveFlow, FluidNetwork, Loads, Reroute
from thinwire.simulate.virtual_clock import VirtualClock


class RoundInFlight:
    """One round of one group, or, in a direct exchange, of one replica with those it waits for."""

    __slots__ = (
        "attempt", "awaited", "id", "is_done", "launched", "launched_s", "members", "moving", "payload_bits", "queue",
        "senders", "started_s", "waiters",
    )  # fmt: skip

    def __init__(
        self, round_id: int, *, members: tuple[int, ...], senders: tuple[int, ...], bits: float, now_s: float
    ) -> None:
        self.id, self.members, self.senders = round_id, members, senders
        self.payload_bits, self.launched_s = bits, now_s
        self.awaited = set(senders)  # whose launch, or in a direct exchange whose message, has not come
        self.launched: list[int] = []
        self.waiters: list[int] = []
        self.moving: ActiveFlow | None = None
        self.queue: ConnectionQueue | None = None
        self.attempt = 0  # what belongs to an attempt that was broken off comes too late
        self.started_s = inf
        self.is_done = False

    def times(self, finished_s: float) -> RoundTimes:
        """Return what came of it."""
        return RoundTimes(self.id, self.members, self.launched_s, self.started_s, finished_s)


class RoundTracker(ABC):
    """All rounds of a run; `resume` is called with each replica that waited for a round that is done."""

    def __init__(
        self, exchange: ExchangeModel, *, cluster: SimCluster, payload_bytes: Sequence[Sequence[float]],
        network: FluidNetwork, clock: VirtualClock, alive: Callable[[], tuple[int, ...]], resume: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._exchange, self._cluster, self._network, self._clock = exchange, cluster, network, clock
        self._payload_bits = [[8 * size for size in channels] for channels in payload_bytes]
        self._alive, self._resume = alive, resume
        self._rounds: dict[int, dict[int, RoundInFlight]] = {}
        self._num_to_collect: dict[int, int] = {}
        self._open: dict[RoundInFlight, None] = {}
        self._lost: set[int] = set()
        self._newest = -1
        self.times: list[RoundTimes] = []

    @abstractmethod
    def _launch(self, replica: int, round: RoundInFlight) -> None:
        """Act on the launch of a member."""

    @abstractmethod
    def _break_off(self, replica: int, round: RoundInFlight) -> None:
        """Act on the death of a member."""

    @abstractmethod
    def _go_on_without(self, replica: int, round: RoundInFlight) -> None:
        """Act on the end of the wait for a member that has died, and was struck off."""

    def launch(self, replica: int, round_id: int, *, fragment: int, channel: int) -> None:
        """Record that a replica has launched a round; a replica that was dead at its first launch has no part in it."""
        if round_id > self._newest:
            self._newest = round_id
            rounds = self._rounds[round_id] = {}
            for members, senders in self._exchange.parts(round_id, alive=self._alive()):
                bits = self._payload_bits[fragment][channel]
                made = RoundInFlight(round_id, members=members, senders=senders, bits=bits, now_s=self._clock.now_s)
                self._open[made] = None
                rounds.update(dict.fromkeys(members[:1] if self._exchange.is_direct else members, made))
            self._num_to_collect[round_id] = len(rounds)
        round = self._rounds.get(round_id, {}).get(replica)
        if round is not None:
            round.launched.append(replica)
            self._launch(replica, round)

    def is_collected(self, replica: int, round_id: int) -> bool:
        """Return whether a replica need not wait for a round; where it must, it is resumed when the round is done."""
        round = self._rounds.get(round_id, {}).get(replica)
        if round is None:
            return True
        self._num_to_collect[round_id] -= 1
        if not self._num_to_collect[round_id]:
            del self._rounds[round_id], self._num_to_collect[round_id]
        if not round.is_done:
            round.waiters.append(replica)
        return round.is_done

    def break_off(self, replica: int) -> None:
        """Stop the rounds of a replica that has just died; the others learn of its death by `go_on_without`."""
        self._lost.add(replica)
        for round in self._open:
            if replica in round.waiters:
                round.waiters.remove(replica)
            if replica in round.members:
                self._break_off(replica, round)

    def go_on_without(self, replica: int) -> None:
        """Restart the stopped rounds among the others, and wait no longer for the replica that has died."""
        self._lost.discard(replica)
        for round in list(self._open):
            if replica in round.members:
                round.members = tuple(member for member in round.members if member != replica)
                round.senders = tuple(sender for sender in round.senders if sender != replica)
                round.awaited.discard(replica)
                self._go_on_without(replica, round)

    def unfinished(self) -> list[RoundTimes]:
        """Return the rounds that have not ended."""
        return [round.times(inf) for round in self._open]

    def _end(self, round: RoundInFlight) -> None:
        round.is_done = True
        del self._open[round]
        self.times.append(round.times(self._clock.now_s))
        waiters, round.waiters = round.waiters, []
        for replica in waiters:
            self._resume(replica)


@dataclass(slots=True, eq=False)
class ConnectionQueue:
    """Queue of the transfers of one group's stage: they share connections, so they go one after another."""

    waiting: list[tuple[RoundInFlight, Callable[[], None]]] = field(default_factory=list)

    def join(self, round: RoundInFlight, start: Callable[[], None]) -> None:
        """Start what is sent when it is its turn."""
        round.queue = self
        self.waiting.append((round, start))
        if len(self.waiting) == 1:
            start()

    def leave(self, round: RoundInFlight) -> None:
        """Take out what has been sent, or was broken off, and let the next one start."""
        if round.queue is not self:  # broken off in the instant in which its last bit left
            return
        round.queue = None
        was_first = self.waiting[0][0] is round
        self.waiting = [(other, start) for other, start in self.waiting if other is not round]
        if was_first and self.waiting:
            self.waiting[0][1]()


class GroupRoundTracker(RoundTracker):
    """Rounds of groups: one flow a stage for the whole group."""

    def __init__(self, exchange: ExchangeModel, **parts: Any) -> None:
        super().__init__(exchange, **parts)
        self._queues: dict[tuple[tuple[int, ...], int], ConnectionQueue] = {}
        self._stages: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[LinkStage, ...]] = {}

    def _launch(self, replica: int, round: RoundInFlight) -> None:
        round.awaited.discard(replica)
        if round.moving is None and round.queue is None and not round.is_done:
            self._start_if_due(round)

    def _break_off(self, replica: int, round: RoundInFlight) -> None:
        if round.moving is not None:
            self._network.stop(round.moving)
        if round.queue is not None:
            round.queue.leave(round)
        round.attempt += 1

    def _go_on_without(self, replica: int, round: RoundInFlight) -> None:
        if replica in round.launched:
            round.launched.remove(replica)
        round.moving = None
        self._start_if_due(round)

    def _start_if_due(self, round: RoundInFlight) -> None:
        quorum = self._exchange.quorum
        is_due = not round.awaited or (quorum is not None and len(round.launched) >= quorum)
        if not is_due or not self._lost.isdisjoint(round.members):
            return
        if quorum is not None:
            round.senders = tuple(sorted(set(round.launched) & set(round.senders)))
        round.started_s = self._clock.now_s
        if len(round.members) < 2 or not round.senders:
            self._end(round)
            return
        if len(self._stages) > 256:  # random groups hardly ever meet again
            self._stages = {}
        ends = round.members, round.senders
        if ends not in self._stages:
            self._stages[ends] = self._exchange.stages(self._cluster, members=ends[0], senders=ends[1])
        self._next_stage(round, self._stages[ends], 0)

    def _next_stage(self, round: RoundInFlight, stages: tuple[LinkStage, ...], number: int) -> None:
        if number == len(stages):
            self._end(round)
            return
        attempt = round.attempt

        def arrive() -> None:
            if round.attempt == attempt:
                self._next_stage(round, stages, number + 1)

        flow = self._exchange.flow(stages[number], payload_bits=round.payload_bits)
        members, senders = round.members, round.senders

        def over_working_links(is_working: IsWorking) -> Loads:
            found = self._exchange.stages(self._cluster, senders=senders, members=members, is_working=is_working)
            return found[number].loads

        reroute: Reroute | None = over_working_links if self._cluster.paths else None
        if not flow.size_bits:
            round.moving = self._network.start(flow, arrive)
            return
        if len(self._queues) > 256:  # as with the stages; a round in a queue keeps it
            self._queues = {}
        queue = self._queues.setdefault((round.members, number), ConnectionQueue())

        def start() -> None:
            round.moving = self._network.start(flow, arrive, has_left=lambda: queue.leave(round), reroute=reroute)

        queue.join(round, start)


class DirectRoundTracker(RoundTracker):
    """Rounds without groups: one flow a replica, to all its peers."""

    def _launch(self, replica: int, round: RoundInFlight) -> None:
        round.started_s = self._clock.now_s
        others, rounds = round.members[1:], self._rounds[round.id]
        if replica in round.senders and others:

            def over_working_links(is_working: IsWorking) -> Loads:
                return self._cluster.spread([replica], others, is_working=is_working)[0]

            def arrive() -> None:
                for other in others:
                    if replica not in self._lost:
                        self._has_come(replica, rounds[other])

            loads, latency_s = self._cluster.spread([replica], others)
            flow = self._exchange.flow(LinkStage(loads=loads, latency_s=latency_s), payload_bits=round.payload_bits)
            reroute = over_working_links if self._cluster.paths else None
            round.moving = self._network.start(flow, arrive, reroute=reroute)
        self._has_come(replica, round)

    def _has_come(self, sender: int, round: RoundInFlight) -> None:
        round.awaited.discard(sender)
        is_complete = not round.awaited and bool(round.launched)
        if is_complete and not round.is_done and round in self._open:
            self._end(round)

    def _break_off(self, replica: int, round: RoundInFlight) -> None:
        if round.members[0] == replica and round.moving is not None:
            self._network.stop(round.moving)

    def _go_on_without(self, replica: int, round: RoundInFlight) -> None:
        if replica in round.launched or self._rounds.get(round.id, {}).get(replica) is round:
            del self._open[round]  # its own: no replica waits for its result
        else:
            self._has_come(replica, round)
