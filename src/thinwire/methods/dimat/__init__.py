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

from typing import Literal

from thinwire.averaging.exchange import cheapest
from thinwire.averaging.gossip import Gossip
from thinwire.averaging.mixing import Complete, MixingGraph, Neighbours, Ring, Torus
from thinwire.codecs import float32
from thinwire.methods.dimat.matched_merge import Batches, MatchedMerge, Parameters
from thinwire.methods.dimat.matching import MergeMethod
from thinwire.methods.registry import About, register
from thinwire.sync.method import Method
from thinwire.sync.schedule import Staggered

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
