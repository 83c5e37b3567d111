"""Several optimizers of one model: `MultiOptimizer` joins them into one; `split_model` lets them step in turns."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from thinwire.compat import EagerOptimizer
from thinwire.errors import refusal


class MultiOptimizer(EagerOptimizer):
    """Optimizers of disjoint parameters behind the interface of one.

    Schedulers, clipping, `state_dict` and `DistributedOptimizer` see all groups in the order of the parts, and one
    state. The parts share both, so use them through this one only.

    Args:
        parts: The optimizers, at least one.

    Raises:
        ValueError: The parts hold no parameter, or one of them twice.

    Example:
        >>> w, b = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
        >>> joined = MultiOptimizer([torch.optim.SGD([w], lr=0.5), torch.optim.AdamW([b], lr=0.1)])
        >>> (w.sum() + b.sum()).backward()
        >>> joined.step()
        >>> w[0].tolist(), [group["lr"] for group in joined.param_groups]
        ([0.5, 0.5], [0.5, 0.1])
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        groups = [group for part in self.parts for group in part.param_groups]
        held = [id(parameter) for group in groups for parameter in group["params"]]
        if not held:
            raise ValueError(f"{len(self.parts)} parts hold no parameter; give at least one optimizer that holds some")
        if num_shared := sum(count > 1 for count in Counter(held).values()):
            raise ValueError(
                f"{num_shared} of {len(set(held))} parameters are given more than once, and would be stepped as often; "
                f"leave each in one part alone, such as matrices in Muon's and all others in AdamW's"
            )
        super().__init__(groups, {})
        for part in self.parts:
            self.state.update(part.state)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let each part step; a closure runs once, before the first.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: its owner would be undefined.

        Raises:
            ValueError: Always, once this is made.
        """
        if hasattr(self, "state") and self.state is getattr(self.parts[0], "state", None):
            raise ValueError("a MultiOptimizer takes no more groups; add it to a part before it is built")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Hand what was loaded to the parts."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        start = 0
        for part in self.parts:
            end = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:end]
            part.state = self.state
            start = end


def split_model(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[nn.Module]:
    """Return a model for each optimizer, which holds its parameters and no other's, for a `DistributedOptimizer` each.

    A GAN's optimizers step in turns, so each needs rounds of its own, over what it steps. The parts share the model's
    tensors and are not called: train with the model itself. Buffers, and parameters that no optimizer holds, are in the
    first part.

    Args:
        model: The whole model.
        optimizers: Optimizers of disjoint parameters, at least one.

    Raises:
        ValueError: Two of them hold one parameter.

    Example:
        >>> import thinwire
        >>> gan = nn.ModuleDict({"maker": nn.Linear(2, 2), "critic": nn.Linear(2, 1)})
        >>> inner = [torch.optim.SGD(part.parameters(), lr=0.1) for part in gan.values()]
        >>> parts = split_model(gan, inner)
        >>> [[name for name, _ in part.named_parameters()] for part in parts]
        [['maker.weight', 'maker.bias'], ['critic.weight', 'critic.bias']]
        >>> wrapped = [thinwire.DistributedOptimizer(p, o, method="diloco") for p, o in zip(parts, inner)]
    """
    held = [{id(parameter) for group in one.param_groups for parameter in group["params"]} for one in optimizers]
    if num_shared := sum(map(len, held)) - len(set().union(*held)):
        raise refusal(
            "optimizers that step in turns must hold parameters of their own", got=f"{num_shared} that two hold",
            allowed="each parameter in one optimizer", remedy="thinwire.MultiOptimizer where all step together",
        )  # fmt: skip
    others = set().union(*held[1:])
    first = {id(parameter) for parameter in model.parameters()} - others
    return [_part(model, ids, has_buffers=not index) for index, ids in enumerate([first, *held[1:]])]


def _part(module: nn.Module, ids: Collection[int], *, has_buffers: bool) -> nn.Module:
    """Return a copy that shares the tensors; its containers stay of their classes, by which blocks are found."""
    part = copy.copy(module)
    kept = {name: one for name, one in module._parameters.items() if one is None or id(one) in ids}
    children = {
        name: one if one is None else _part(one, ids, has_buffers=has_buffers) for name, one in module._modules.items()
    }
    part.__dict__.update(
        _parameters=kept, _modules=children, _buffers=dict(module._buffers) if has_buffers else {},
        _forward_pre_hooks=OrderedDict(), _forward_pre_hooks_with_kwargs=OrderedDict(),
    )  # fmt: skip
    return part
