"""Rounds under way: when each starts, when it ends for whom, and what becomes of it when a replica dies.

A round of a group starts when all of its members have launched it, as a collective does, and ends for all of them at
the same time. Where members form no groups, as in a graph of neighbours, each sends when it launches, and the round
ends for each when all that it waits for has arrived.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from thinwire.simulate.cluster import SimCluster
from thinwire.simulate.exchange_model import ExchangeModel, LinkStage, RoundTimes
from thinwire.simulate.fluid_network import ActiveFlow, FluidNetwork
from thinwire.simulate.virtual_clock import VirtualClock


class RoundInFlight:
    """One round of one group, or, in a direct exchange, of one replica with those it waits for."""

    __slots__ = (
        "attempt", "awaited", "id", "is_done", "launched", "launched_s", "line", "members", "moving", "payload_bits",
        "senders", "started_s", "waiters",
    )  # fmt: skip

    def __init__(
        self, round_id: int, *, members: tuple[int, ...], senders: tuple[int, ...], bits: float, now_s: float
    ) -> None:
        self.id, self.members, self.senders, self.payload_bits, self.launched_s = (
            round_id,
            members,
            senders,
            bits,
            now_s,
        )
        self.awaited = set(senders)  # whose launch, or in a direct exchange whose message, has not come
        self.launched: list[int] = []
        self.waiters: list[int] = []
        self.moving: ActiveFlow | None = None
        self.line: ConnectionQueue | None = None
        self.attempt = 0  # what belongs to an attempt that was broken off comes too late
        self.started_s = inf
        self.is_done = False

    def times(self, finished_s: float) -> RoundTimes:
        """Return what came of it."""
        return RoundTimes(self.id, self.members, self.launched_s, self.started_s, finished_s)


class RoundTracker(ABC):
    """All rounds of a run.

    Args:
        exchange: How they cross the links.
        cluster: The links.
        payload_bytes: Of each fragment, of each channel.
        network: On which they move.
        clock: Whose time it is.
        alive: Returns who is alive, ascending.
        resume: Called with a replica when a round that it waits for is done.
    """

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
    def _launch(self, replica: int, gathering: RoundInFlight) -> None:
        """Act on the launch of a member."""

    @abstractmethod
    def _break_off(self, replica: int, gathering: RoundInFlight) -> None:
        """Act on the death of a member."""

    @abstractmethod
    def _go_on_without(self, replica: int, gathering: RoundInFlight) -> None:
        """Act on the end of the wait for a member that has died, and was struck off."""

    def launch(self, replica: int, round_id: int, *, fragment: int, channel: int) -> None:
        """Tell that a replica has launched a round; whoever was not alive at its first launch has no part in it."""
        if round_id > self._newest:
            self._newest = round_id
            self._rounds[round_id] = self._gather(round_id, self._payload_bits[fragment][channel])
            self._num_to_collect[round_id] = len(self._rounds[round_id])
        gathering = self._rounds.get(round_id, {}).get(replica)
        if gathering is not None:
            gathering.launched.append(replica)
            self._launch(replica, gathering)

    def is_collected(self, replica: int, round_id: int) -> bool:
        """Return whether a replica need not wait for a round; where it must, it is resumed when the round is done."""
        gathering = self._rounds.get(round_id, {}).get(replica)
        if gathering is None:
            return True
        self._num_to_collect[round_id] -= 1
        if not self._num_to_collect[round_id]:
            del self._rounds[round_id], self._num_to_collect[round_id]
        if not gathering.is_done:
            gathering.waiters.append(replica)
        return gathering.is_done

    def break_off(self, replica: int) -> None:
        """Stop what a replica that has just died takes part in; until `go_on_without`, nobody knows of its death."""
        self._lost.add(replica)
        for gathering in self._open:
            if replica in gathering.waiters:
                gathering.waiters.remove(replica)
            if replica in gathering.members:
                self._break_off(replica, gathering)

    def go_on_without(self, replica: int) -> None:
        """Begin the broken rounds anew among the others, and wait no longer for the one that has died."""
        self._lost.discard(replica)
        for gathering in list(self._open):
            if replica in gathering.members:
                gathering.members = tuple(member for member in gathering.members if member != replica)
                gathering.senders = tuple(sender for sender in gathering.senders if sender != replica)
                gathering.awaited.discard(replica)
                self._go_on_without(replica, gathering)

    def unfinished(self) -> list[RoundTimes]:
        """Return the rounds that have not ended."""
        return [gathering.times(inf) for gathering in self._open]

    def _gather(self, round_id: int, bits: float) -> dict[int, RoundInFlight]:
        gatherings: dict[int, RoundInFlight] = {}
        for members, senders in self._exchange.parts(round_id, alive=self._alive()):
            made = RoundInFlight(round_id, members=members, senders=senders, bits=bits, now_s=self._clock.now_s)
            self._open[made] = None
            gatherings.update(dict.fromkeys(members[:1] if self._exchange.is_direct else members, made))
        return gatherings

    def _end(self, gathering: RoundInFlight) -> None:
        gathering.is_done = True
        del self._open[gathering]
        self.times.append(gathering.times(self._clock.now_s))
        waiters, gathering.waiters = gathering.waiters, []
        for replica in waiters:
            self._resume(replica)


@dataclass(slots=True, eq=False)
class ConnectionQueue:
    """What the same members send each other in the same stage goes over the same connections: one after another."""

    waiting: list[tuple[RoundInFlight, Callable[[], None]]] = field(default_factory=list)

    def join(self, gathering: RoundInFlight, start: Callable[[], None]) -> None:
        """Start what is sent when it is its turn."""
        gathering.line = self
        self.waiting.append((gathering, start))
        if len(self.waiting) == 1:
            start()

    def leave(self, gathering: RoundInFlight) -> None:
        """Take out what has been sent, or was broken off, and let the next one start."""
        if gathering.line is not self:  # broken off in the instant in which its last bit left
            return
        gathering.line = None
        was_first = self.waiting[0][0] is gathering
        self.waiting = [(other, start) for other, start in self.waiting if other is not gathering]
        if was_first and self.waiting:
            self.waiting[0][1]()


class GroupRoundTracker(RoundTracker):
    """Rounds of groups: one flow a stage for the whole group."""

    _lines: dict[tuple[tuple[int, ...], int], ConnectionQueue]
    _stages: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[LinkStage, ...]]

    def _launch(self, replica: int, gathering: RoundInFlight) -> None:
        gathering.awaited.discard(replica)
        if gathering.moving is None and gathering.line is None and not gathering.is_done:
            self._start_if_due(gathering)

    def _break_off(self, replica: int, gathering: RoundInFlight) -> None:
        if gathering.moving is not None:
            self._network.stop(gathering.moving)
        if gathering.line is not None:
            gathering.line.leave(gathering)
        gathering.attempt += 1

    def _go_on_without(self, replica: int, gathering: RoundInFlight) -> None:
        if replica in gathering.launched:
            gathering.launched.remove(replica)
        gathering.moving = None
        self._start_if_due(gathering)

    def _start_if_due(self, gathering: RoundInFlight) -> None:
        quorum = self._exchange.quorum
        is_due = not gathering.awaited or (quorum is not None and len(gathering.launched) >= quorum)
        if not is_due or not self._lost.isdisjoint(gathering.members):
            return
        if quorum is not None:
            gathering.senders = tuple(sorted(set(gathering.launched) & set(gathering.senders)))
        gathering.started_s = self._clock.now_s
        if len(gathering.members) < 2 or not gathering.senders:
            self._end(gathering)
        else:
            self._next_stage(gathering, self._stages_of(gathering.members, gathering.senders), 0)

    def _stages_of(self, members: tuple[int, ...], senders: tuple[int, ...]) -> tuple[LinkStage, ...]:
        if not hasattr(self, "_stages") or len(self._stages) > 256:  # random groups hardly ever meet again
            self._stages = {}
        if (members, senders) not in self._stages:
            stages = self._exchange.stages(self._cluster, senders=senders, members=members)
            self._stages[members, senders] = stages
        return self._stages[members, senders]

    def _next_stage(self, gathering: RoundInFlight, stages: tuple[LinkStage, ...], number: int) -> None:
        if number == len(stages):
            self._end(gathering)
            return
        attempt = gathering.attempt

        def arrive() -> None:
            if gathering.attempt == attempt:
                self._next_stage(gathering, stages, number + 1)

        flow = self._exchange.flow(stages[number], payload_bits=gathering.payload_bits)
        if not flow.size_bits:
            gathering.moving = self._network.start(flow, arrive)
            return
        if not hasattr(self, "_lines") or len(self._lines) > 256:  # as with the stages; who is in a line keeps it
            self._lines = {}
        line = self._lines.setdefault((gathering.members, number), ConnectionQueue())

        def start() -> None:
            gathering.moving = self._network.start(flow, arrive, has_left=lambda: line.leave(gathering))

        line.join(gathering, start)


class DirectRoundTracker(RoundTracker):
    """Rounds without groups: one flow a replica, to all its peers."""

    def _launch(self, replica: int, gathering: RoundInFlight) -> None:
        gathering.started_s = self._clock.now_s
        others = gathering.members[1:]
        if replica in gathering.senders and others:
            loads, latency_s = self._cluster.spread([replica], others)
            flow = self._exchange.flow(LinkStage(loads=loads, latency_s=latency_s), payload_bits=gathering.payload_bits)
            gathering.moving = self._network.start(flow, self._arriving(replica, others, self._rounds[gathering.id]))
        self._has_come(replica, gathering)

    def _arriving(
        self, sender: int, others: tuple[int, ...], gatherings: dict[int, RoundInFlight]
    ) -> Callable[[], None]:  # fmt: skip
        def arrive() -> None:
            for other in others:
                if sender not in self._lost:
                    self._has_come(sender, gatherings[other])

        return arrive

    def _has_come(self, sender: int, gathering: RoundInFlight) -> None:
        gathering.awaited.discard(sender)
        is_complete = not gathering.awaited and bool(gathering.launched)
        if is_complete and not gathering.is_done and gathering in self._open:
            self._end(gathering)

    def _break_off(self, replica: int, gathering: RoundInFlight) -> None:
        if gathering.members[0] == replica and gathering.moving is not None:
            self._network.stop(gathering.moving)

    def _go_on_without(self, replica: int, gathering: RoundInFlight) -> None:
        if replica in gathering.launched or self._rounds.get(gathering.id, {}).get(replica) is gathering:
            del self._open[gathering]  # its own: nobody waits for what it would have got
        else:
            self._has_come(replica, gathering)


def make_tracker(
    exchange: ExchangeModel, *, cluster: SimCluster, payload_bytes: Sequence[Sequence[float]], network: FluidNetwork,
    clock: VirtualClock, alive: Callable[[], tuple[int, ...]], resume: Callable[[int], None],
) -> RoundTracker:  # fmt: skip
    """Return the book for an exchange; see `RoundTracker` for the arguments."""
    kind = DirectRoundTracker if exchange.is_direct else GroupRoundTracker
    return kind(
        exchange, cluster=cluster, payload_bytes=payload_bytes, network=network, clock=clock, alive=alive, resume=resume
    )
