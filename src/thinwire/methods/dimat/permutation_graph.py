"""Which parameters of a model must be permuted together, read off its graph.

The hidden units of a layer have no order: a layer's rows, what follows them one by one (BatchNorm, LayerNorm), and the
columns of the next layer can be permuted together and the model computes the same. A residual add ties the units of
both its branches. `find_permutations` traces a model with torch.fx, follows the units from operation to operation, and
refuses what it does not understand by name: a guess would silently average units that have nothing in common.

The input's and the output's units keep their order, for these mean something outside of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from thinwire.methods.dimat.unit_rules import FUNCTIONS, METHODS, MODULES, Call, Flow, Units, has_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One dimension of a parameter or buffer that holds the units of a group.

    Attributes:
        name: The tensor's name in the model's state dict.
        dim: Its dimension.
        block: Consecutive elements of that dimension that belong to one unit: more than 1 after a flatten, where
            every channel becomes `height * width` columns.
    """

    name: str
    dim: int
    block: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Where the activations of a group's units can be read: the output of a node of the traced graph.

    Attributes:
        node: The node's name.
        dim: The dimension of its output that holds the units.
        block: Consecutive elements of that dimension that belong to one unit.
    """

    node: str
    dim: int
    block: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PermutationGroup:
    """Units that have no order of their own, and all that moves when they move.

    Attributes:
        num_units: How many units there are.
        axes: What must be permuted alike, in the order of the forward pass.
        observations: What the layers that read these units get to see, in the order of the forward pass.
    """

    num_units: int
    axes: tuple[Axis, ...]
    observations: tuple[Observation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PermutationGraph:
    """All groups of a model, and the traced model whose nodes the observations name (it shares the parameters)."""

    groups: tuple[PermutationGroup, ...]
    traced: fx.GraphModule


def find_permutations(model: nn.Module, *, sample: torch.Tensor) -> PermutationGraph:
    """Find the groups of units that can be permuted without changing what a model computes.

    Understood are Linear, Conv2d (also depthwise), BatchNorm1d and 2d, LayerNorm, PReLU, elementwise activations,
    dropout, pooling, flatten, mean over positions, and residual adds and products, in any module that `torch.fx` can
    trace. Only layers whose units end in another Linear or Conv2d form a group.

    Args:
        model: The model; it is run once in eval mode, and neither its parameters nor its buffers change.
        sample: One batch of inputs on the model's device, for the shapes.

    Returns:
        The groups in the order of the forward pass.

    Raises:
        ValueError: The model cannot be traced, or holds an operation that is not understood; the text names it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> (group,) = find_permutations(model, sample=torch.zeros(1, 4)).groups
        >>> group.num_units, [(axis.name, axis.dim) for axis in group.axes]
        (3, [('0.weight', 0), ('0.bias', 0), ('2.weight', 1)])
    """
    was_training = {module: module.training for module in model.modules()}
    model.eval()  # also for the trace, which would freeze a dropout by function as it is now
    try:
        traced = _trace(model)
        with torch.no_grad():
            ShapeProp(traced).propagate(sample)
    finally:
        for module, mode in was_training.items():
            module.training = mode
    if type(model) in MODULES:  # a single layer has no hidden units
        return PermutationGraph(groups=(), traced=traced)
    walk = _Walk(model, traced)
    for node in traced.graph.nodes:
        walk.visit(node)
    return PermutationGraph(groups=tuple(walk.groups()), traced=traced)


def _trace(model: nn.Module) -> fx.GraphModule:
    try:
        return fx.symbolic_trace(model)
    except (fx.proxy.TraceError, TypeError, RuntimeError) as failure:
        raise ValueError(
            f"{type(model).__name__} cannot be traced by torch.fx ({failure}); write its forward without branches and "
            f"loops over tensors, or merge without matching ('none')"
        ) from failure


class _Walk:
    """Follows the units through a traced model."""

    def __init__(self, model: nn.Module, traced: fx.GraphModule) -> None:
        self._modules = dict(traced.named_modules(remove_duplicate=False))
        self._aliases = _aliases(model)
        self._units = Units()
        self._flows: dict[fx.Node, Flow | None] = {}
        self._axes: dict[tuple[str, int], Flow] = {}
        self._seen: dict[str, Flow] = {}

    def visit(self, node: fx.Node) -> None:
        if node.op == "output":
            for source in node.all_input_nodes:
                self._fix(self._flows[source])
        elif node.op == "call_module":
            module = self._modules[str(node.target)]
            rule = MODULES.get(type(module))
            what = f"{node.target} ({type(module).__name__})"
            self._flows[node] = self._apply(node, rule, what=what, module=module)
        elif node.op in ("call_function", "call_method"):
            table = FUNCTIONS if node.op == "call_function" else METHODS
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            self._flows[node] = self._apply(node, table.get(node.target), what=f"{node.name} (a call of {name})")
        else:
            # the input's units have an order, and so do those of a parameter that is used without a module
            self._flows[node] = None

    def _apply(
        self, node: fx.Node, rule: Callable[[Call], Flow | None] | None, *, what: str, module: nn.Module | None = None
    ) -> Flow | None:
        if not has_tensor(node):
            return None
        if rule is None:
            raise ValueError(
                f"{what} is not understood by matching; use Linear, Conv2d, BatchNorm, LayerNorm, elementwise "
                f"activations, pooling, flatten and adds, or merge without matching ('none')"
            )
        call = Call(
            node=node, what=what, module=module, flows=self._flows, units=self._units, attach=self._attach,
            observe=self._observe,
        )  # fmt: skip
        return rule(call)

    def _fix(self, flow: Flow | None) -> None:
        if flow is not None:
            self._units.fix(flow.space)

    def _attach(self, node: fx.Node, attribute: str, dim: int, flow: Flow | None) -> None:
        """Say that `dim` of a module's tensor holds the units of `flow`; without a flow, that it keeps its order."""
        tensor = getattr(self._modules[str(node.target)], attribute)
        if tensor is None:
            return
        if f"{node.target}.{attribute}" not in self._aliases:
            raise ValueError(
                f"{attribute} of {node.target} is computed from other tensors (a weight or spectral norm), which "
                f"matching cannot permute; remove that, or merge without matching ('none')"
            )
        name = self._aliases[f"{node.target}.{attribute}"]
        if flow is None:
            flow = Flow(space=self._units.new(tensor.shape[dim], is_fixed=True), dim=dim)
        known = self._axes.setdefault((name, dim), flow)
        if known is flow:
            return
        # the module is used twice, so both uses move together, or not at all
        if known.block == flow.block:
            self._units.tie(known.space, flow.space)
        else:
            self._fix(known)
            self._fix(flow)

    def _observe(self, node: fx.Node, flow: Flow) -> None:
        self._seen.setdefault(node.name, flow)

    def groups(self) -> Iterator[PermutationGroup]:
        """Yield the groups that are not fixed and that somebody reads."""
        names: dict[str, list[str]] = {}
        for alias, name in self._aliases.items():
            names.setdefault(name, []).append(alias)
        for space in self._units.free():
            seen = [(node, flow) for node, flow in self._seen.items() if self._units.root(flow.space) == space]
            moved = [(at, flow) for at, flow in self._axes.items() if self._units.root(flow.space) == space]
            if seen:
                yield PermutationGroup(
                    num_units=self._units.size(space),
                    axes=tuple(
                        Axis(name=alias, dim=dim, block=flow.block)
                        for (name, dim), flow in moved
                        for alias in names[name]
                    ),
                    observations=tuple(Observation(node=node, dim=flow.dim, block=flow.block) for node, flow in seen),
                )


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return the first name of every tensor by each of its names: tied tensors move together."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}
