"""Messages between the two owners of a split model: a JSON head that names its payload's size, then the payload.

| message | from | payload | answer |
| --- | --- | --- | --- |
| `hello` | client | | `welcome` or `refused` |
| `forward` | client | coded input of the body, and which tokens are padding | `hidden` |
| `gradient` | client | coded gradient of the body's output | `input_gradient`, or `missing` |
| `apply` | client | | `applied`, or `missing` |

A call is one pass through the body; a client counts its calls. The same message may be sent again: the server computes
the same answer, and adds a gradient once. Payloads travel in pieces, so that heartbeats are not behind a long one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from thinwire.elastic.protocol import decoder
from thinwire.errors import PayloadError
from thinwire.transport.secret import Secret
from thinwire.transport.wire.connection import HANDSHAKE_S, KeyPair, set_socket_options
from thinwire.transport.wire.zeromq import z85, zmq

VERSION = 1
PIECE_BYTES = 1 << 15
_HEAD, _PIECE = b"h", b"p"
_MAX_HEAD_BYTES = 1 << 14
# Pieces that may wait in one of libzmq's queues; beyond them the sender waits.
_QUEUE = 32

Message = dict[str, Any]

_Count = Annotated[int, Meta(ge=0, le=(1 << 48) - 1)]
_Text = Annotated[str, Meta(max_length=1000)]
_Codec = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,32}\Z")]
_Session = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Layers = Annotated[str, Meta(pattern=r"^[0-9]{1,6}:[0-9]{1,6}\Z")]
_Width = Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]
_Generation = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Calls = Annotated[list[_Count], Meta(max_length=1024)]

_TO_SERVER: dict[str, dict[str, Any]] = {
    "hello": {"version": _Count, "session": _Session, "forward": _Codec, "backward": _Codec},
    "forward": {
        "call": _Count, "batch": _Count, "seq": _Count, "masked": bool, "trains": bool, "bytes": _Count,
    },
    "gradient": {"call": _Count, "step": _Count, "bytes": _Count},
    "apply": {"step": _Count, "calls": _Calls},
}  # fmt: skip
_TO_CLIENT: dict[str, dict[str, Any]] = {
    "welcome": {"width": _Width, "layers": _Layers, "sha256": _Text, "is_trained": bool, "applied": _Count,
                "most_tokens": _Count, "generation": _Generation},
    "refused": {"why": _Text},
    "hidden": {"call": _Count, "bytes": _Count},
    "input_gradient": {"call": _Count, "bytes": _Count},
    "missing": {"calls": _Calls},
    "applied": {"step": _Count},
    "failed": {"call": _Count, "why": _Text, "is_non_finite": bool},
}  # fmt: skip


_DECODE_FOR_SERVER, _DECODE_FOR_CLIENT = decoder(_TO_SERVER), decoder(_TO_CLIENT)


def frames(message: Message, payload: torch.Tensor | None = None) -> Iterator[bytes]:
    """Yield the frames of a message.

    Args:
        message: With its `kind`.
        payload: uint8, one-dimensional, CPU; as many bytes as the message says.
    """
    yield _HEAD + msgspec.json.encode(message)
    if payload is not None:
        raw: Any = memoryview(payload.contiguous().numpy()).cast("B")  # type: ignore[arg-type]
        for begin in range(0, len(raw), PIECE_BYTES):
            yield _PIECE + bytes(raw[begin : begin + PIECE_BYTES])


@dataclass(slots=True, kw_only=True)
class Assembly:
    """Messages of one connection, put together from frames; memory is asked for as pieces come, up to `most_bytes`.

    Attributes:
        to_server: Which of the two schemas the messages must have.
        most_bytes: Returns how many bytes the payload of a message may have, or raises `PayloadError`.
    """

    to_server: bool
    most_bytes: Callable[[Message], int]
    _message: Message | None = None
    _payload: bytearray | None = None
    _size: int = 0

    def add(self, frame: memoryview) -> tuple[Message, torch.Tensor] | None:
        """Add a frame; return a message and its payload (uint8) when they are whole.

        Raises:
            PayloadError: The frame is none of this protocol, or the payload is larger than it may be.
        """
        if frame[:1] == _HEAD and len(frame) <= _MAX_HEAD_BYTES:
            try:
                found = (_DECODE_FOR_SERVER if self.to_server else _DECODE_FOR_CLIENT).decode(frame[1:])
            except (ValueError, RecursionError) as error:  # all errors of msgspec are ValueErrors
                raise PayloadError(f"a message of a split model that does not fit: {str(error)[:200]}") from None
            message = {"kind": found.__struct_config__.tag, **msgspec.structs.asdict(found)}
            size = message.get("bytes", 0)
            if size != (most := self.most_bytes(message)):
                raise PayloadError(f"a message {message['kind']!r} with a payload of {size} bytes, expected {most}")
            self._message, self._payload, self._size = message, bytearray(), size
        elif frame[:1] == _PIECE and self._payload is not None:
            if not 1 < len(frame) <= self._size - len(self._payload) + 1:
                raise PayloadError("a piece of a payload that is empty or goes beyond its end")
            self._payload += frame[1:]
        else:
            raise PayloadError(f"a frame of {len(frame)} bytes that belongs to no message of a split model")
        if self._message is None or self._payload is None or len(self._payload) < self._size:
            return None
        message, payload = self._message, self._payload
        self._message = self._payload = None
        if not payload:
            return message, torch.empty(0, dtype=torch.uint8)
        return message, torch.frombuffer(payload, dtype=torch.uint8)


def keys_of(secret: Secret, *, side: str) -> KeyPair:
    """Return the keys of the `server` or of the `client`; both follow from the secret that the two owners share."""
    private = z85.encode(secret.derive(f"thinwire split v1 {side}"))
    return KeyPair(public=zmq.curve_public(private), private=private)


def set_split_options(plug: zmq.Socket[bytes]) -> None:
    """Set bounds and times for both ends."""
    # a piece of a payload takes half a minute at 9 kbit/s
    silence_ms = round(3 * HANDSHAKE_S * 1000)
    set_socket_options(
        plug, most_bytes=PIECE_BYTES + 1, receive_frames=_QUEUE, send_frames=_QUEUE, silence_ms=silence_ms
    )
