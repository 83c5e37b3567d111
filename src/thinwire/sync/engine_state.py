"""State of optimizer and round engine as it is saved, restored, or adopted by another set of replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from thinwire import tagged_state
from thinwire.averaging.round_context import Average
from thinwire.errors import CheckpointError
from thinwire.sync.in_flight import InFlight
from thinwire.sync.portable_state import StateLayout, from_portable
from thinwire.sync.round_engine import RoundEngine
from thinwire.sync.schedule import Round

STATE_VERSION = 2
# In the first parameter group of a state, where torch's checkpoint functions keep what they do not know.
OWN_STATE = "thinwire"
OWN_KEYS = {"version", "sync", "steps_done", "buffer_rounds", "gradient_rounds"}
_STATE_KEYS = {"state", "param_groups", *OWN_KEYS}


def checked_state(state_dict: dict[str, Any], layout: StateLayout | None = None) -> dict[str, Any]:
    """Return a state of a `DistributedOptimizer` with all its keys at the top, and the inner optimizer's groups alone.

    Accepted are what `state_dict` returns, and what torch's `get_optimizer_state_dict` leaves of it.

    Raises:
        CheckpointError: Something is missing, or it is of another version.
    """
    groups = [dict(group) for group in state_dict.get("param_groups", ())]
    own = groups[0].pop(OWN_STATE, None) if groups else None
    is_whole = set(state_dict) >= OWN_KEYS
    own = {} if own is None or layout is None or is_whole else from_portable(own, layout)
    state_dict = {**own, **state_dict, "param_groups": groups}
    if missing := _STATE_KEYS - set(state_dict):
        raise CheckpointError(
            f"this is no state of a DistributedOptimizer; it lacks {sorted(missing)}; load what its "
            f"state_dict() returned"
        )
    if state_dict["version"] != STATE_VERSION:
        raise CheckpointError(
            f"the state has version {state_dict['version']}; this thinwire reads {STATE_VERSION}; resume with the "
            f"thinwire that wrote it, or begin anew from its model"
        )
    return state_dict


def schedule_step(state_dict: dict[str, Any]) -> int:
    """Return the last step of the schedule; where steps are local it was not saved apart from them."""
    return max(int(state_dict["steps_done"]), int(state_dict["gradient_rounds"]))


def flight_to_state(round: Round, average: Average) -> dict[str, Any]:
    """Return a round and its result; progress of the others is not stored, since all resume from one step."""
    state: dict[str, Any] = {"id": round.id, "mean": average.mean, "round": asdict(round)}
    if average.parts:
        state["parts"] = {str(replica): part for replica, part in average.parts.items()}
    if average.members:
        state |= {"members": list(average.members), "is_counted": average.is_counted}
    return state


def flight_from_state(state: Mapping[str, Any]) -> InFlight:
    """Restore what `flight_to_state` returned."""
    parts = {int(replica): part.clone() for replica, part in state.get("parts", {}).items()}
    average = Average(
        mean=state["mean"].clone(), reference_hashes={}, parts=parts, members=tuple(state.get("members", ())),
        is_counted=state.get("is_counted", True),
    )  # fmt: skip
    return InFlight(Round(**state["round"]), average)


def save_state(engine: RoundEngine) -> dict[str, Any]:
    """Return global values, momenta and rounds in flight; waits for those to arrive, but does not apply them."""
    flights = [flight_to_state(flight.round, engine.wait(flight)) for flight in engine.state.in_flight.values()]
    return {
        **_identity(engine),
        "global": engine.view.parameters.state_dict(),
        "sample": engine.view.parameters.sample(),
        "update": tagged_state.save(engine.update_state),
        "exchanges": {str(channel): exchange.state_dict() for channel, exchange in enumerate(engine.exchanges)},
        "in_flight": flights,
        "taken_early": sorted(engine.state.applied_early),
        "work": engine.state.work.state_dict(),
    }


def load_state(engine: RoundEngine, state: Mapping[str, Any]) -> None:
    """Restore what `save_state` returned.

    Raises:
        CheckpointError: It is of another method, replica, number of replicas or model, or a key is missing.
    """
    with naming_missing_keys():
        _load(engine, state)


@contextmanager
def naming_missing_keys() -> Iterator[None]:
    """Turn the error of a key that a state lacks into one that says so."""
    try:
        yield
    except (KeyError, IndexError) as error:
        raise CheckpointError(
            f"the state lacks {error}: what carried it dropped it; load what state_dict() returned, or save by "
            f"thinwire.integrations.dcp"
        ) from error


def _load(engine: RoundEngine, state: Mapping[str, Any]) -> None:
    for name, expected in _identity(engine).items():
        if state.get(name) != expected:
            raise CheckpointError(
                f"the checkpoint's {name} is {state.get(name)!r}, this run's is {expected!r}; adopt_state_dict() goes "
                f"on with other options of a method, and says what it drops"
            )
    _load_common(engine, state)
    tagged_state.load(engine.update_state, state["update"])
    for channel, exchange in enumerate(engine.exchanges):
        exchange.load_state_dict(state["exchanges"][str(channel)])


def adopt_state(engine: RoundEngine, state: Mapping[str, Any], *, step: int) -> tuple[str, ...]:
    """Adopt the state of a run with another number of replicas or other options of the method, or of another replica.

    Global values and momenta stay. Rounds in flight, which have arrived, are applied when they are due, as those that
    took part made them; by another schedule they never are, and their work goes into the next rounds. Residuals of
    exchanges stay where they still hold.

    Args:
        engine: The engine.
        state: What `save_state` returned.
        step: The step that the schedule had come to.

    Returns:
        What was reset or dropped, a line each.

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
        raise CheckpointError(
            f"the checkpoint's num_replicas must be at least 1, got {before!r}; it is damaged, take an earlier one"
        )
    has_other_schedule, has_other_parts = _compare_methods(state.get("method"), method.describe(num_replicas=before))
    is_own = state.get("replica") == replica
    _load_common(engine, state)
    if (sample := state.get("sample")) is not None and not engine.view.parameters.is_loaded(sample):
        raise CheckpointError(
            f"the model does not hold what replica {state.get('replica')} had trained when it saved this state; load "
            f"its model first, with model.load_state_dict(...), then call adopt_state_dict()"
        )
    reset = []
    if not is_own and engine.view.parameters.forget_locals():
        reset.append(f"local parameters: what replica {state.get('replica')} has trained since its last exchange")
    if has_other_schedule:
        reset += _drop_rounds(engine, step=step)
    parts: list[tuple[str, Callable[[], Sequence[str]], Callable[[], None]]] = [
        ("outer state", partial(tagged_state.adopt, engine.update_state, state["update"], is_own=is_own), lambda: None)
    ]
    for channel, exchange in enumerate(engine.exchanges):
        fresh, saved = copy.deepcopy(exchange.state_dict()), state["exchanges"][str(channel)]
        take = partial(exchange.adopt, saved, is_own=is_own)
        parts.append((f"channel {channel}", take, partial(exchange.load_state_dict, fresh)))
    for name, adopt, undo in parts:
        try:
            reset += [f"{name}, {line}" for line in adopt()]
        except CheckpointError as error:
            if not has_other_parts:
                raise
            undo()
            reset.append(f"{name}: {error}")
    return tuple(reset)


