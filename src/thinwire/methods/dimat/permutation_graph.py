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
        return self._sizes[self.root(space)]

    def free(self) -> Iterator[int]:
        """Yield the sets whose order is free, each once, oldest first."""
        for space in range(len(self._parents)):
            if self.root(space) == space and space not in self._fixed:
                yield space


# A rule handles one call of the traced graph: the units of its output are those of the input, or new ones. It ties
# units that must move together, and refuses, by name, operations that would mix units.
Rule = Callable[["UnitWalk"], UnitLayout | None]


def shape_of(node: fx.Node) -> torch.Size:
    """Return the shape of a node's output, as the sample had it."""
    meta = node.meta.get("tensor_meta")
    shape = getattr(meta, "shape", None)
    return shape if isinstance(shape, torch.Size) else torch.Size(())


def has_tensor(node: fx.Node) -> bool:
    """Whether a node's output is a tensor, or holds some: sizes and numbers hold none."""
    return "tensor_meta" in node.meta


def _alike(walk: UnitWalk) -> UnitLayout | None:
    """Pass the units on: elements do not mix."""
    return walk.flow


def _layer(walk: UnitWalk, *, unit_dim: int, ndim: int, num_outputs: int) -> UnitLayout:
    """Tie the columns to the input's units, and make new units of the rows."""
    flow = walk.flow
    if flow is not None:
        if flow.dim != unit_dim % len(shape_of(walk.source)):
            raise walk.refuse("reads across positions while the units lie in another dimension")
        walk.observe(flow)
    walk.attach("weight", 1, flow)
    fresh = UnitLayout(space=walk.units.new(num_outputs), dim=unit_dim % ndim)
    walk.attach("weight", 0, fresh)
    walk.attach("bias", 0, fresh)
    return fresh


def _linear(walk: UnitWalk) -> UnitLayout | None:
    assert isinstance(walk.module, nn.Linear)
    return _layer(walk, unit_dim=-1, ndim=len(shape_of(walk.node)), num_outputs=walk.module.out_features)


def _conv(walk: UnitWalk) -> UnitLayout | None:
    layer = walk.module
    assert isinstance(layer, nn.Conv2d)
    if len(shape_of(walk.node)) != 4:
        raise walk.refuse("got an input without a batch dimension")
    if layer.groups == 1:
        return _layer(walk, unit_dim=1, ndim=4, num_outputs=layer.out_channels)
    if layer.groups != layer.in_channels or layer.out_channels != layer.in_channels:
        raise walk.refuse(f"has groups={layer.groups}, and only groups=1 and depthwise convolutions are understood")
    # depthwise: a channel is made of that channel alone, so the units are the input's
    flow = walk.flow
    if flow is not None and flow.dim != 1:
        raise walk.refuse("reads across positions while the units lie in another dimension")
    for attribute in ("weight", "bias"):
        walk.attach(attribute, 0, flow)
    return flow


def _for_each_unit(*attributes: str) -> Rule:
    """Make the rule of a module with one entry for each place of dimension 1."""

    def rule(walk: UnitWalk) -> UnitLayout | None:
        flow = walk.flow
        if flow is not None and flow.dim != 1:
            raise walk.refuse("has parameters for dimension 1 while the units lie in another dimension")
        for attribute in attributes:
            walk.attach(attribute, 0, flow)
        return flow

    return rule


def _layer_norm(walk: UnitWalk) -> UnitLayout | None:
    flow, layer = walk.flow, walk.module
    assert isinstance(layer, nn.LayerNorm)
    dim = None if flow is None else flow.dim - (len(shape_of(walk.source)) - len(layer.normalized_shape))
    if dim is None or dim >= 0:
        for attribute in ("weight", "bias"):
            walk.attach(attribute, dim or 0, flow)
    return flow


def _prelu(walk: UnitWalk) -> UnitLayout | None:
    assert isinstance(walk.module, nn.PReLU)
    return _for_each_unit("weight")(walk) if walk.module.num_parameters > 1 else walk.flow


def _pool(num_dims: int) -> Rule:
    """Make the rule of pooling over the last `num_dims` dimensions."""

    def rule(walk: UnitWalk) -> UnitLayout | None:
        if walk.flow is not None and walk.flow.dim >= len(shape_of(walk.source)) - num_dims:
            raise walk.refuse("pools over the units")
        return walk.flow

    return rule


