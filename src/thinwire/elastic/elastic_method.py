"""Elastic variant of a method: same schedule, view and step, with peers chosen by an elastic session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from thinwire.averaging.exchange import Exchange
from thinwire.averaging.topology import AllReplicas, Peers
from thinwire.elastic.elastic_mean import ElasticSession, elastic_mean
from thinwire.elastic.sharded_replica_view import ReplicaShards, ShardedReplicaPseudoGradient
from thinwire.errors import CheckpointError
from thinwire.sync.late_outer_step import LateOuterStep
from thinwire.sync.method import Method
from thinwire.sync.round_engine import RoundEngine
from thinwire.sync.updates import OuterStep, Update
from thinwire.sync.views import PseudoGradient

# A replica that sleeps may wake any number of intervals later.
_ANY = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """The replicas that take part at present.

    Args:
        seat: Knows them.
    """

    seat: ElasticSession = field(compare=False, repr=False)

    def peers(self, *, round_id: int, me: int, alive: Sequence[int]) -> Peers:
        """See `Topology.peers`."""
        return Peers(me=me, members=self.seat.active())


def elastic(
    method: Method, *, seat: ElasticSession, preserve_norm: bool = False,
    find: Callable[[str], None] = lambda text: None, pieces: ReplicaShards | None = None,
) -> Method:  # fmt: skip
    """Return a method's variant for replicas that come and go.

    What a replica has trained that no round counted stays with it and counts later, by its tokens.

    Args:
        method: One whose rounds average pseudo-gradients over all replicas.
        seat: This replica's session.
        preserve_norm: Whether the mean keeps the length of a single replica's part, tensor by tensor.
        find: Called with a text for each part that was refused or shortened.
        pieces: Reaches the shards of a replica of several ranks, at the one of them that leads.

    Raises:
        ValueError: The method depends on who its replicas are; names what does.
    """
    if not isinstance(method.topology, AllReplicas) or not method.has_common_value:
        raise ValueError(
            f"{method.name} exchanges with chosen replicas, which would have to be chosen anew whenever one comes or "
            f"goes; for elastic runs take diloco, streaming-diloco, local-sgd or slowmo"
        )
    if type(method.view) is not PseudoGradient:
        raise ValueError(
            f"{method.name} exchanges more than plain pseudo-gradients, so a replica that comes could not begin from "
            f"the global parameters; for elastic runs take diloco, streaming-diloco, local-sgd or slowmo"
        )

    def exchanges(count: int) -> tuple[Exchange, ...]:
        found = method.exchanges(count)
        return tuple(elastic_mean(one, seat=seat, preserve_norm=preserve_norm, find=find) for one in found)

    def last(count: int) -> Exchange:
        own = method.exchanges(count)[0] if method.last_exchange is None else method.last_exchange(count)
        return elastic_mean(own, seat=seat, preserve_norm=preserve_norm, find=find)

    exchanges(2), _with_late_parts(method.update(2), method.name)  # a method that cannot is refused here
    view = (
        method.view if pieces is None else ShardedReplicaPseudoGradient(fragments=method.view.fragments, pieces=pieces)
    )
    return replace(
        method, view=view, topology=Present(seat=seat), exchange=exchanges, last_exchange=last,
        update=lambda count: _with_late_parts(method.update(count), method.name), drift_intervals=_ANY,
    )  # fmt: skip


def _with_late_parts(update: Update, name: str) -> Update:
    if isinstance(update, OuterStep | LateOuterStep):
        return LateOuterStep(optimizer=update.optimizer, blend=update.blend)
    raise ValueError(
        f"{name} applies means by {type(update).__name__}, which counts on its own part being in each; for elastic "
        f"runs take diloco, streaming-diloco, local-sgd or slowmo"
    )


def global_tensors(engine: RoundEngine, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return copies of the global parameters by name, and of what the outer optimizer remembers by fragment.

    Between the rounds of two steps they are the same bits on all replicas. Parameters that are not trained are there
    too, and buffers are not.
    """
    values = engine.view.parameters
    parameters = {name: values.read_whole(name) for name, p in model.named_parameters() if not p.requires_grad}
    for names, tensors, vector in zip(values.fragments, values.parameters, values.values, strict=True):
        start = 0
        for name, tensor in zip(names, tensors, strict=True):
            parameters[name] = vector[start : start + tensor.numel()].clone().view(tensor.shape)
            start += tensor.numel()
    outer = {f"momentum.{fragment}": vector.clone() for fragment, vector in engine.update.state_dict().items()}
    return parameters, outer


def load_global_tensors(
    engine: RoundEngine, model: nn.Module, parameters: dict[str, torch.Tensor], outer: dict[str, torch.Tensor]
) -> None:
    """Take over what `global_tensors` returned on another replica; local parameters become the global ones.

    Raises:
        CheckpointError: It is of another model or method.
    """
    load_global_parameters(engine, model, parameters)
    load_outer(engine, outer)


def load_outer(engine: RoundEngine, outer: dict[str, torch.Tensor]) -> None:
    """Take over what another replica's outer optimizer remembers.

    Raises:
        CheckpointError: It is of another model or method.
    """
    engine.update.load_state_dict({key.removeprefix("momentum."): vector for key, vector in outer.items()})


def load_global_parameters(engine: RoundEngine, model: nn.Module, parameters: dict[str, torch.Tensor]) -> None:
    """Take over another replica's global parameters alone; local parameters become those.

    Raises:
        CheckpointError: They are of another model.
    """
    values = engine.view.parameters
    own = dict(model.named_parameters())
    if set(parameters) != set(own):
        raise CheckpointError(
            f"the state has {len(parameters)} parameters, this model {len(own)}; all replicas must train the same model"
        )
    vectors = {}
    for fragment, names in enumerate(values.fragments):
        vectors[str(fragment)] = torch.cat([parameters[name].reshape(-1).float() for name in names])
    with torch.no_grad():
        for name, parameter in own.items():
            if parameters[name].shape != parameter.shape:
                raise CheckpointError(
                    f"{name} has the shape {tuple(parameters[name].shape)} in the state, {tuple(parameter.shape)} here"
                )
            if not parameter.requires_grad:
                values.write_whole(name, parameters[name])
        values.load_state_dict(vectors)
        values.forget_locals()
