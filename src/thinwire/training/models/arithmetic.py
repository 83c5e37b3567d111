"""The two formulas of the decoder whose gradients are worth writing out: the norm, and the loss with z-loss.

Autograd keeps a copy of every intermediate value and walks over memory once for each; on a CPU that costs more than the
arithmetic. The gradients here are exact, and the tests hold them against autograd's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

RMS_EPSILON = 1e-6


def rms_norm(values: Tensor, gain: Tensor) -> Tensor:
    """Divide each row by its root mean square, then multiply by a learned gain.

    Args:
        values: (..., width), any floating dtype.
        gain: A shape that broadcasts to `values` from the right: (width,), or (2, 1, width) for a gain that differs
            along an axis.

    Returns:
        Same shape and dtype as `values`.

    Example:
        >>> rms_norm(torch.tensor([[3.0, -3.0]]), torch.ones(2))
        tensor([[ 1., -1.]])

    Reference:
        arXiv 1910.07467, equation 4.
    """
    # torch.compile fuses the plain formula better than anything written by hand.
    if torch.compiler.is_compiling() or values.device.type != "cpu":
        return torch.nn.functional.rms_norm(values, values.shape[-1:], eps=RMS_EPSILON) * gain.to(values.dtype)
    normed: Tensor = _RmsNorm.apply(values, gain.to(values.dtype))  # type: ignore[no-untyped-call]
    return normed


def next_token_loss(logits: Tensor, targets: Tensor, *, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the mean of `nll + z_loss * log(Z)**2` over all positions, and the mean nll alone.

    The z-loss holds the normaliser log Z near zero, so that logits do not drift in long runs.

    Args:
        logits: (..., vocab_size), any floating dtype; computed in float32.
        targets: (...), int64, each in [0, vocab_size).
        z_loss: Weight of the second term, 1e-4 in the papers.

    Returns:
        Two float32 scalars; only the first carries a gradient.

    Reference:
        arXiv 2309.14322, section 3.1.2; weight as in arXiv 2501.18512, section 3.
    """
    flat = logits.reshape(-1, logits.shape[-1]).float()
    if torch.compiler.is_compiling():
        log_z = flat.logsumexp(-1)
        nll = (log_z - flat.gather(1, targets.reshape(-1, 1)).squeeze(1)).mean()
        return nll + z_loss * log_z.square().mean(), nll.detach()
    both: tuple[Tensor, Tensor] = _NextTokenLoss.apply(flat, targets.reshape(-1), z_loss)  # type: ignore[no-untyped-call]
    return both


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, gain: Tensor) -> Tensor:
        exact = torch.promote_types(values.dtype, torch.float32)
        norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True, dtype=exact)
        scale: Tensor = norm.square_().div_(values.shape[-1]).add_(RMS_EPSILON).rsqrt_().to(values.dtype)
        unit: Tensor = values * scale
        ctx.save_for_backward(unit, scale, gain)
        return unit * gain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        unit, scale, gain = ctx.saved_tensors
        product = grad * unit
        grad_gain: Tensor = product.sum_to_size(gain.shape)
        along = product.mul_(gain).mean(-1, keepdim=True)
        grad_values: Tensor = (grad * gain).addcmul_(unit, along, value=-1).mul_(scale)
        return grad_values, grad_gain


class _NextTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        log_z = logits.logsumexp(-1)
        nll = (log_z - logits.gather(1, targets.unsqueeze(1)).squeeze(1)).mean()
        ctx.save_for_backward(logits, targets, log_z)
        ctx.z_loss = z_loss
        total = nll + z_loss * log_z.square().mean()
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, log_z = ctx.saved_tensors
        share = grad / len(targets)
        # d log Z / d logits is the softmax; it is made once and turned into the gradient in place.
        softmax = (logits - log_z.unsqueeze(1)).exp_()
        grad_logits = softmax.mul_((share * (1 + 2 * ctx.z_loss * log_z)).unsqueeze(1))
        grad_logits.scatter_add_(1, targets.unsqueeze(1), (-share).expand(len(targets), 1))
        return grad_logits, None, None
