"""State of the round engine: held between two steps, saved, restored, or adopted by another set of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from thinwire.averaging.round_context import Average
from thinwire.errors import CheckpointError
from thinwire.sync.counters import UncountedWork
from thinwire.sync.in_flight import Arrived, InFlight
from thinwire.sync.schedule import Round

if TYPE_CHECKING:
    from thinwire.sync.round_engine import RoundEngine


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


def flight_to_state(round: Round, average: Average) -> dict[str, Any]:
    """Return a round and its result; progress of the others is not stored, since all resume from one step."""
    state: dict[str, Any] = {"id": round.id, "mean": average.mean, "round": asdict(round)}
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


def save_state(engine: RoundEngine) -> dict[str, Any]:
    """Return global values, momenta and rounds in flight; waits for those to arrive, but does not apply them."""
    flights = [flight_to_state(flight.round, engine.wait(flight)) for flight in engine.state.in_flight.values()]
    return {
        **_identity(engine),
        "global": engine.view.parameters.state_dict(),
        "update": engine.update.state_dict(),
        "exchanges": {str(channel): exchange.state_dict() for channel, exchange in enumerate(engine.exchanges)},
        "in_flight": flights,
        "taken_early": sorted(engine.state.applied_early),
        "work": engine.state.work.state_dict(),
    }


def load_state(engine: RoundEngine, state: Mapping[str, Any]) -> None:
    """Restore what `save_state` returned.

    Raises:
        CheckpointError: It is of another method, replica, number of replicas or model.
    """
    for name, expected in _identity(engine).items():
        if state.get(name) != expected:
            raise CheckpointError(f"the checkpoint's {name} is {state.get(name)!r}, this run's is {expected!r}")
    _load_common(engine, state)
    for channel, exchange in enumerate(engine.exchanges):
        exchange.load_state_dict(state["exchanges"][str(channel)])


def adopt_state(engine: RoundEngine, state: Mapping[str, Any]) -> tuple[str, ...]:
    """Adopt the state of a run with another number of replicas, or of another replica of it.

    Global values and momenta stay. Rounds in flight, which have arrived, are applied when they are due, as those that
    took part made them. Residuals of exchanges stay where they still hold.

    Returns:
        What was reset, a line each.

    Raises:
        CheckpointError: It is of another method or model, or its replicas hold different global values.
    """
    method, replica = engine.method, engine.transport.replica
    if not method.has_common_value:
        raise CheckpointError(
            f"{method.name} keeps a model of its own on each replica, so a state of one of "
            f"{state.get('num_replicas')} replicas says nothing for {engine.transport.num_replicas}; end that run "
            f"with its final exchange, and start from the model"
        )
    before = state.get("num_replicas")
    if not isinstance(before, int) or before < 1:
        raise CheckpointError(f"the checkpoint's num_replicas must be at least 1, got {before!r}; it is damaged")
    expected = method.describe(num_replicas=before)
    if state.get("method") != expected:
        raise CheckpointError(f"the checkpoint's method is {state.get('method')!r}, this run's is {expected!r}")
    is_own = state.get("replica") == replica
    _load_common(engine, state)
    reset = []
    if not is_own and engine.view.parameters.forget_locals():
        reset.append(f"local parameters: what replica {state.get('replica')} has trained since its last exchange")
    reset += [
        f"channel {channel}, {line}"
        for channel, exchange in enumerate(engine.exchanges)
        for line in exchange.adopt(state["exchanges"][str(channel)], is_own=is_own)
    ]
    return tuple(reset)


def _identity(engine: RoundEngine) -> dict[str, Any]:
    count = engine.transport.num_replicas
    method = engine.method.describe(num_replicas=count)
    return {"method": method, "replica": engine.transport.replica, "num_replicas": count}


def _load_common(engine: RoundEngine, state: Mapping[str, Any]) -> None:
    engine.view.parameters.load_state_dict(state["global"])
    engine.update.load_state_dict(state["update"])
    engine.catch_up.reset()
    flights = [flight_from_state(flight) for flight in state["in_flight"]]
    engine.state.in_flight = {flight.round.id: flight for flight in flights}
    engine.state.applied_early = set(state["taken_early"])
    engine.state.work.load_state_dict(state["work"])
    engine.state.failed, engine.state.settling = None, []
