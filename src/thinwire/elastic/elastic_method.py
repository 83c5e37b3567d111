"""Elastic variant of a method: same schedule, view and step, with peers chosen by an elastic session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import nn

from thinwire.averaging.exchange import Exchange
from thinwire.averaging.topology import AllReplicas, Peers
from thinwire.elastic.elastic_mean import elastic_mean
from thinwire.elastic.round_driver import ReplicaRounds
from thinwire.sync.fragments import find_blocks
from thinwire.sync.method import Method
from thinwire.sync.updates import LateOuterStep, OuterStep, Update
from thinwire.sync.views import GlobalParameters, PseudoGradient
from thinwire.sync.weight_copies import copies_of

# A replica that sleeps may wake any number of intervals later.
_ANY = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """The replicas that take part at present."""

    session: ReplicaRounds | None = field(compare=False, repr=False)

    def peers(self, *, round_id: int, me: int, alive: Sequence[int]) -> Peers:
        assert self.session is not None, "made to be checked only"
        return Peers(me=me, members=self.session.active())


def elastic(
    method: Method, *, session: ReplicaRounds | None,
    find: Callable[[str], None] = lambda text: None, pieces: ReplicaShards | None = None,
) -> Method:  # fmt: skip
    """Return a method's variant for replicas that come and go.

    What a replica has trained that no round counted stays with it and counts later, by its tokens.

    Args:
        method: One whose rounds average pseudo-gradients over all replicas.
        session: This replica's rounds; None where the method is only checked.
        find: Called with a text for each part that was refused or shortened.
        pieces: Reaches the shards of a replica of several ranks, at the one of them that leads.

    Raises:
        ValueError: The method depends on who its replicas are; names what does.
    """
    if not isinstance(method.topology, AllReplicas) or not method.has_common_value:
        raise ValueError(
            f"{method.name} exchanges with chosen replicas, which would have to be chosen anew whenever one comes or "
            f"goes; for elastic runs take iso-loco, streaming-diloco, diloco, local-sgd or slowmo"
        )
    if type(method.view) is not PseudoGradient:
        raise ValueError(
            f"{method.name} exchanges more than plain pseudo-gradients, so a replica that comes could not begin from "
            f"the global parameters; for elastic runs take iso-loco, streaming-diloco, diloco, local-sgd or slowmo"
        )

    def exchanges(count: int) -> tuple[Exchange, ...]:
        found = method.exchanges(count)
        return tuple(elastic_mean(one, session=session, find=find) for one in found)

    def last(count: int) -> Exchange:
        own = method.exchanges(count)[0] if method.last_exchange is None else method.last_exchange(count)
        return elastic_mean(own, session=session, find=find)

    exchanges(2), _with_late_parts(method.update(2), method.name)  # a method that cannot is refused here
    view = (
        method.view if pieces is None else ShardedReplicaPseudoGradient(fragments=method.view.fragments, pieces=pieces)
    )
    return replace(
        method, view=view, topology=Present(session=session), exchange=exchanges, last_exchange=last,
        update=lambda count: _with_late_parts(method.update(count), method.name), drift_intervals=_ANY,
    )  # fmt: skip


def _with_late_parts(update: Update, name: str) -> Update:
    if isinstance(update, OuterStep | LateOuterStep):
        return LateOuterStep(optimizer=update.optimizer, blend=update.blend)
    raise ValueError(
        f"{name} applies means by {type(update).__name__}, which counts on its own part being in each; for elastic "
        f"runs take iso-loco, streaming-diloco, diloco, local-sgd or slowmo"
    )


class ReplicaShards(Protocol):
    """A replica's local parameters on all of its ranks, seen from the rank that leads."""

    def gather(self, names: Sequence[str]) -> torch.Tensor:
        """Return tensors whole, one behind the other: float32, `(numel,)`, new, on the leading rank's device."""
        ...

    def scatter(self, names: Sequence[str], values: torch.Tensor, *, blend: float = 0.0) -> None:
        """Set tensors to `blend * their own + (1 - blend) * values`; `values` as `gather` returns them."""
        ...

    def keep(self) -> None:
        """Let every rank copy its shards aside."""
        ...

    def restore(self) -> None:
        """Let every rank put back what it copied aside, bit for bit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedReplicaPseudoGradient(PseudoGradient):
    """See `PseudoGradient`; of a model whose other shards are on other ranks, which `pieces` reaches."""

    pieces: ReplicaShards = field(compare=False, repr=False)

    def cut(self, model: nn.Module, inner: torch.optim.Optimizer | None) -> GlobalParameters:
        copies = copies_of(inner)
        copies.check()
        if copies.tensors():
            raise ValueError(
                f"{type(inner).__name__} keeps copies of the weights, which a replica of several ranks does not "
                f"gather; take one that steps the parameters themselves, such as torch.optim.AdamW"
            )
        return ShardedReplicaParameters(model, self.fragments.partition(find_blocks(model)), pieces=self.pieces)


class ShardedReplicaParameters(GlobalParameters):
    """See `GlobalParameters`; values are whole, and the local ones are gathered and scattered.

    Args:
        model: This rank's part of the model: DTensors, which know their whole shapes.
        fragments: The names of each fragment's parameters.
        pieces: Reaches all shards.
    """

    def __init__(self, model: nn.Module, fragments: Sequence[Sequence[str]], *, pieces: ReplicaShards) -> None:
        self._pieces = pieces
        super().__init__(model, fragments)

    def locals(self, fragment: int) -> list[torch.Tensor]:
        """There are no whole tensors to write into; see `read` and `write`."""
        raise NotImplementedError("the local parameters lie on several ranks; use read() and write()")

    def shapes(self, fragment: int) -> tuple[torch.Size, ...]:
        """See `GlobalParameters.shapes`: whole ones."""
        return tuple(parameter.shape for parameter in self.parameters[fragment])

    def held_dtypes(self, fragment: int) -> tuple[torch.dtype, ...]:
        return tuple(parameter.dtype for parameter in self.parameters[fragment])

    @property
    def is_sharded(self) -> bool:
        """Never: what is exchanged and applied here is whole."""
        return False

    def read(self, fragment: int) -> torch.Tensor:
        return self._pieces.gather(self.fragments[fragment])

    def write(self, fragment: int, value: torch.Tensor) -> None:
        self._pieces.scatter(self.fragments[fragment], value)

    def read_whole(self, name: str) -> torch.Tensor:
        tensor = self._by_name[name]
        return self._pieces.gather([name]).view(tensor.shape).to(tensor.dtype).cpu()

    def write_whole(self, name: str, value: torch.Tensor) -> None:
        self._pieces.scatter([name], value.reshape(-1).float())

    def blend_into_locals(self, fragment: int, *, blend: float, value: torch.Tensor | None = None) -> None:
        """See `GlobalParameters.blend_into_locals`; each rank blends its own shards, which travel from host memory."""
        self._pieces.scatter(self.fragments[fragment], self.values[fragment], blend=blend)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        self._pieces.keep()
        try:
            for fragment in range(self.num_fragments):
                self.blend_into_locals(fragment, blend=0.0)
            yield
        finally:
            self._pieces.restore()
