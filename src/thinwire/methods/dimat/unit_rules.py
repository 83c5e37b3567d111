"""How units pass through each operation that matching understands.

A rule looks at one call of the traced graph and says where the units of its output come from: the units of the input as
they are, or new ones. It ties what must move together and refuses, by name, what would mix units with one another.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Which units a tensor holds, and where.

    Attributes:
        space: The number of the set of units.
        dim: The tensor's dimension that holds them.
        block: Consecutive elements of that dimension for each unit.
    """

    space: int
    dim: int
    block: int = 1


class Units:
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
class Call:
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
    flows: dict[fx.Node, Flow | None]
    units: Units
    attach: Callable[[fx.Node, str, int, Flow | None], None]
    observe: Callable[[fx.Node, Flow], None]

    @property
    def source(self) -> fx.Node:
        """The first tensor that goes in."""
        return self.node.all_input_nodes[0]

    @property
    def flow(self) -> Flow | None:
        """The units of the first tensor that goes in."""
        return self.flows[self.source]

    def refuse(self, why: str) -> ValueError:
        """Return the error that names this operation."""
        return ValueError(f"{self.what} {why}; change that layer, or merge without matching ('none')")

    def argument(self, place: int, name: str, default: Any) -> Any:
        """Return an argument of the call by its place or its name."""
        return self.node.args[place] if len(self.node.args) > place else self.node.kwargs.get(name, default)


Rule = Callable[[Call], Flow | None]


def shape_of(node: fx.Node) -> torch.Size:
    """Return the shape of a node's output, as the sample had it."""
    meta = node.meta.get("tensor_meta")
    shape = getattr(meta, "shape", None)
    return shape if isinstance(shape, torch.Size) else torch.Size(())


def has_tensor(node: fx.Node) -> bool:
    """Whether a node's output is a tensor, or holds some: sizes and numbers hold none."""
    return "tensor_meta" in node.meta


def _alike(call: Call) -> Flow | None:
    """Leave units where they are: every element is by itself."""
    return call.flow


def _layer(call: Call, *, unit_dim: int, ndim: int, num_outputs: int) -> Flow:
    """Tie the columns to the input's units, and make new units of the rows."""
    flow = call.flow
    if flow is not None:
        if flow.dim != unit_dim % len(shape_of(call.source)):
            raise call.refuse("reads across positions while the units lie in another dimension")
        call.observe(call.source, flow)
    call.attach(call.node, "weight", 1, flow)
    fresh = Flow(space=call.units.new(num_outputs), dim=unit_dim % ndim)
    call.attach(call.node, "weight", 0, fresh)
    call.attach(call.node, "bias", 0, fresh)
    return fresh


def _linear(call: Call) -> Flow | None:
    assert isinstance(call.module, nn.Linear)
    return _layer(call, unit_dim=-1, ndim=len(shape_of(call.node)), num_outputs=call.module.out_features)


def _conv(call: Call) -> Flow | None:
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

    def rule(call: Call) -> Flow | None:
        flow = call.flow
        if flow is not None and flow.dim != 1:
            raise call.refuse("has parameters for dimension 1 while the units lie in another dimension")
        for attribute in attributes:
            call.attach(call.node, attribute, 0, flow)
        return flow

    return rule


def _layer_norm(call: Call) -> Flow | None:
    flow, layer = call.flow, call.module
    assert isinstance(layer, nn.LayerNorm)
    dim = None if flow is None else flow.dim - (len(shape_of(call.source)) - len(layer.normalized_shape))
    if dim is None or dim >= 0:
        for attribute in ("weight", "bias"):
            call.attach(call.node, attribute, dim or 0, flow)
    return flow


def _prelu(call: Call) -> Flow | None:
    assert isinstance(call.module, nn.PReLU)
    return _for_each_unit("weight")(call) if call.module.num_parameters > 1 else call.flow


def _pool(num_dims: int) -> Rule:
    """Make the rule of pooling over the last `num_dims` dimensions."""

    def rule(call: Call) -> Flow | None:
        if call.flow is not None and call.flow.dim >= len(shape_of(call.source)) - num_dims:
            raise call.refuse("pools over the units")
        return call.flow

    return rule


def _merged(call: Call, start: int, end: int) -> Flow | None:
    """Make one dimension of those from `start` to `end`."""
    flow, shape = call.flow, shape_of(call.source)
    if flow is None or flow.dim < start:
        return flow
    if flow.dim > end:
        return Flow(space=flow.space, dim=flow.dim - (end - start), block=flow.block)
    if flow.dim != start:
        raise call.refuse("flattens with other dimensions before the units, which would tear them apart")
    return Flow(space=flow.space, dim=start, block=flow.block * math.prod(shape[start + 1 : end + 1]))


def _flatten(call: Call) -> Flow | None:
    ndim = len(shape_of(call.source))
    if isinstance(call.module, nn.Flatten):
        start, end = call.module.start_dim, call.module.end_dim
    else:
        start, end = call.argument(1, "start_dim", 0), call.argument(2, "end_dim", -1)
    return _merged(call, start % ndim, end % ndim)


def _reshape(call: Call) -> Flow | None:
    """Understand a view where it leaves the shape, or flattens all but the batch."""
    before, after = shape_of(call.source), shape_of(call.node)
    if call.flow is None or before == after:
        return call.flow
    if len(after) == 2 and after[0] == before[0] and len(before) > 2:
        return _merged(call, 1, len(before) - 1)
    raise call.refuse(f"turns {tuple(before)} into {tuple(after)}, and only flattening all but the batch is understood")


def _mean(call: Call) -> Flow | None:
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
    return Flow(space=flow.space, dim=flow.dim - sum(dim < flow.dim for dim in gone), block=flow.block)


def _together(call: Call) -> Flow | None:
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
