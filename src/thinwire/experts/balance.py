"""Load-balancing loss of routers, whose expert shares are those of a micro-batch, of all ranks, or of a step so far."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn

from thinwire.errors import refusal, unknown_name
from thinwire.experts.layer import ExpertLayer, Over
from thinwire.transport.group_peers import exchange_all, peers_of


def balance_loss(model: nn.Module, *, over: Over = "ranks", group: Any = None, counted: Tensor | None = None) -> Tensor:
    """Return the mean over layers of N sum_i f_i P_i: 1 where N experts get equally many tokens, N where one gets all.

    f_i is the share of choices that expert i got, P_i its mean probability over this rank's tokens; only P_i has a
    gradient. Call it after the forward pass and before the backward pass. Counts of all layers are one message.

    Args:
        model: With layers of experts that have run.
        over: Whose choices make f. `"micro-batch"`: this rank's. `"ranks"`: those of all ranks, so that the mean of
            their losses equals one process, without gradient accumulation. `"global-batch"`: those too, and of the
            step's earlier micro-batches, see `step`.
        group: Ranks, as for `parallelize`; those of several replicas too. Default: those that share the experts.
        counted: Which tokens are no padding, bool, in the order of the layers' tokens. Default: all.

    Returns:
        A scalar, float32 or wider.

    Raises:
        ValueError: No layer has run, or `"global-batch"` runs outside of `step`.
        TransportError: A rank is gone or hangs.

    Reference:
        arXiv 2501.11873, equations 2 to 4; `"micro-batch"` is that of arXiv 2101.03961, equation 4.
    """
    if over not in get_args(Over):
        raise unknown_name("balance", over, get_args(Over))
    layers = [layer for layer in model.modules() if isinstance(layer, ExpertLayer) and layer.routed is not None]
    if not layers:
        raise refusal("no layer of experts has run", got=type(model).__name__, allowed="a model of ExpertLayer",
                      remedy="to call the model first")  # fmt: skip
    if over == "global-batch" and any(layer.step_counts is None for layer in layers):
        raise refusal('over="global-batch" counts the choices of a step', got="no step", allowed="a call inside of one",
                      remedy="with experts.step(model): around all passes of a step")  # fmt: skip
    routed = [_counted(layer, counted) for layer in layers]
    counts = torch.cat([chosen.flatten().bincount(minlength=count) for _, chosen, count in routed])
    if over != "micro-batch":
        counts = _summed(counts, layers[0].peers if group is None else group)
    parts = torch.split(counts, [layer.num_experts for layer in layers])
    losses = []
    for layer, (probabilities, _, size), own in zip(layers, routed, parts, strict=True):
        if over == "global-batch":
            assert layer.step_counts is not None
            layer.step_counts = own = layer.step_counts + own
        shares = own.to(probabilities.dtype) / own.sum().clamp(min=1)
        # a rank without tokens has no mean, but takes part in the backward pass
        losses.append(size * (shares * probabilities.sum(0) / max(1, len(probabilities))).sum())
    return torch.stack(losses).mean()


def _counted(layer: ExpertLayer, counted: Tensor | None) -> tuple[Tensor, Tensor, int]:
    assert layer.routed is not None
    probabilities, chosen = layer.routed
    if counted is not None:
        probabilities, chosen = probabilities[counted.flatten()], chosen[counted.flatten()]
    return probabilities, chosen, layer.num_experts


def _summed(counts: Tensor, group: Any) -> Tensor:
    """Return the sum of whole numbers over ranks, each of which gets those of all others."""
    if group is None:
        return counts
    peers = peers_of(group)
    arriving = {rank: torch.zeros_like(counts) for rank in range(peers.size) if rank != peers.rank}
    exchange_all(peers, dict.fromkeys(arriving, counts), arriving)
    return torch.stack([counts, *arriving.values()]).sum(0)
