"""Permutation groups: the parameters of a model that must be permuted together, found in its traced graph.

The hidden units of a layer have no order: a layer's rows, what follows them one by one (BatchNorm, LayerNorm), and the
columns of the next layer can be permuted together and the model computes the same. A residual add ties the units of
both its branches. `find_permutations` traces a model with torch.fx, follows the units from operation to operation, and
refuses what it does not understand by name: a guess would silently average units that have nothing in common.

The input's and the output's units keep their order, for these mean something outside of the model.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """The set of units that a tensor holds, and their dimension.

    Attributes:
        space: The number of the set of units.
        dim: The tensor's dimension that holds them.
        block: Consecutive elements of that dimension for each unit.
    """

    space: int
    dim: int
    block: int = 1


class UnitSets:
    """Sets of units that grow together (a union-find); a fixed set keeps its order."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._sizes: list[int] = []
        self._fixed: set[int] = set()

    def new(self, size: int, *, is_fixed: bool = False) -> int:
        """Make a set of `size` units."""
        self._parents.append(len(self._parents))
        self._sizes.append(size)
        if is_fixed:
            self._fixed.add(len(self._parents) - 1)
        return len(self._parents) - 1

    def root(self, space: int) -> int:
        """Return the number that all sets share that were tied to this one."""
        while self._parents[space] != space:
            space = self._parents[space]
        return space

    def tie(self, one: int, other: int) -> None:
        """Say that two sets are the same units in the same order."""
        one, other = sorted((self.root(one), self.root(other)))
        self._parents[other] = one
        if other in self._fixed:
            self._fixed.add(one)

    def fix(self, space: int) -> None:
        """Say that the units of a set have an order."""
        self._fixed.add(self.root(space))

    def size(self, space: int) -> int:
        """Return the number of units."""
        return self._sizes[self.root(space)]

    def free(self) -> Iterator[int]:
        """Yield the sets whose order is free, each once, oldest first."""
        for space in range(len(self._parents)):
            if self.root(space) == space and space not in self._fixed:
                yield space


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One operation of the traced graph, and what a rule may do there.

    Attributes:
        node: The operation's node.
        what: Its name in messages.
        module: Its module, if it is one.
        flows: The units of every node before it; None where they are fixed, or where there is no tensor.
        units: All sets of units.
        attach: Says that a dimension of one of the module's tensors holds the units of a flow.
        observe: Says that a layer reads the units of a flow from a node.
    """

    node: fx.Node
    what: str
    module: nn.Module | None
    flows: dict[fx.Node, UnitLayout | None]
    units: UnitSets
    attach: Callable[[fx.Node, str, int, UnitLayout | None], None]
    observe: Callable[[fx.Node, UnitLayout], None]

    @property
    def source(self) -> fx.Node:
        """The first tensor that goes in."""
        return self.node.all_input_nodes[0]

    @property
    def flow(self) -> UnitLayout | None:
        """The units of the first tensor that goes in."""
        return self.flows[self.source]

    def refuse(self, why: str) -> ValueError:
        """Return the error that names this operation."""
        return ValueError(f"{self.what} {why}; change that layer, or merge without matching ('none')")

    def argument(self, place: int, name: str, default: Any) -> Any:
        """Return an argument of the call by its place or its name."""
        return self.node.args[place] if len(self.node.args) > place else self.node.kwargs.get(name, default)


# A rule handles one call of the traced graph: the units of its output are those of the input, or new ones. It ties
# units that must move together, and refuses, by name, operations that would mix units.
Rule = Callable[[TracedCall], UnitLayout | None]


def shape_of(node: fx.Node) -> torch.Size:
    """Return the shape of a node's output, as the sample had it."""
    meta = node.meta.get("tensor_meta")
    shape = getattr(meta, "shape", None)
    return shape if isinstance(shape, torch.Size) else torch.Size(())


def has_tensor(node: fx.Node) -> bool:
    """Whether a node's output is a tensor, or holds some: sizes and numbers hold none."""
    return "tensor_meta" in node.meta


def _alike(call: TracedCall) -> UnitLayout | None:
    """Pass the units on: elements do not mix."""
    return call.flow


def _layer(call: TracedCall, *, unit_dim: int, ndim: int, num_outputs: int) -> UnitLayout:
    """Tie the columns to the input's units, and make new units of the rows."""
    flow = call.flow
    if flow is not None:
        if flow.dim != unit_dim % len(shape_of(call.source)):
            raise call.refuse("reads across positions while the units lie in another dimension")
        call.observe(call.source, flow)
    call.attach(call.node, "weight", 1, flow)
    fresh = UnitLayout(space=call.units.new(num_outputs), dim=unit_dim % ndim)
    call.attach(call.node, "weight", 0, fresh)
    call.attach(call.node, "bias", 0, fresh)
    return fresh


