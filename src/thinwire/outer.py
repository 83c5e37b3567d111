"""Outer steps for training loops without torch, such as JAX's: trees of arrays go in, and come out as NumPy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn

import thinwire.methods  # noqa: F401 - registers the names that `method` may be
from thinwire.compat import EagerOptimizer
from thinwire.errors import refusal
from thinwire.sync.method import Method
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.transport.base import Transport

_DTYPES = ("float32", "float64", "float16")


class OuterLoop:
    """Trains a tree of arrays with the rounds, codecs and transports of `DistributedOptimizer`.

    The loop does its inner step in its own framework, and hands the new parameters to `step`. What comes back is what
    it goes on with. As a context manager it closes at the end, after an exception without any exchange.

    Args:
        arrays: The parameters: dicts, lists and tuples of arrays that NumPy reads, in float32, float64 or float16.
            Lists of dicts count as a model's blocks, which methods may exchange apart.
        method: One with local steps, or its name, such as `"streaming-diloco"`: see `thinwire.methods`.
        transport: Joins the replicas: `thinwire.connect()`; None trains alone.
        **options: Further arguments of `DistributedOptimizer`.

    Attributes:
        optimizer: It counts the steps, and keeps the statistics.

    Raises:
        ValueError: An array has another type, the tree holds none, or the method exchanges gradients.

    Example:
        >>> outer = OuterLoop({"w": np.ones(2, np.float32)}, method="diloco")
        >>> outer.arrays()  # replica 0's, on all replicas
        {'w': array([1., 1.], dtype=float32)}
        >>> outer.step({"w": np.full(2, 3, np.float32)})
        {'w': array([3., 3.], dtype=float32)}
        >>> outer.close()
        {'w': array([3., 3.], dtype=float32)}
    """

    def __init__(
        self, arrays: Any, *, method: Method | str, transport: Transport | None = None, **options: Any
    ) -> None:  # fmt: skip
        if not list(_leaves(arrays)):
            raise refusal("there is nothing to train", got="a tree without arrays", allowed="one array or more",
                          remedy="OuterLoop({'w': array})")  # fmt: skip
        self._tree = _mapped(arrays, lambda path, leaf: path)
        self._module = _module(_mapped(arrays, lambda path, leaf: nn.Parameter(_tensor(path, leaf))))
        paths = list(_leaves(self._tree))
        if twice := next((path for number, path in enumerate(paths) if path in paths[:number]), None):
            raise refusal("two arrays of the tree have one name", got=twice, allowed="names that differ",
                          remedy="keys without /, and not both 1 and '1'")  # fmt: skip
        self._parameters = dict(zip(paths, self._module.parameters(), strict=True))
        self._inner = _Given(self._parameters.values())
        self.optimizer = DistributedOptimizer(
            self._module, self._inner, method=method, transport=transport, **options
        )  # fmt: skip
        if not self.optimizer.engine.program.has_local_steps:
            self.optimizer.abandon()
            raise refusal("the method exchanges gradients, and an outer step sees parameters alone",
                          got=self.optimizer.method.name, allowed="a method with local steps",
                          remedy="method='streaming-diloco'")  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.optimizer.abandon()

    def arrays(self) -> Any:
        """Return this replica's parameters, a tree of new arrays; begin with these, which are replica 0's."""
        return _mapped(self._tree, lambda _, path: self._parameters[path].detach().numpy().copy())

    def step(self, arrays: Any) -> Any:
        """Take the parameters after an inner step, do the rounds that are due, and return those to go on with.

        Raises:
            ValueError: The tree has other names, shapes or types than the first one.
            TransportError, DesyncError: As from `DistributedOptimizer.step`.
        """
        given = dict(zip(_leaves(_mapped(arrays, lambda path, leaf: path)), _leaves(arrays), strict=True))
        if other := sorted(set(given) ^ set(self._parameters)):  # jax.tree sorts the keys of dicts
            raise refusal("the tree is another one than at first", got=f"a difference in {other[0]}",
                          allowed=f"{len(self._parameters)} arrays of the same names",
                          remedy="to keep the tree")  # fmt: skip
        values = []
        for path, parameter in self._parameters.items():
            value = _tensor(path, given[path])
            if value.shape != parameter.shape or value.dtype != parameter.dtype:
                raise refusal(
                    f"the array {path} is another one than at first", got=f"{tuple(value.shape)}, {value.dtype}",
                    allowed=f"{tuple(parameter.shape)}, {parameter.dtype}", remedy="to keep shapes and types",
                )  # fmt: skip
            values.append(value)
        self._inner.values = values
        self.optimizer.step()
        return self.arrays()

    def close(self) -> Any:
        """Do the final exchange, and return the global parameters, the same on all replicas."""
        self.optimizer.close(final_exchange=True)
        return self.global_arrays()

    def global_arrays(self) -> Any:
        """Return the global parameters, to evaluate and save."""
        with self.optimizer.global_parameters(may_lag=True):
            return self.arrays()


class _Given(EagerOptimizer):
    """An inner optimizer whose step takes values that were computed elsewhere."""

    parts = ()  # holds no copies of the weights, so there is nothing to test for them

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {})
        self.values: list[torch.Tensor] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.no_grad():
            for parameter, value in zip(self.param_groups[0]["params"], self.values, strict=True):
                parameter.copy_(value)


def _mapped(tree: Any, function: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a tree of the same shape with a function's results; mappings in their order become dicts."""
    if isinstance(tree, Mapping):
        return {key: _mapped(one, function, f"{path}/{key}") for key, one in tree.items()}
    if isinstance(tree, list | tuple):
        found = [_mapped(one, function, f"{path}/{index}") for index, one in enumerate(tree)]
        if isinstance(tree, list):
            return found
        return type(tree)(*found) if hasattr(tree, "_fields") else tuple(found)
    return function(path, tree)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for one in tree:
            yield from _leaves(one)
    else:
        yield tree


def _tensor(path: str, leaf: Any) -> torch.Tensor:
    array = np.asarray(leaf)
    if array.dtype.name not in _DTYPES:
        raise refusal(f"the array {path or 'itself'} has a type that is not exchanged", got=array.dtype.name,
                      allowed=", ".join(_DTYPES),
                      remedy="float32 parameters, cast where the model computes")  # fmt: skip
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))  # a copy


def _module(tree: Any) -> nn.Module:
    """Return a module of the same shape: methods find a model's blocks in its lists."""
    if isinstance(tree, nn.Parameter):
        return nn.ParameterList([tree])
    is_named = isinstance(tree, dict)
    children = [_module(one) for one in (tree.values() if is_named else tree)]
    if not is_named:
        return nn.ModuleList(children)
    found = nn.Module()
    for index, (key, child) in enumerate(zip(tree, children, strict=True)):
        # a dot would part a name, and some names are a module's own
        found.add_module(f"{index}_{str(key).replace('.', '_')}", child)
    return found