def _merged(walk: UnitWalk, start: int, end: int) -> UnitLayout | None:
    """Make one dimension of those from `start` to `end`."""
    flow, shape = walk.flow, shape_of(walk.source)
    if flow is None or flow.dim < start:
        return flow
    if flow.dim > end:
        return UnitLayout(space=flow.space, dim=flow.dim - (end - start), block=flow.block)
    if flow.dim != start:
        raise walk.refuse("flattens with other dimensions before the units, which would tear them apart")
    return UnitLayout(space=flow.space, dim=start, block=flow.block * math.prod(shape[start + 1 : end + 1]))


def _flatten(walk: UnitWalk) -> UnitLayout | None:
    ndim = len(shape_of(walk.source))
    if isinstance(walk.module, nn.Flatten):
        start, end = walk.module.start_dim, walk.module.end_dim
    else:
        start, end = walk.argument(1, "start_dim", 0), walk.argument(2, "end_dim", -1)
    return _merged(walk, start % ndim, end % ndim)


def _reshape(walk: UnitWalk) -> UnitLayout | None:
    """Understand a view where it leaves the shape, or flattens all but the batch."""
    before, after = shape_of(walk.source), shape_of(walk.node)
    if walk.flow is None or before == after:
        return walk.flow
    if len(after) == 2 and after[0] == before[0] and len(before) > 2:
        return _merged(walk, 1, len(before) - 1)
    raise walk.refuse(f"turns {tuple(before)} into {tuple(after)}, and only flattening all but the batch is understood")


def _mean(walk: UnitWalk) -> UnitLayout | None:
    flow, ndim = walk.flow, len(shape_of(walk.source))
    if flow is None:
        return None
    dims = walk.argument(1, "dim", None)
    dims = range(ndim) if dims is None else (dims,) if isinstance(dims, int) else dims
    gone = {dim % ndim for dim in dims}
    if flow.dim in gone:
        raise walk.refuse("takes the mean over the units")
    if walk.argument(2, "keepdim", False):
        return flow
    return UnitLayout(space=flow.space, dim=flow.dim - sum(dim < flow.dim for dim in gone), block=flow.block)


def _together(walk: UnitWalk) -> UnitLayout | None:
    """Tie the units of all tensors that are added or multiplied element by element."""
    sources = [node for node in walk.node.all_input_nodes if has_tensor(node)]
    flows = [flow for source in sources if (flow := walk.flows[source]) is not None]
    if len(flows) < len(sources):
        for flow in flows:  # one of them has an order, so all have
            walk.units.fix(flow.space)
        return None
    first, shape = flows[0], shape_of(sources[0])
    for source, flow in zip(sources[1:], flows[1:], strict=True):
        other = shape_of(source)
        places = (flow.dim, flow.block, len(other)) == (first.dim, first.block, len(shape))
        if not places or other[flow.dim] != shape[first.dim]:
            raise walk.refuse(f"joins tensors of shapes {tuple(shape)} and {tuple(other)} whose units lie differently")
        walk.units.tie(first.space, flow.space)
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
class UnitAxis:
    """One dimension that holds the units of a group: of a parameter or buffer, or of what a node puts out.

    Attributes:
        name: The tensor's name in the model's state dict, or the node's in the traced graph.
        dim: The dimension.
        block: Consecutive elements of that dimension that belong to one unit: more than 1 after a flatten, where
            every channel becomes `height * width` columns.
    """

    name: str
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
    axes: tuple[UnitAxis, ...]
    observations: tuple[UnitAxis, ...]


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
        try:
            traced = fx.symbolic_trace(model)
        except (fx.proxy.TraceError, TypeError, RuntimeError) as failure:
            raise ValueError(
                f"{type(model).__name__} cannot be traced by torch.fx ({failure}); write its forward without branches "
                f"and loops over tensors, or merge without matching ('none')"
            ) from failure
        with torch.no_grad():
            ShapeProp(traced).propagate(sample)
    finally:
        for module, mode in was_training.items():
            module.training = mode
    if type(model) in MODULES:  # a single layer has no hidden units
        return PermutationGraph(groups=(), traced=traced)
    walk = UnitWalk(model, traced)
    for node in traced.graph.nodes:
        walk.visit(node)
    return PermutationGraph(groups=tuple(walk.groups()), traced=traced)