def _linear(call: TracedCall) -> UnitLayout | None:
    assert isinstance(call.module, nn.Linear)
    return _layer(call, unit_dim=-1, ndim=len(shape_of(call.node)), num_outputs=call.module.out_features)


def _conv(call: TracedCall) -> UnitLayout | None:
    layer = call.module
    assert isinstance(layer, nn.Conv2d)
    if len(shape_of(call.node)) != 4:
        raise call.refuse("got an input without a batch dimension")
    if layer.groups == 1:
        return _layer(call, unit_dim=1, ndim=4, num_outputs=layer.out_channels)
    if layer.groups != layer.in_channels or layer.out_channels != layer.in_channels:
        raise call.refuse(f"has groups={layer.groups}, and only groups=1 and depthwise convolutions are understood")
    # depthwise: a channel is made of that channel alone, so the units are the input's
    flow = call.flow
    if flow is not None and flow.dim != 1:
        raise call.refuse("reads across positions while the units lie in another dimension")
    for attribute in ("weight", "bias"):
        call.attach(call.node, attribute, 0, flow)
    return flow


def _for_each_unit(*attributes: str) -> Rule:
    """Make the rule of a module with one entry for each place of dimension 1."""

    def rule(call: TracedCall) -> UnitLayout | None:
        flow = call.flow
        if flow is not None and flow.dim != 1:
            raise call.refuse("has parameters for dimension 1 while the units lie in another dimension")
        for attribute in attributes:
            call.attach(call.node, attribute, 0, flow)
        return flow

    return rule


def _layer_norm(call: TracedCall) -> UnitLayout | None:
    flow, layer = call.flow, call.module
    assert isinstance(layer, nn.LayerNorm)
    dim = None if flow is None else flow.dim - (len(shape_of(call.source)) - len(layer.normalized_shape))
    if dim is None or dim >= 0:
        for attribute in ("weight", "bias"):
            call.attach(call.node, attribute, dim or 0, flow)
    return flow


def _prelu(call: TracedCall) -> UnitLayout | None:
    assert isinstance(call.module, nn.PReLU)
    return _for_each_unit("weight")(call) if call.module.num_parameters > 1 else call.flow


def _pool(num_dims: int) -> Rule:
    """Make the rule of pooling over the last `num_dims` dimensions."""

    def rule(call: TracedCall) -> UnitLayout | None:
        if call.flow is not None and call.flow.dim >= len(shape_of(call.source)) - num_dims:
            raise call.refuse("pools over the units")
        return call.flow

    return rule


def _merged(call: TracedCall, start: int, end: int) -> UnitLayout | None:
    """Make one dimension of those from `start` to `end`."""
    flow, shape = call.flow, shape_of(call.source)
    if flow is None or flow.dim < start:
        return flow
    if flow.dim > end:
        return UnitLayout(space=flow.space, dim=flow.dim - (end - start), block=flow.block)
    if flow.dim != start:
        raise call.refuse("flattens with other dimensions before the units, which would tear them apart")
    return UnitLayout(space=flow.space, dim=start, block=flow.block * math.prod(shape[start + 1 : end + 1]))


def _flatten(call: TracedCall) -> UnitLayout | None:
    ndim = len(shape_of(call.source))
    if isinstance(call.module, nn.Flatten):
        start, end = call.module.start_dim, call.module.end_dim
    else:
        start, end = call.argument(1, "start_dim", 0), call.argument(2, "end_dim", -1)
    return _merged(call, start % ndim, end % ndim)


def _reshape(call: TracedCall) -> UnitLayout | None:
    """Understand a view where it leaves the shape, or flattens all but the batch."""
    before, after = shape_of(call.source), shape_of(call.node)
    if call.flow is None or before == after:
        return call.flow
    if len(after) == 2 and after[0] == before[0] and len(before) > 2:
        return _merged(call, 1, len(before) - 1)
    raise call.refuse(f"turns {tuple(before)} into {tuple(after)}, and only flattening all but the batch is understood")


def _mean(call: TracedCall) -> UnitLayout | None:
    flow, ndim = call.flow, len(shape_of(call.source))
    if flow is None:
        return None
    dims = call.argument(1, "dim", None)
    dims = range(ndim) if dims is None else (dims,) if isinstance(dims, int) else dims
    gone = {dim % ndim for dim in dims}
    if flow.dim in gone:
        raise call.refuse("takes the mean over the units")
    if call.argument(2, "keepdim", False):
        return flow
    return UnitLayout(space=flow.space, dim=flow.dim - sum(dim < flow.dim for dim in gone), block=flow.block)


