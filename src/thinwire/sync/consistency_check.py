"""Consistency checks between replicas: the handshake before the first step, and the hashes sent with the rounds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from thinwire.errors import DesyncError, PayloadError
from thinwire.sync.schedule import Round
from thinwire.transport.base import Envelope, Kind, Transport
from thinwire.transport.shards import local_shard

_FINGERPRINT_BYTES = 2048


def handshake(model: nn.Module, *, description: str, transport: Transport, deadline_s: float) -> None:
    """Compare the set-ups of all replicas, then give all of them replica 0's trained parameters and buffers.

    Nothing is sent where the values are the same bits already, as after building the model from the same seed. Frozen
    parameters are never sent: they may be far larger than what is trained, so each replica loads its own.

    Args:
        model: The replica's model; changed in place where it differs from replica 0's.
        description: What must be the same on all replicas, such as the method's parts.
        transport: Joins the replicas.
        deadline_s: Seconds to wait for the others.

    Raises:
        DesyncError: Another replica runs another model or method, or has other frozen parameters; names it.
        TransportError: A replica could not be reached.
    """
    if transport.num_replicas == 1:
        return
    tensors = _sent_tensors(model)
    own = {
        "description": description, "model": _shape_digest(model), "values": _value_digest(tensors),
        "frozen": _value_digest([local_shard(p) for p in model.parameters() if not p.requires_grad]),
    }  # fmt: skip
    others = _exchange_fingerprints(own, transport=transport, deadline_s=deadline_s)
    for replica, theirs in others.items():
        for field, mine in own.items():
            if field == "frozen" and theirs.get(field) != mine:
                raise DesyncError(
                    f"replica {replica} has other frozen parameters than replica {transport.replica}, and these are "
                    f"never sent; load the same weights on all hosts"
                )
            if field != "values" and theirs.get(field) != mine:
                raise DesyncError(
                    f"replica {replica} runs another {field}: {theirs.get(field)!r}, here (replica "
                    f"{transport.replica}): {mine!r}; start all replicas with the same model and options"
                )
    digests = {theirs["values"] for theirs in others.values()} | {own["values"]}
    if len(digests) > 1:
        broadcast(tensors, transport=transport, deadline_s=deadline_s, number=1)


def broadcast(tensors: Sequence[torch.Tensor], *, transport: Transport, deadline_s: float, number: int) -> None:
    """Overwrite tensors with those of replica 0, bit for bit.

    Args:
        tensors: Any shapes and dtypes, the same on all replicas.
        transport: Joins the replicas.
        deadline_s: Seconds to wait.
        number: The same on all replicas, another one for every call.
    """
    raw = _as_bytes(tensors)
    envelope = Envelope(kind=Kind.SETUP, round_id=number, payload_bytes=raw.numel(), numel=raw.numel())
    if transport.replica == 0:
        sends = [transport.send(raw, to=peer, envelope=envelope) for peer in range(1, transport.num_replicas)]
        for pending in sends:
            pending.wait(deadline_s=deadline_s)
        return
    received = transport.receive(source=0, envelope=envelope).wait(deadline_s=deadline_s)
    assert received is not None
    start = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        part = received.payload[start : start + size].clone().view(tensor.dtype).view(tensor.shape)
        tensor.copy_(part)
        start += size


def _exchange_fingerprints(
    own: dict[str, str], *, transport: Transport, deadline_s: float
) -> dict[int, dict[str, str]]:
    text = json.dumps(own).encode()
    if len(text) > _FINGERPRINT_BYTES:
        shortened = {**own, "description": hashlib.sha256(own["description"].encode()).hexdigest()}
        text = json.dumps(shortened).encode()
    payload = torch.frombuffer(bytearray(text.ljust(_FINGERPRINT_BYTES)), dtype=torch.uint8)
    envelope = Envelope(kind=Kind.SETUP, round_id=0, payload_bytes=_FINGERPRINT_BYTES)
    others = [peer for peer in range(transport.num_replicas) if peer != transport.replica]
    receives = {peer: transport.receive(source=peer, envelope=envelope) for peer in others}
    sends = [transport.send(payload, to=peer, envelope=envelope) for peer in others]
    result = {}
    for peer, pending in receives.items():
        received = pending.wait(deadline_s=deadline_s)
        assert received is not None
        result[peer] = _parse_fingerprint(bytes(received.payload.numpy()), peer=peer)
    for pending in sends:
        pending.wait(deadline_s=deadline_s)
    return result


def _parse_fingerprint(raw: bytes, *, peer: int) -> dict[str, str]:
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError) as failure:
        raise PayloadError(f"replica {peer} sent a fingerprint that is no JSON; run the same thinwire") from failure
    if not isinstance(parsed, dict) or not all(isinstance(value, str) for value in parsed.values()):
        raise PayloadError(f"replica {peer} sent a fingerprint of the wrong form; run the same thinwire on all hosts")
    if set(parsed) != {"description", "model", "values", "frozen"}:
        raise PayloadError(f"replica {peer} sent a fingerprint with the fields {str(sorted(parsed))[:200]}")
    return parsed


def _sent_tensors(model: nn.Module) -> list[torch.Tensor]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [local_shard(tensor) for tensor in [*trained, *model.buffers()]]


def _shape_digest(model: nn.Module) -> str:
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in named]
    total = sum(tensor.numel() for _, tensor in named)
    return f"{total} elements in {len(named)} tensors, {hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]}"


def _value_digest(tensors: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_as_bytes([tensor]).numpy().data)
    return digest.hexdigest()


def _as_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    parts = [tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def check_hashes(hashes: Mapping[int, int], *, round: Round) -> None:
    """Compare the replicas' hashes of their global values.

    Raises:
        DesyncError: They differ; names the replicas that are not with the majority, or all where there is none.
    """
    counts: dict[int, list[int]] = {}
    for replica, value in hashes.items():
        counts.setdefault(value, []).append(replica)
    if len(counts) <= 1:
        return
    largest = max(counts.values(), key=len)
    odd = sorted(set(hashes) - set(largest))
    if 2 * len(largest) <= len(hashes):
        odd = sorted(hashes)
    names = ", ".join(str(replica) for replica in odd)
    who = f"replica {names} disagrees with the others" if len(odd) == 1 else f"replicas {names} disagree"
    raise DesyncError(
        f"{who} about the global parameters of fragment {round.fragment}, or what is remembered of them, in round "
        f"{round.id}; something changed them outside the optimizer, a replica went on after a failed round, or the "
        f"hosts run different code; resume from a checkpoint before that"
    )
