"""State that an exchange keeps between rounds, by fragment and encode stage."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.averaging.encode_stage import EncodeStage
from thinwire.errors import CheckpointError

if TYPE_CHECKING:
    from thinwire.averaging.exchange import Exchange

_MEMORIES = {"out": "what was not sent yet", "mean": "what the owner of a part remembers of its means"}


class ExchangeState:
    """The state of an exchange, by fragment and stage: base class of the bound exchanges."""

    def __init__(self, spec: Exchange, stages: Sequence[Mapping[str, EncodeStage]]) -> None:
        self._spec = spec
        self._stages = stages

    @property
    def has_memory(self) -> bool:
        """See `BoundExchange.has_memory`."""
        return any(stage.has_memory for stages in self._stages for stage in stages.values())

    def sent_bytes(self, numel: int, *, num_replicas: int) -> int:
        """See `BoundExchange.sent_bytes`."""
        return self._spec.sent_bytes(numel, num_replicas=num_replicas)

    def shared_hash(self, fragment: int) -> int:
        """See `BoundExchange.shared_hash`."""
        found = 0
        for stage in self._stages[fragment].values():
            # chained over the stages; sent with the reference hash, so that members whose state diverged find out
            if stage.shared is not None:
                found = zlib.crc32(stage.shared.cpu().numpy().tobytes(), found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """See `BoundExchange.state_dict`."""
        return {
            str(fragment): {name: stage.state_dict() for name, stage in stages.items() if stage.has_memory}
            for fragment, stages in enumerate(self._stages)
            if self.has_memory
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `BoundExchange.load_state_dict`."""
        own = self.state_dict()
        if set(state) != set(own) or any(set(state[key]) != set(own[key]) for key in own):
            raise CheckpointError(
                f"the checkpoint remembers {_names(state)} of its exchanges, this run {_names(own)}; resume with its "
                f"method"
            )
        for fragment, stages in state.items():
            for name, vectors in stages.items():
                self._stages[int(fragment)][name].load_state_dict(vectors)

    def adopt(self, state: Mapping[str, Any], *, is_own: bool) -> tuple[str, ...]:
        """See `BoundExchange.adopt`: what a replica remembers of its own sending stays with it.

        What receivers hold too must be the same on all, also on those that are new, and an owner's part is another one
        where the number of replicas is another.
        """
        anew = []
        for fragment, stages in enumerate(self._stages):
            for name, stage in stages.items():
                saved = state.get(str(fragment), {}).get(name)
                if stage.has_memory and saved is not None and is_own and name == "out" and stage.shared is None:
                    stage.load_state_dict(saved)
                elif stage.has_memory:
                    stage.forget()
                    anew.append(f"fragment {fragment}: {_MEMORIES[name]}")
        return tuple(anew)


def _names(state: Mapping[str, Any]) -> str:
    return ", ".join(f"{fragment}/{name}" for fragment, stages in state.items() for name in stages) or "nothing"