def _together(call: TracedCall) -> UnitLayout | None:
    """Tie the units of all tensors that are added or multiplied element by element."""
    sources = [node for node in call.node.all_input_nodes if has_tensor(node)]
    flows = [flow for source in sources if (flow := call.flows[source]) is not None]
    if len(flows) < len(sources):
        for flow in flows:  # one of them has an order, so all have
            call.units.fix(flow.space)
        return None
    first, shape = flows[0], shape_of(sources[0])
    for source, flow in zip(sources[1:], flows[1:], strict=True):
        other = shape_of(source)
        places = (flow.dim, flow.block, len(other)) == (first.dim, first.block, len(shape))
        if not places or other[flow.dim] != shape[first.dim]:
            raise call.refuse(f"joins tensors of shapes {tuple(shape)} and {tuple(other)} whose units lie differently")
        call.units.tie(first.space, flow.space)
    return first


_batch_norm = _for_each_unit("weight", "bias", "running_mean", "running_var")
_ACTIVATIONS = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Dropout,
    nn.Dropout1d, nn.Dropout2d, nn.Softmax, nn.LogSoftmax,
)  # fmt: skip

MODULES: dict[type[nn.Module], Rule] = {
    **dict.fromkeys(_ACTIVATIONS, _alike),
    nn.Linear: _linear,
    nn.Conv2d: _conv,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d), _batch_norm),
    nn.LayerNorm: _layer_norm,
    nn.PReLU: _prelu,
    nn.Flatten: _flatten,
    **dict.fromkeys((nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d), _pool(1)),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), _pool(2)),
}

_ELEMENTWISE = (
    torch.relu, torch.tanh, torch.sigmoid, functional.relu, functional.relu6, functional.leaky_relu, functional.elu,
    functional.selu, functional.celu, functional.gelu, functional.silu, functional.mish, functional.hardtanh,
    functional.hardswish, functional.hardsigmoid, functional.softplus, functional.logsigmoid, functional.dropout,
    functional.dropout2d, functional.softmax, functional.log_softmax, torch.softmax, torch.log_softmax, operator.neg,
    functional.tanh, functional.sigmoid,
)  # fmt: skip
_JOINS = (
    operator.add, operator.sub, operator.mul, operator.iadd, operator.isub, operator.imul, operator.truediv, torch.add,
    torch.sub, torch.mul,
)  # fmt: skip

FUNCTIONS: dict[Any, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _alike),
    **dict.fromkeys(_JOINS, _together),
    **dict.fromkeys((functional.max_pool2d, torch.max_pool2d, functional.avg_pool2d), _pool(2)),
    **dict.fromkeys((functional.adaptive_avg_pool2d, functional.adaptive_max_pool2d), _pool(2)),
    torch.flatten: _flatten,
    torch.mean: _mean,
    torch.reshape: _reshape,
}

METHODS: dict[Any, Rule] = {
    **dict.fromkeys(("relu", "relu_", "tanh", "sigmoid", "contiguous", "float", "softmax", "log_softmax"), _alike),
    **dict.fromkeys(("add", "add_", "sub", "sub_", "mul", "mul_"), _together),
    **dict.fromkeys(("view", "reshape"), _reshape),
    "flatten": _flatten,
    "mean": _mean,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PermutedAxis:
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
    """A place where the activations of a group's units can be read: the output of a node of the traced graph.

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
    axes: tuple[PermutedAxis, ...]
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
        self._units = UnitSets()
        self._flows: dict[fx.Node, UnitLayout | None] = {}
        self._axes: dict[tuple[str, int], UnitLayout] = {}
        self._seen: dict[str, UnitLayout] = {}

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
        self,
        node: fx.Node,
        rule: Callable[[TracedCall], UnitLayout | None] | None,
        *,
        what: str,
        module: nn.Module | None = None,
    ) -> UnitLayout | None:
        if not has_tensor(node):
            return None
        if rule is None:
            raise ValueError(
                f"{what} is not understood by matching; use Linear, Conv2d, BatchNorm, LayerNorm, elementwise "
                f"activations, pooling, flatten and adds, or merge without matching ('none')"
            )
        call = TracedCall(
            node=node, what=what, module=module, flows=self._flows, units=self._units, attach=self._attach,
            observe=self._observe,
        )  # fmt: skip
        return rule(call)

    def _fix(self, flow: UnitLayout | None) -> None:
        if flow is not None:
            self._units.fix(flow.space)

    def _attach(self, node: fx.Node, attribute: str, dim: int, flow: UnitLayout | None) -> None:
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
            flow = UnitLayout(space=self._units.new(tensor.shape[dim], is_fixed=True), dim=dim)
        known = self._axes.setdefault((name, dim), flow)
        if known is flow:
            return
        # the module is used twice, so both uses move together, or not at all
        if known.block == flow.block:
            self._units.tie(known.space, flow.space)
        else:
            self._fix(known)
            self._fix(flow)

    def _observe(self, node: fx.Node, flow: UnitLayout) -> None:
        self._seen.setdefault(node.name, flow)

    def groups(self) -> Iterator[PermutationGroup]:
        """Yield the groups that are not fixed and that a layer reads."""
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
                        PermutedAxis(name=alias, dim=dim, block=flow.block)
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