class UnitWalk:
    """Follows the units through a traced model, one operation after the other; rules ask it about the present one.

    Attributes:
        node: The operation's node.
        what: Its name in messages.
        module: Its module, if it is one.
        flows: The units of every node before it; None where they are fixed, or where there is no tensor.
        units: All sets of units.
    """

    node: fx.Node
    what: str
    module: nn.Module | None

    def __init__(self, model: nn.Module, traced: fx.GraphModule) -> None:
        self.flows: dict[fx.Node, UnitLayout | None] = {}
        self.units = UnitSets()
        self._modules = dict(traced.named_modules(remove_duplicate=False))
        self._aliases = _aliases(model)
        self._axes: dict[tuple[str, int], UnitLayout] = {}
        self._seen: dict[str, UnitLayout] = {}

    def visit(self, node: fx.Node) -> None:
        """Go on to the next operation."""
        self.node, self.module, rule = node, None, None
        if node.op == "output":
            for flow in (self.flows[source] for source in node.all_input_nodes):
                if flow is not None:
                    self.units.fix(flow.space)
            return
        if node.op == "call_module":
            self.module = self._modules[str(node.target)]
            rule = MODULES.get(type(self.module))
            self.what = f"{node.target} ({type(self.module).__name__})"
        elif node.op in ("call_function", "call_method"):
            rule = (FUNCTIONS if node.op == "call_function" else METHODS).get(node.target)
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            self.what = f"{node.name} (a call of {name})"
        # the input's units have an order, and so do those of a parameter that is used without a module
        self.flows[node] = None
        if node.op.startswith("call_") and has_tensor(node):
            if rule is None:
                raise ValueError(
                    f"{self.what} is not understood by matching; use Linear, Conv2d, BatchNorm, LayerNorm, elementwise "
                    f"activations, pooling, flatten and adds, or merge without matching ('none')"
                )
            self.flows[node] = rule(self)

    @property
    def source(self) -> fx.Node:
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

    def observe(self, flow: UnitLayout) -> None:
        """Say that a layer reads the units of `flow` from the first tensor that goes in."""
        self._seen.setdefault(self.source.name, flow)

    def attach(self, attribute: str, dim: int, flow: UnitLayout | None) -> None:
        """Say that `dim` of the module's tensor holds the units of `flow`; without a flow, that it keeps its order."""
        target = str(self.node.target)
        tensor = getattr(self._modules[target], attribute)
        if tensor is None:
            return
        if f"{target}.{attribute}" not in self._aliases:
            raise ValueError(
                f"{attribute} of {target} is computed from other tensors (a weight or spectral norm), which matching "
                f"cannot permute; remove that, or merge without matching ('none')"
            )
        name = self._aliases[f"{target}.{attribute}"]
        if flow is None:
            flow = UnitLayout(space=self.units.new(tensor.shape[dim], is_fixed=True), dim=dim)
        known = self._axes.setdefault((name, dim), flow)
        if known is flow:
            return
        # the module is used twice, so both uses move together, or not at all
        if known.block == flow.block:
            self.units.tie(known.space, flow.space)
        else:
            self.units.fix(known.space)
            self.units.fix(flow.space)

    def groups(self) -> Iterator[PermutationGroup]:
        """Yield the groups that are not fixed and that a layer reads."""
        names: dict[str, list[str]] = {}
        for alias, name in self._aliases.items():
            names.setdefault(name, []).append(alias)
        for space in self.units.free():
            seen = [(node, flow) for node, flow in self._seen.items() if self.units.root(flow.space) == space]
            moved = [(at, flow) for at, flow in self._axes.items() if self.units.root(flow.space) == space]
            if seen:
                yield PermutationGroup(
                    num_units=self.units.size(space),
                    axes=tuple(
                        UnitAxis(name=alias, dim=dim, block=flow.block)
                        for (name, dim), flow in moved
                        for alias in names[name]
                    ),
                    observations=tuple(UnitAxis(name=node, dim=flow.dim, block=flow.block) for node, flow in seen),
                )


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return the first name of every tensor by each of its names: tied tensors move together."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}
