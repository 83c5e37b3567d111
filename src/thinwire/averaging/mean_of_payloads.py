"""Mean of the members' payloads: decoded in one order everywhere, summed in float32, errors name the sender."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from thinwire.averaging.topology import Peers
from thinwire.codecs.base import Codec
from thinwire.errors import NonFiniteError


def mean_of(
    codec: Codec, payloads: Mapping[int, torch.Tensor], *, peers: Peers, numel: int, device: torch.device, what: str
) -> torch.Tensor:
    """Decode the payloads of all members and return their mean: float32, `(numel,)`; absent members count as zero.

    Raises:
        NonFiniteError: A payload held NaN or infinity; names its sender.
        PayloadError: A payload is broken.
    """
    total = torch.zeros(numel, dtype=torch.float32, device=device)
    for peer in peers.senders:  # one order everywhere: float addition is not associative
        total += decode(codec, payloads[peer].to(device), numel=numel, peer=peer, what=what)
    return total.div_(len(peers.members))


def decode(codec: Codec, payload: torch.Tensor, *, numel: int, peer: int, what: str) -> torch.Tensor:
    """Decode one member's payload.

    Raises:
        NonFiniteError: It held NaN or infinity; names its sender.
        PayloadError: It is broken.
    """
    try:
        return codec.decode(payload, numel=numel)
    except NonFiniteError as failure:
        raise NonFiniteError(_diverged(peer, what=what)) from failure


def check_finite(mean: torch.Tensor, codec: Codec, payloads: Mapping[int, torch.Tensor], *, what: str) -> None:
    """Refuse a mean that is not finite.

    Raises:
        NonFiniteError: Names the member whose payload was not, or reports that the sum overflowed.
    """
    # the sum is finite only if every element is; decoding again to find the culprit happens once, in a run that ends
    if bool(torch.isfinite(mean.sum())) or bool(torch.isfinite(mean).all()):
        return
    for peer, payload in payloads.items():
        if not bool(torch.isfinite(codec.decode(payload, numel=mean.numel())).all()):
            raise NonFiniteError(_diverged(peer, what=what))
    raise NonFiniteError(f"{what}: the sum of the replicas' payloads overflows float32; lower the learning rate")


def refuse_non_finite(vector: torch.Tensor, *, peer: int, what: str) -> None:
    """Refuse what a member's payload decodes to where it is not finite.

    Raises:
        NonFiniteError: Names the member.
    """
    if not bool(torch.isfinite(vector.sum())) and not bool(torch.isfinite(vector).all()):
        raise NonFiniteError(_diverged(peer, what=what))


def _diverged(peer: int, *, what: str) -> str:
    return (
        f"{what}: replica {peer} sent NaN or infinity; its model has diverged: look at its loss, lower its learning "
        f"rate or clip its gradients, and resume from a checkpoint before that"
    )
