"""Message bytes: a versioned, checksummed header of 56 bytes, and the payload.

Every field is checked on arrival: a peer's bytes are untrusted input. The layout, little endian:

| offset | bytes | field |
| --- | --- | --- |
| 0 | 2 | magic `TW` |
| 2 | 1 | version, 2 |
| 3 | 1 | stream |
| 4 | 2 | owner |
| 6 | 1 | third part of the key |
| 7 | 1 | codec id |
| 8 | 4 | sender |
| 12 | 4 | second part of the key |
| 16 | 8 | first part of the key |
| 24 | 8 | elements |
| 32 | 8 | payload bytes |
| 40 | 8 | note |
| 48 | 4 | CRC-32 of the payload |
| 52 | 4 | CRC-32 of the 52 bytes before |
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from thinwire.errors import PayloadError
from thinwire.transport.base import Envelope, Received
from thinwire.transport.streams import FORMAT_VERSION

MAGIC = b"TW"
_FIELDS = struct.Struct("<2sBBHBBIIQQQ8sI")
HEADER_BYTES = _FIELDS.size + 4
# Of a transport, for tests of faults: returns what goes on the wire of a packed message, or None to lose it.
Tamper = Callable[[torch.Tensor], "torch.Tensor | None"]


def pack(payload: torch.Tensor, *, sender: int, envelope: Envelope) -> torch.Tensor:
    """Put the header before a payload.

    Args:
        payload: uint8, `(payload_bytes,)`, contiguous, on the CPU.
        sender: The replica that sends.
        envelope: The message's envelope; its `payload_bytes` must be the payload's.

    Returns:
        uint8, `(HEADER_BYTES + payload_bytes,)`.

    Raises:
        ValueError: The payload is of another form or size.
    """
    if not (payload.dtype == torch.uint8 and payload.dim() == 1 and payload.device.type == "cpu"):
        got = f"{payload.dtype}, shape {tuple(payload.shape)}, on {payload.device}"
        raise ValueError(
            f"a message is a row of uint8 on the CPU, got {got}; pack it with .view(torch.uint8).flatten()"
        )
    if payload.numel() != envelope.payload_bytes:
        raise ValueError(
            f"{envelope.describe()} has {payload.numel()} bytes, and its envelope says {envelope.payload_bytes}; "
            f"give payload_bytes=payload.numel()"
        )
    message = torch.empty(HEADER_BYTES + payload.numel(), dtype=torch.uint8)
    message[HEADER_BYTES:] = payload
    view = message.numpy().data
    view[:HEADER_BYTES] = header_of(zlib.crc32(view[HEADER_BYTES:]), sender=sender, envelope=envelope)
    return message


def header_of(payload_crc: int, *, sender: int, envelope: Envelope) -> bytes:
    """Return the header alone, for a payload that is sent without a copy.

    Returns:
        `HEADER_BYTES` bytes.
    """
    stream, owner, number, part, phase = envelope.address
    fields = _FIELDS.pack(
        MAGIC, FORMAT_VERSION, stream, owner, phase, envelope.codec_id, sender, part, number, envelope.numel,
        envelope.payload_bytes, envelope.note, payload_crc,
    )  # fmt: skip
    return fields + struct.pack("<I", zlib.crc32(fields))


class Header(NamedTuple):
    """Fields of a checked header that describe its payload."""

    payload_bytes: int
    payload_crc: int
    note: bytes


def check_header(view: memoryview, *, source: int, envelope: Envelope) -> Header:
    """Check a message's header against the expected envelope; the payload need not have arrived yet.

    Args:
        view: The message's first bytes.
        source: The replica it should come from.
        envelope: The expected envelope; if it `takes_less`, the payload may be shorter.

    Raises:
        PayloadError: Names the field that is wrong, what was found and what was expected.
    """
    origin = f"{envelope.describe()} from replica {source}"
    if len(view) < HEADER_BYTES:
        raise PayloadError(f"{origin}: {len(view)} bytes arrived, fewer than a header's {HEADER_BYTES}")
    fields = bytes(view[: _FIELDS.size])
    if struct.unpack("<I", view[_FIELDS.size : HEADER_BYTES])[0] != zlib.crc32(fields):
        raise PayloadError(f"{origin}: the header's checksum is wrong; the bytes were damaged on the way")
    magic, version, *found = _FIELDS.unpack(fields)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise PayloadError(
            f"{origin}: expected a thinwire message of version {FORMAT_VERSION}, found {magic!r} version {version}; "
            f"run the same thinwire on all hosts"
        )
    *compared, stated_bytes, note, payload_crc = found
    stream, address = envelope.stream, envelope.address
    expected = (
        ("stream", address.stream), ("owner", address.owner), (stream.part_name(2), address.phase),
        ("codec", envelope.codec_id), ("sender", source), (stream.part_name(1), address.part),
        (stream.part_name(0), address.number), ("elements", envelope.numel),
    )  # fmt: skip
    for (field, want), have in zip(expected, compared, strict=True):
        if want != have:
            raise PayloadError(f"{origin}: {field} is {have}, expected {want}; the replicas run different set-ups")
    limit = envelope.payload_bytes
    if stated_bytes > limit or (stated_bytes < limit and not envelope.takes_less):
        raise PayloadError(
            f"{origin}: payload bytes is {stated_bytes}, expected {'at most ' if envelope.takes_less else ''}{limit}; "
            f"the replicas run different set-ups"
        )
    return Header(payload_bytes=stated_bytes, payload_crc=payload_crc, note=note)


def unpack(message: torch.Tensor, *, source: int, envelope: Envelope) -> Received:
    """Check a message (uint8, one-dimensional, CPU) as `check_header` does, and return its payload.

    Raises:
        PayloadError: Names the field that is wrong, what was found and what was expected.
    """
    view = message.numpy().data
    header = check_header(view, source=source, envelope=envelope)
    origin = f"{envelope.describe()} from replica {source}"
    body = view[HEADER_BYTES:]
    if len(body) != header.payload_bytes:
        raise PayloadError(f"{origin}: {len(body)} payload bytes arrived, expected {header.payload_bytes}")
    if zlib.crc32(body) != header.payload_crc:
        raise PayloadError(f"{origin}: the payload's checksum is wrong; the bytes were damaged on the way")
    return Received(payload=message[HEADER_BYTES:], note=header.note)
