"""Small notes that every replica tells every other, outside of the rounds: JSON objects over the same transport."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from thinwire.errors import PayloadError
from thinwire.transport.base import Envelope, Kind, Transport

NOTE_BYTES = 8192


def all_gather_json(
    note: Mapping[str, Any], *, transport: Transport, number: int, deadline_s: float
) -> list[dict[str, Any]]:
    """Tell every replica a note and return the notes of all, in the replicas' order.

    Nobody returns before everybody has spoken, so it is a barrier too.

    Args:
        note: JSON values, at most `NOTE_BYTES` as text.
        transport: Joins the replicas.
        number: The same on all replicas, another one for every call of a run.
        deadline_s: Seconds to wait for the others.

    Raises:
        TransportError: A replica did not speak, or sent no JSON object.
        ValueError: The note is too long.
    """
    own = json.dumps(dict(note))
    text = own.encode()
    if len(text) > NOTE_BYTES:
        raise ValueError(f"a note holds at most {NOTE_BYTES} bytes, got {len(text)}")
    payload = torch.frombuffer(bytearray(text.ljust(NOTE_BYTES)), dtype=torch.uint8)
    envelope = Envelope(kind=Kind.CONTROL, round_id=number, payload_bytes=NOTE_BYTES)
    others = [peer for peer in range(transport.num_replicas) if peer != transport.replica]
    receives = [transport.receive(source=peer, envelope=envelope) for peer in others]
    sends = [transport.send(payload, to=peer, envelope=envelope) for peer in others]
    notes = {transport.replica: json.loads(own)}
    for peer, pending in zip(others, receives, strict=True):
        received = pending.wait(deadline_s=deadline_s)
        assert received is not None
        notes[peer] = _parse(bytes(received.payload.numpy()), peer=peer)
    for pending in sends:
        pending.wait(deadline_s=deadline_s)
    return [notes[replica] for replica in sorted(notes)]


def _parse(raw: bytes, *, peer: int) -> dict[str, Any]:
    try:
        note = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"replica {peer} sent a note that is no JSON; run the same thinwire on all hosts") from error
    if not isinstance(note, dict):
        raise PayloadError(f"replica {peer} sent a note that is no JSON object; run the same thinwire on all hosts")
    return note