def _compare_methods(found: object, expected: str) -> tuple[bool, bool]:
    """Return whether the schedule differs between two descriptions of one method, and whether another part does.

    Raises:
        CheckpointError: They are of different methods.
    """
    (there, *others), (here, *own) = (str(one).split(" | ") for one in (found, expected))
    if there.split(":")[0] != here.split(":")[0] or len(others) != len(own):
        raise CheckpointError(
            f"the checkpoint's method is {found!r}, this run's is {expected!r}; resume with its method, or begin anew "
            f"from its model"
        )
    return there != here, others != own


def _drop_rounds(engine: RoundEngine, *, step: int) -> list[str]:
    """Drop the rounds of another schedule, and those that this one would have in flight after a step."""
    dropped = engine.in_flight
    for round in dropped:
        engine.state.work.discard(round)
    engine.state.in_flight = {}
    # twice the interval is the longest that a round is under way
    to_come = range(step + 1, step + 1 + 2 * engine.method.schedule.sync_interval)
    missing = {round.id for one in to_come for round in engine.applies(one) if round.launch_step <= step}
    if len(engine.exchanges) > 1 and (missing or dropped):
        raise CheckpointError(
            f"{engine.method.name} sends several things that belong together, and some were under way; end that run "
            f"with its final exchange, or save where none is, and resume with another schedule from there"
        )
    engine.state.applied_early = missing
    ids = ", ".join(str(round.id) for round in dropped)
    return [f"the rounds in flight (number {ids}): what they hold goes into the next ones"] if dropped else []


def _identity(engine: RoundEngine) -> dict[str, Any]:
    count = engine.transport.num_replicas
    method = engine.method.describe(num_replicas=count)
    return {"method": method, "replica": engine.transport.replica, "num_replicas": count}


def _load_common(engine: RoundEngine, state: Mapping[str, Any]) -> None:
    engine.view.parameters.load_state_dict(state["global"])
    engine.catch_up.reset()
    flights = [flight_from_state(flight) for flight in state["in_flight"]]
    engine.state.in_flight = {flight.round.id: flight for flight in flights}
    engine.state.applied_early = set(state["taken_early"])
    engine.state.work.load_state_dict(state["work"])
    engine.state.failed, engine.state.settling = None, []
