"""Measuring the statistics of BatchNorm anew, which no average of models has right.

The variance of an averaged unit is smaller than the average of the variances, so a merged model with averaged
statistics is far off until they are measured on data (arXiv 2211.08403).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def has_statistics(model: nn.Module) -> bool:
    """Return whether some BatchNorm of the model keeps running statistics."""
    return any(True for _ in _norms(model))


@torch.no_grad()
def reset_statistics(model: nn.Module, batches: Iterable[torch.Tensor]) -> None:
    """Replace the running statistics of every BatchNorm by their plain mean over some batches.

    Every batch counts the same, whatever its size. Only BatchNorm is in training mode meanwhile; dropout is off. Modes
    and momenta are as before afterwards. A model without running statistics is not run at all.

    Args:
        model: The model; only its running statistics change.
        batches: Inputs on the model's device, each of at least two samples.

    Example:
        >>> norm = nn.BatchNorm1d(1)
        >>> reset_statistics(norm, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])])
        >>> norm.running_mean.item(), norm.running_var.item(), norm.training
        (4.0, 2.0, True)
    """
    norms = list(_norms(model))
    if not norms:
        return
    modes = {module: module.training for module in model.modules()}
    momenta = [norm.momentum for norm in norms]
    try:
        model.eval()
        for norm in norms:
            norm.train()
            norm.momentum = None  # a cumulative mean instead of an exponential one
            norm.reset_running_stats()
        for batch in batches:
            model(batch)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _norms(model: nn.Module) -> Iterator[_BatchNorm]:
    return (module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats)
