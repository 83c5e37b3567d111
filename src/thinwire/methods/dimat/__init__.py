"""DIMAT: decentralised training by merging models with those of the neighbours (arXiv 2404.08079).

Replicas stand in a graph. Every H inner steps replica i gets the models of its neighbours j and takes

    theta_i = w_ii theta_i + sum_j w_ij P_ij(theta_j)

with a row of a doubly stochastic matrix w, and with P_ij the permutation of j's hidden units that makes their
activations on some batches correlate best with those of i. Then the statistics of BatchNorm are measured again on these
batches. No replica needs messages of all others, and no value is common to all: each continues with its own model,
and `global_parameters()` shows that.

Matching needs batches of inputs and a convnet or MLP that torch.fx can trace. Without batches units are averaged as
they are, which is decentralised SGD with local steps (D-PSGD, arXiv 1705.09056) and takes any model.

A final exchange yields the plain mean of all replicas' models, which is the same everywhere. It is
a good model where units have kept their order, as they do while replicas that start from one model (as they do here)
stay near each other. Replicas that were given models of their own after the start never agree on an order, since each
merges in its own, and their plain mean computes nothing: for them leave the final exchange out (in Python) and keep any
one of the models.

What we changed: weights follow from the degrees of the graph, where the shipped code writes them down; a replica that
receives from all others still merges on its own, where the shipped code merges once and copies; see `match_and_merge`
for matching. The authors match on one loader that all agents share; here every replica may have batches of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import nn

from thinwire.averaging.exchange import Gossip, cheapest
from thinwire.averaging.mixing import Complete, MixingGraph, Neighbours, Ring, Torus
from thinwire.averaging.round_context import Average
from thinwire.codecs import float32
from thinwire.methods.dimat.matching import MergeMethod, assign, check_whole, match_and_merge, reset_statistics
from thinwire.methods.dimat.permutation_graph import find_permutations
from thinwire.methods.registry import About, register
from thinwire.sync.fragments import Pattern, find_blocks
from thinwire.sync.method import Method
from thinwire.sync.program import LocalSteps, Program
from thinwire.sync.schedule import Round, Staggered
from thinwire.sync.views import BoundView, GlobalParameters, parts_like
from thinwire.transport.shards import flatten, real_shard, unflatten_into

_GRAPHS: dict[str, MixingGraph] = {"ring": Ring(), "torus": Torus(), "complete": Complete()}

ABOUT = About(
    paper="arXiv 2404.08079",
    exchanged="parameters, with the neighbours in a graph, every H steps",
    bits="32 neighbours / H (ring: 64 / H)",
    memory="0; at a merge 1 a neighbour, with matching 2",
    restrictions="replicas keep models of their own; matching takes batches, scipy, and a convnet or MLP in one rank",
)


@register(ABOUT)
def dimat(
    *,
    sync_interval: int = 100,
    graph: Literal["ring", "torus", "complete"] | MixingGraph = "ring",
    batches: Batches | None = None,
    matching: MergeMethod | None = None,
) -> Method:
    """Merge with the neighbours in a graph every `sync_interval` inner steps, with units matched first.

    Args:
        sync_interval: H, at least 1.
        graph: The neighbours: "ring", "torus" (rows and columns), "complete", or in Python any undirected graph.
        batches: Inputs (no labels) for matching and for BatchNorm, a few hundred samples: an iterable that can be gone
            through again and again, or a function that returns one for each merge. They move to the model's device.
            Replicas need not have the same ones. Only in Python.
        matching: What units are matched by: "activations" (default where there are batches), "weights" (arXiv
            2209.04836), or "none" for the plain average (default where there are no batches).

    Raises:
        ValueError: `sync_interval` is below 1, the graph or the matching is unknown, or it needs batches.

    Example:
        >>> dimat(graph="complete").update(3)
        MatchedMerge(matching='none')
    """
    if isinstance(graph, str) and graph not in _GRAPHS:
        raise ValueError(f"graph must be one of {', '.join(_GRAPHS)}, or a MixingGraph in Python, got {graph!r}")
    found = _GRAPHS[graph] if isinstance(graph, str) else graph
    topology = Neighbours(graph=found)
    default: MergeMethod = "none" if batches is None else "activations"
    merge = MatchedMerge(matching=default if matching is None else matching, batches=batches)

    def exchange(num_replicas: int) -> Gossip:
        topology.check(num_replicas=num_replicas)  # refused before training rather than in the first round
        return Gossip(codec=float32(), graph=found)

    return Method(
        name="dimat",
        schedule=Staggered(sync_interval=sync_interval),
        topology=topology,
        view=Parameters(),
        exchange=exchange,
        update=lambda num_replicas: merge,
        last_exchange=lambda num_replicas: cheapest(float32(), num_replicas=num_replicas),
        has_common_value=False,
    )


Batches = Iterable[torch.Tensor] | Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """All trainable parameters and floating buffers as one fragment, as they are: no value is common to all replicas.

    Of the buffers, those in the state dict count that are finite at the start, such as BatchNorm's statistics: a mask
    of infinities is a constant and stays where it is.
    """

    @property
    def exchanges_buffers(self) -> bool:
        return True

    def bind(self, model: nn.Module, *, inner: torch.optim.Optimizer | None = None) -> BoundParameters:
        return BoundParameters(model)


class BoundParameters:
    """See `Parameters`.

    Attributes:
        model: The replica's model.
        parameters: The fragment, without a global value.
        tensors: What is exchanged, in its order: this rank's shards, to read and to write.
    """

    def __init__(self, model: nn.Module) -> None:
        names = Pattern(num_fragments=1).partition(find_blocks(model))[0]
        self.model = model
        self.parameters = GlobalParameters(model, [names], has_values=False)
        self.parameters.need_float32("dimat sends the parameters themselves")
        saved = model.state_dict(keep_vars=True)
        buffers = [b for name, b in model.named_buffers() if name in saved and b.is_floating_point()]
        self._sources = [*self.parameters.parameters[0], *(b for b in buffers if bool(torch.isfinite(b).all()))]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [real_shard(source) for source in self._sources]

    def shapes(self, *, fragment: int, channel: int) -> tuple[torch.Size, ...]:
        return tuple(tensor.shape for tensor in self.tensors)

    def read(self, round: Round) -> torch.Tensor:
        return flatten(self.tensors)

    def read_last(self, fragment: int) -> torch.Tensor:
        return flatten(self.tensors)

    def reference_hash(self, round: Round) -> int:
        return 0  # replicas hold different values, and that is meant

    def state_of(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the model's state dict with the values of a vector that another replica read.

        Args:
            vector: As `read` returns it.
        """
        parts = zip(self._sources, parts_like(vector, self._sources), strict=True)
        values = {id(source): part.to(real_shard(source).dtype) for source, part in parts}
        # a tensor with several names comes under all of them
        own = self.model.state_dict(keep_vars=True)
        return {name: values.get(id(tensor), tensor.detach()) for name, tensor in own.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedMerge:
    """Merge the model with those of the neighbours, by the weights of the exchange.

    Args:
        matching: What the neighbours' units are matched by before the average: see `match_and_merge`.
        batches: Inputs for the forward passes: an iterable that can be gone through again and again, or a function that
            returns an iterable for each merge. Without them BatchNorm's statistics are averaged, not measured again.

    Raises:
        ValueError: `matching` is unknown or needs batches, or the batches could be gone through only once.
    """

    program: ClassVar[Program] = LocalSteps()

    matching: MergeMethod = "activations"
    batches: Batches | None = field(default=None, repr=False, compare=False)  # each replica has its own

    def __post_init__(self) -> None:
        """Check that the parts go together."""
        if self.matching not in get_args(MergeMethod):
            raise ValueError(f"matching must be one of {', '.join(get_args(MergeMethod))}, got {self.matching!r}")
        if self.matching != "none" and self.batches is None:
            raise ValueError(
                f"matching={self.matching!r} runs the models on data, but batches is None; give some tensors of "
                f"inputs as batches in Python, or merge without matching ('none')"
            )
        if isinstance(self.batches, Iterator):
            raise ValueError(
                "batches is an iterator, which is used up after the first merge; give a list, or a function that "
                "returns a new iterator"
            )

    def init(self, view: BoundView, *, inner: torch.optim.Optimizer | None = None) -> MergeState:
        """See `Update.init`; what cannot be matched is refused here rather than at the first merge."""
        if not isinstance(view, BoundParameters):
            raise ValueError("MatchedMerge() merges parameters, which only Parameters() reads; use that as the view")
        if self.matching != "none":
            check_whole(view.model)
            named = view.model.named_parameters()
            if (frozen := next((name for name, parameter in named if not parameter.requires_grad), None)) is not None:
                raise ValueError(
                    f"{frozen} is frozen, but matching may move its units with those of the layers around it; train it "
                    f"too, or merge without matching ('none')"
                )
            find_permutations(view.model, sample=self.calibration(view)[0])
            assign(torch.zeros(1, 1))  # a missing scipy is reported now, not after hours of training
        return MergeState(view)

    def calibration(self, view: BoundParameters) -> list[torch.Tensor]:
        """Return the batches of one merge, on the model's device.

        Raises:
            ValueError: There is none, or one is no tensor.
        """
        source = self.batches
        if source is None:
            return []
        held = list(source() if callable(source) else source)
        other = next((batch for batch in held if not isinstance(batch, torch.Tensor)), None)
        if other is not None or not held:
            found = "none" if other is None else f"a {type(other).__name__}"
            raise ValueError(f"batches must hold tensors of inputs, got {found}; leave out the labels")
        device = next((tensor.device for tensor in view.tensors), torch.device("cpu"))
        return [batch.to(device) for batch in held]

    def apply(self, state: MergeState, round: Round, average: Average) -> None:
        if self.matching == "none":
            self.merge(state, round.fragment, average.mean)
            return
        neighbours = {replica: state.view.state_of(part) for replica, part in average.parts.items()}
        batches = self.calibration(state.view)
        match_and_merge(state.view.model, neighbours, average.weights, batches, method=self.matching)

    def merge(self, state: MergeState, fragment: int, mean: torch.Tensor) -> None:
        """Write a mean into the model, unit by unit as it is, and measure the statistics of BatchNorm again."""
        unflatten_into(mean, state.view.tensors)
        if self.batches is not None:
            reset_statistics(state.view.model, self.calibration(state.view))


@dataclass(slots=True)
class MergeState:
    """Reference to the model, without anything remembered."""

    view: BoundParameters
