"""PyTorch's DistributedDataParallel, plain and with its PowerSGD hook (arXiv 1905.13727)."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.lab.wire_benchmark.contenders import Trainer, loss_of

# The least that the hook takes with error feedback and warm start, both of which its documentation wants on: DDP makes
# its buckets again after the first step. Its rule of a tenth of all steps would leave little to measure in a short run.
_FIRST_COMPRESSED_STEP = 2
_MEBIBYTE = 1 << 20


def ddp_trainer(model: nn.Module, inner: torch.optim.Optimizer, *, powersgd_rank: int = 0) -> Trainer:
    """Train with DDP over torch's default group.

    Args:
        model: The same values on all ranks.
        inner: Over the model's parameters.
        powersgd_rank: Rank of the PowerSGD hook; 0 sends whole gradients. The first two steps send them too.
    """
    wrapped = _wrapped(model, has_one_bucket=powersgd_rank > 0)
    if powersgd_rank:
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=powersgd_rank,
            start_powerSGD_iter=_FIRST_COMPRESSED_STEP,
            use_error_feedback=True,
            warm_start=True,
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Trainer(optimizer=inner, loss=wrapped)


def _wrapped(model: nn.Module, *, has_one_bucket: bool) -> DistributedDataParallel:
    # The hook starts a bucket's second all-reduce when its first has ended. Over gloo, two buckets do so in an order
    # that differs between ranks, and gloo then ends the process: "Received data size doesn't match expected size".
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    bucket_cap_mb = num_bytes // _MEBIBYTE + 1 if has_one_bucket else None
    with warnings.catch_warnings():
        # The newer name of `broadcast_buffers` is not known to all versions of torch that thinwire runs with.
        warnings.simplefilter("ignore", FutureWarning)
        # What DDP would send beside the gradients is left out: ranks start from the same seed, and the model's buffers
        # are constants.
        return DistributedDataParallel(
            _Loss(model), broadcast_buffers=False, init_sync=False, gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_cap_mb,
        )  # fmt: skip


class _Loss(nn.Module):
    """DDP follows what its module's forward computes, so forward is the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._loss = loss_of(model)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self._loss(tokens, targets)
