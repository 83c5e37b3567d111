"""Layout of a `DistributedOptimizer`'s state: the inner optimizer's, and thinwire's own beside it."""

from __future__ import annotations

from typing import Any

from thinwire.errors import CheckpointError

STATE_VERSION = 2
# In the first parameter group of a state, where torch's checkpoint functions keep what they do not know.
OWN_STATE = "thinwire"
OWN_KEYS = {"version", "sync", "steps_done", "buffer_rounds", "gradient_rounds"}
_STATE_KEYS = {"state", "param_groups", *OWN_KEYS}


def checked_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state of a `DistributedOptimizer` with all its keys at the top, and the inner optimizer's groups alone.

    Accepted are what `state_dict` returns, and what torch's `get_optimizer_state_dict` leaves of it.

    Raises:
        CheckpointError: Something is missing, or it is of another version.
    """
    groups = [dict(group) for group in state_dict.get("param_groups", ())]
    own = groups[0].pop(OWN_STATE, {}) if groups else {}
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
