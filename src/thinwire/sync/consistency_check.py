"""Consistency checks between replicas: the handshake before the first step, and the hashes sent with the rounds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from thinwire.errors import DesyncError, PayloadError
from thinwire.sync.fragments import parameters_by_name, plain_name
from thinwire.sync.schedule import Round
from thinwire.transport.base import Envelope, Transport
from thinwire.transport.shards import local_shard
from thinwire.transport.streams import SETUP

_FINGERPRINT_BYTES = 2048
# 128 bits of each tensor's SHA-256.
_DIGEST_BYTES = 16
# Of the list of a model's tensors: 100 bytes each for 160,000 of them.
_MOST_LISTING_BYTES = 2**24


def handshake(
    model: nn.Module, *, description: str, transport: Transport, deadline_s: float, copies: Sequence[torch.Tensor] = ()
) -> None:
    """Compare the set-ups of all replicas, then give all of them replica 0's trained parameters and buffers.

    Tensors are compared by hash, and only those that differ are sent: none after building the model from the same
    seed, the adapters alone where only these differ. Frozen parameters are never sent: they may be far larger than what
    is trained, so each replica loads its own.

    Args:
        model: The replica's model; changed in place where it differs from replica 0's.
        description: What must be the same on all replicas, such as the method's parts.
        transport: Joins the replicas.
        deadline_s: Seconds to wait for the others.
        copies: What the inner optimizer keeps of the weights: set to replica 0's too.

    Raises:
        DesyncError: Another replica runs another model or method, or has other frozen parameters; names it and the
            first tensor or part that differs.
        TransportError: A replica could not be reached.
    """
    if transport.num_replicas == 1:
        return
    frozen = {name: local_shard(p) for name, p in parameters_by_name(model).items() if not p.requires_grad}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tensors = [local_shard(tensor) for tensor in [*trained, *model.buffers(), *copies]]
    digests, frozen_digests = _digests(tensors), _digests(list(frozen.values()))
    named = [*model.named_parameters(), *model.named_buffers()]
    # name, shape, dtype and whether it is trained of each of the model's parameters and buffers
    listing = json.dumps(
        [(plain_name(name), list(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in named]
    ).encode()
    own = {
        "description": description, "model": hashlib.sha256(listing).hexdigest(),
        "values": hashlib.sha256(digests).hexdigest(), "frozen": hashlib.sha256(frozen_digests).hexdigest(),
        "listing_bytes": str(len(listing)),
    }  # fmt: skip
    text = json.dumps(own).encode()
    if len(text) > _FINGERPRINT_BYTES:
        text = json.dumps({**own, "description": _shortened(description)}).encode()
    peers = [peer for peer in range(transport.num_replicas) if peer != transport.replica]
    talk = partial(_exchange, transport=transport, deadline_s=deadline_s)
    raw = talk(text.ljust(_FINGERPRINT_BYTES), dict.fromkeys(peers, _FINGERPRINT_BYTES), part=0)
    others = {peer: _parse_fingerprint(found, peer=peer) for peer, found in raw.items()}
    for replica, theirs in others.items():
        if theirs["description"] not in (description, _shortened(description)):
            there, here = _first_part(theirs["description"], description)
            raise DesyncError(
                f"replica {replica} runs another method or other options of it: {there}, here (replica "
                f"{transport.replica}): {here}; start all replicas with the same options and the same thinwire"
            )
    # all replicas hold all fingerprints, so all of them come here or none
    if any(theirs["model"] != own["model"] for theirs in others.values()):
        sizes = {peer: _listing_bytes(theirs["listing_bytes"], peer=peer) for peer, theirs in others.items()}
        found = talk(listing, sizes, part=1)
        replica = next(peer for peer, theirs in others.items() if theirs["model"] != own["model"])
        others_list, own_list = parse_listing(found[replica], peer=replica), json.loads(listing)
        pairs = enumerate(zip(others_list, own_list, strict=False))
        place = next((at for at, (other, own_one) in pairs if other != own_one), min(len(others_list), len(own_list)))
        raise DesyncError(
            f"replica {replica} runs another model; the first tensor that differs is number {place + 1}: "
            f"{_tensor_text(others_list, place)}, here (replica {transport.replica}): {_tensor_text(own_list, place)}; "
            f"start all replicas with the same model and options"
        )
    if any(theirs["frozen"] != own["frozen"] for theirs in others.values()):
        found = talk(frozen_digests, dict.fromkeys(peers, len(frozen_digests)), part=3)
        replica = next(peer for peer, theirs in found.items() if theirs != frozen_digests)
        places = _differing(frozen_digests, found[replica])
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        raise DesyncError(
            f"replica {replica} has other values than replica {transport.replica} in the frozen parameter "
            f"{list(frozen)[places[0]][:300]}{more}; frozen parameters are never sent: load the same weights on all "
            f"hosts"
        )
    if any(theirs["values"] != own["values"] for theirs in others.values()):
        found = talk(digests, dict.fromkeys(peers, len(digests)), part=2)
        _copy_differing(tensors, digests, found, transport=transport, deadline_s=deadline_s)


def _copy_differing(
    tensors: Sequence[torch.Tensor], own: bytes, others: Mapping[int, bytes], *, transport: Transport, deadline_s: float
) -> None:
    """Overwrite the tensors that differ from replica 0's with these, bit for bit."""
    if transport.replica == 0:
        sends = []
        for peer, theirs in others.items():
            if differing := [tensors[place] for place in _differing(own, theirs)]:
                raw = _as_bytes(differing)
                sends.append(transport.send(raw, to=peer, envelope=_values(raw.numel())))
        for pending in sends:
            pending.wait(deadline_s=deadline_s)
        return
    differing = [tensors[place] for place in _differing(own, others[0])]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in differing)
    if not differing:
        return
    received = transport.receive(source=0, envelope=_values(num_bytes)).wait(deadline_s=deadline_s)
    assert received is not None
    start = 0
    for tensor in differing:
        size = tensor.numel() * tensor.element_size()
        part = received.payload[start : start + size].clone().view(tensor.dtype).view(tensor.shape)
        tensor.copy_(part)
        start += size


