"""Rounds whose result has arrived, as they stand in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.averaging.round_context import Average
from thinwire.sync.in_flight import Arrived
from thinwire.sync.schedule import Round


def flight_to_state(round: Round, average: Average) -> dict[str, Any]:
    """Return a round and its result; how far others were then is forgotten, since all go on from one step."""
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
    """Take back what `flight_to_state` returned."""
    parts = {int(replica): part.clone() for replica, part in state.get("parts", {}).items()}
    average = Average(
        mean=state["mean"].clone(), reference_hashes={}, parts=parts, members=tuple(state.get("members", ())),
        is_counted=state.get("is_counted", True),
    )  # fmt: skip
    return Arrived(average, round=Round(**state["round"]))
