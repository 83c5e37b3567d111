"""State of the engine: saved, restored, or adopted by another set of replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thinwire.averaging.exchange import BoundExchange
from thinwire.averaging.round_context import Average
from thinwire.errors import CheckpointError, DesyncError
from thinwire.events import RoundMark
from thinwire.sync.catch_up import CatchUp, QuorumCatchUp
from thinwire.sync.in_flight import Arrived, InFlight
from thinwire.sync.method import Method
from thinwire.sync.schedule import Round
from thinwire.sync.uncounted_work import UncountedWork
from thinwire.sync.updates import BoundUpdate
from thinwire.sync.views import BoundView
from thinwire.transport.base import Transport


def flight_to_state(round: Round, average: Average) -> dict[str, Any]:
    """Return a round and its result; progress of the others is not stored, since all resume from one step."""
    state: dict[str, Any] = {
        "id": round.id,
        "mean": average.mean,
        "round": {
            "id": round.id,
            "fragment": round.fragment,
            "launch_step": round.launch_step,
            "apply_step": round.apply_step,
            "channel": round.channel,
        },
    }
    if average.parts:
        state["parts"] = {str(replica): part for replica, part in average.parts.items()}
    if average.members:
        state |= {"members": list(average.members), "is_counted": average.is_counted}
    return state


def flight_from_state(state: Mapping[str, Any]) -> Arrived:
    """Restore what `flight_to_state` returned."""
    parts = {int(replica): part.clone() for replica, part in state.get("parts", {}).items()}
    average = Average(
        mean=state["mean"].clone(), reference_hashes={}, parts=parts, members=tuple(state.get("members", ())),
        is_counted=state.get("is_counted", True),
    )  # fmt: skip
    return Arrived(average, round=Round(**state["round"]))


class EngineState:
    """The part of an engine that knows its state; see `Engine`."""

    method: Method
    transport: Transport
    view: BoundView
    update: BoundUpdate
    work: UncountedWork
    _exchanges: Sequence[BoundExchange]
    _in_flight: dict[int, InFlight]
    _taken_early: set[int]
    _settling: list[InFlight]
    _failed: Round | None
    _drift_steps: int
    _pace_maker: CatchUp
    on_exchanged: Callable[[int], None]
    """Told, in order, of each step whose rounds are all launched and applied, also of those passed over; the global
    parameters are then those that hold after that step."""
    on_applied: Callable[[Round, Average], None]
    """Told of each round that was applied, and of the mean that was."""
    is_whole: Callable[[], bool]
    """Whether what the update remembers is here. Until then no round is applied; where training goes on while rounds
    are overdue, it goes on then too."""
    make_whole: Callable[[], None]
    """Waits for what the update remembers, and takes it in."""
    on_round: Callable[[RoundMark], None]
    """Told of each round when it is launched and when its result is there; it may be called from another thread."""

    def _mark(self, round: Round, tensor: torch.Tensor) -> Callable[[], None]:
        """Report a launched round; return the callback that reports its result."""
        num_elements, dtype = tensor.numel(), str(tensor.dtype).removeprefix("torch.")

        def report(*, is_done: bool = True) -> None:
            self.on_round(
                RoundMark(
                    round_id=round.id, num_elements=num_elements, dtype=dtype, is_done=is_done, at_s=time.monotonic()
                )
            )

        report(is_done=False)
        return report

    def _refuse_after_failed_round(self) -> None:
        if self._failed is None:
            return
        fragment, channel = self._failed.fragment, self._failed.channel
        if self._exchanges[channel].shared_hash(fragment):
            raise DesyncError(
                f"round {self._failed.id} failed on replica {self.transport.replica}, and others may have taken it in, "
                f"so that what {self.method.name} remembers at both ends differs from here on; resume all replicas "
                f"from a checkpoint before that"
            )

    def _arrival(self, flight: InFlight) -> Average:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return global values, momenta and rounds in flight; waits for those to arrive, but does not apply them."""
        flights = []
        for flight in self._in_flight.values():
            average = self._arrival(flight)
            flights.append(flight_to_state(flight.round, average))
        return {
            **self._identity(),
            "global": self.view.parameters.state_dict(),
            "update": self.update.state_dict(),
            "exchanges": {str(channel): exchange.state_dict() for channel, exchange in enumerate(self._exchanges)},
            "in_flight": flights,
            "taken_early": sorted(self._taken_early),
            "work": self.work.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: It is of another method, replica, number of replicas or model.
        """
        for field, expected in self._identity().items():
            if state.get(field) != expected:
                raise CheckpointError(f"the checkpoint's {field} is {state.get(field)!r}, this run's is {expected!r}")
        self._load_common(state)
        for channel, exchange in enumerate(self._exchanges):
            exchange.load_state_dict(state["exchanges"][str(channel)])

    def adopt(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Adopt the state of a run with another number of replicas, or of another replica of it.

        Global values and momenta stay; rounds in flight, which have arrived, are applied when they are due, as those
        that took part made them; what exchanges remember stays where it still holds.

        Returns:
            What was reset, a line each.

        Raises:
            CheckpointError: It is of another method or model, or its replicas hold different global values.
        """
        if not self.method.has_common_value:
            raise CheckpointError(
                f"{self.method.name} keeps a model of its own on each replica, so a state of one of "
                f"{state.get('num_replicas')} replicas says nothing for {self.transport.num_replicas}; end that run "
                f"with its final exchange, and start from the model"
            )
        before = state.get("num_replicas")
        if not isinstance(before, int) or before < 1:
            raise CheckpointError(f"the checkpoint's num_replicas must be at least 1, got {before!r}; it is damaged")
        expected = self.method.describe(num_replicas=before)
        if state.get("method") != expected:
            raise CheckpointError(f"the checkpoint's method is {state.get('method')!r}, this run's is {expected!r}")
        is_own = state.get("replica") == self.transport.replica
        self._load_common(state)
        anew = []
        if not is_own and self.view.parameters.forget_locals():
            anew.append(f"local parameters: what replica {state.get('replica')} has trained since its last exchange")
        anew += [
            f"channel {channel}, {line}"
            for channel, exchange in enumerate(self._exchanges)
            for line in exchange.adopt(state["exchanges"][str(channel)], is_own=is_own)
        ]
        return tuple(anew)

    def _identity(self) -> dict[str, Any]:
        count = self.transport.num_replicas
        method = self.method.describe(num_replicas=count)
        return {"method": method, "replica": self.transport.replica, "num_replicas": count}

    def _load_common(self, state: Mapping[str, Any]) -> None:
        self.view.parameters.load_state_dict(state["global"])
        self.update.load_state_dict(state["update"])
        self._failed, self._settling = None, []
        self._pace_maker = QuorumCatchUp(self.work, drift_steps=self._drift_steps)
        flights = [flight_from_state(flight) for flight in state["in_flight"]]
        self._in_flight = {flight.round.id: flight for flight in flights}
        self._taken_early = set(state["taken_early"])
        self.work.load_state_dict(state["work"])