def _values(num_bytes: int) -> Envelope:
    return Envelope(stream=SETUP, key=(1,), payload_bytes=num_bytes, numel=num_bytes)


def _differing(own: bytes, other: bytes) -> list[int]:
    """Return the places of the tensors whose digests differ."""
    size = _DIGEST_BYTES
    return [at // size for at in range(0, len(own), size) if own[at : at + size] != other[at : at + size]]


def _exchange(
    own: bytes, sizes: Mapping[int, int], *, part: int, transport: Transport, deadline_s: float
) -> dict[int, bytes]:
    """Send bytes to all other replicas, and return theirs; `sizes` holds how many each of them sends."""
    receives = {
        peer: transport.receive(source=peer, envelope=_set_up(part, num_bytes)) for peer, num_bytes in sizes.items()
    }
    payload = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    sends = [transport.send(payload, to=peer, envelope=_set_up(part, len(own))) for peer in sizes]
    found = {}
    for peer, pending in receives.items():
        received = pending.wait(deadline_s=deadline_s)
        assert received is not None
        found[peer] = bytes(received.payload.numpy())
    for pending in sends:
        pending.wait(deadline_s=deadline_s)
    return found


def _set_up(part: int, num_bytes: int) -> Envelope:
    return Envelope(stream=SETUP, key=(0, part), payload_bytes=num_bytes)


def _shortened(description: str) -> str:
    return hashlib.sha256(description.encode()).hexdigest()


def _first_part(there: str, here: str) -> tuple[str, str]:
    """Return the first part of two descriptions in which they differ."""
    if " | " not in there:  # it was too long to send
        return there, _shortened(here)
    pairs = list(zip(there.split(" | "), here.split(" | "), strict=False))
    return next((pair for pair in pairs if pair[0] != pair[1]), (there, here))


def _listing_bytes(text: str, *, peer: int) -> int:
    if not text.isdecimal() or not 0 < int(text[:12]) <= _MOST_LISTING_BYTES or len(text) > 12:
        raise PayloadError(f"replica {peer} announces a list of tensors of {text[:40]!r} bytes; run the same thinwire")
    return int(text)


def parse_listing(raw: bytes, *, peer: int) -> list[list[object]]:
    """Read the list of another replica's tensors.

    Raises:
        PayloadError: It is no such list.
    """
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError) as failure:
        raise PayloadError(f"replica {peer} sent a list of tensors that is no JSON; run the same thinwire") from failure
    if not isinstance(parsed, list) or not all(map(_is_tensor, parsed)):
        raise PayloadError(f"replica {peer} sent a list of tensors of the wrong form; run the same thinwire")
    return parsed


def _is_tensor(one: object) -> bool:
    if not isinstance(one, list) or len(one) != 4:
        return False
    name, shape, dtype, is_trained = one
    has_shape = isinstance(shape, list) and all(isinstance(size, int) for size in shape)
    return has_shape and isinstance(name, str) and isinstance(dtype, str) and isinstance(is_trained, bool)


def _tensor_text(tensors: Sequence[Sequence[object]], place: int) -> str:
    if place >= len(tensors):
        return f"no such tensor, {len(tensors)} in all"
    name, shape, dtype, is_trained = tensors[place]
    text = f"{name} of shape {shape} in {str(dtype).removeprefix('torch.')}{'' if is_trained else ', not trained'}"
    return text[:300]


def _parse_fingerprint(raw: bytes, *, peer: int) -> dict[str, str]:
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError) as failure:
        raise PayloadError(f"replica {peer} sent a fingerprint that is no JSON; run the same thinwire") from failure
    if not isinstance(parsed, dict) or not all(isinstance(value, str) for value in parsed.values()):
        raise PayloadError(f"replica {peer} sent a fingerprint of the wrong form; run the same thinwire on all hosts")
    if set(parsed) != {"description", "model", "values", "frozen", "listing_bytes"}:
        raise PayloadError(f"replica {peer} sent a fingerprint with the fields {str(sorted(parsed))[:200]}")
    return parsed


def _digests(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the digest of each tensor's bytes, one behind the other."""
    found = (hashlib.sha256(_as_bytes([tensor]).numpy().data).digest() for tensor in tensors)
    return b"".join(digest[:_DIGEST_BYTES] for digest in found)


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
