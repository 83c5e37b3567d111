"""`MultiOptimizer` joins several optimizers of disjoint parameters into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thinwire.compat import EagerOptimizer


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
