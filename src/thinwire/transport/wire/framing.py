"""Frames of the wire: one ZeroMQ message each, versioned, of a length that its kind and fields fix.

Little endian. Every frame starts with the magic `tw`, the version and its kind, a byte each; its fields follow:

| kind | fields | meaning |
| --- | --- | --- |
| 1 hello | replica u32, replicas u32, role u8, incarnation 16 bytes | identity; first on every connection, both ways |
| 2 start | number u64, stream u8, phase u8, owner u16, part u32, key u64, bytes u64; body | a message starts |
| 3 credit | number u64, end u64 | send this message's bytes up to `end`: a receive is posted for it |
| 4 part | number u64, start u64; body | bytes of a message after its start |
| 5 receipt | number u64, matched u8 | the whole message arrived; whether a receive was posted for it |
| 6 posted | number u64 | a receive was posted for a message that had arrived whole |
| 7 refused | number u64 | the message is not the expected one, or its rest is not wanted |
| 8 goodbye | | nothing follows |
| 9 request | number u64; name, 1 to 64 bytes | asks for a blob; answered by a message of stream 5, key `number` |
| 10 cancel | number u64 | the response to this request is not wanted; answer that it is gone |
| 11 path hello | as hello; session 16 bytes, path u8, paths u8 | first on each of several connections of one peer |
| 12 numbered | number u64; a frame of the kinds 2 to 10 | a frame over one of several connections |
| 13 arrived | count u64 | so many numbered frames have arrived over this connection |

Numbers count the messages that one side sent on this connection, from 0. Those of requests and cancels belong to the
requesting side, and are never used twice. A frame that breaks a rule is a `FrameError`; its sender is disconnected.
The kinds 11 to 13 are for peers with several connections, see `thinwire.transport.wire.multipath`.
"""

from __future__ import annotations

import struct
from typing import Any, get_args

from msgspec import Struct

from thinwire.roles import ROLES, checked_role
from thinwire.transport.streams import FORMAT_VERSION, MessageAddress

# First bytes of a message, which may be sent without credit; further parts are short, so that messages interleave.
OPENING_BYTES = 1 << 16
PART_BYTES = 1 << 15
MOST_MESSAGE_BYTES = 1 << 49
MOST_NAME_BYTES = 64
INCARNATION_BYTES = 16
SESSION_BYTES = 16
MOST_PATHS = 16
# Largest receive window of a peer: bytes in flight to this replica.
MAX_WINDOW_BYTES = 1 << 24
# Bounds of unexpected messages (no receive posted yet) that a receiver keeps for each peer; the sender knows them too.
MAX_UNEXPECTED = 1024
MAX_UNEXPECTED_BYTES = 1 << 25
# Requests of one peer that are not answered yet.
MAX_REQUESTS = 4096
_PREFIX = struct.Struct("<2sBB")
_MAGIC = b"tw"


class FrameError(Exception):
    """A peer broke the protocol; the text says how, and becomes part of a `PeerLost`."""


class VersionError(FrameError):
    """A peer speaks another version of the format."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"frames of version {version}, and this host reads {FORMAT_VERSION}; run the same thinwire on all hosts"
        )


class Hello(Struct, frozen=True, kw_only=True):
    """Identity of a replica."""

    replica: int
    num_replicas: int
    incarnation: bytes  # random bytes of its process; a restarted replica has others
    role: str = ROLES[0]


class MessageStart(Struct, frozen=True, kw_only=True):
    """The first bytes of a message."""

    number: int  # the sender's count
    address: MessageAddress  # what a receive is matched by
    message_bytes: int  # of the whole message, its header included
    body: memoryview  # all of its bytes, or the first `OPENING_BYTES`


class Credit(Struct, frozen=True, kw_only=True):
    """Permission to send a message's bytes up to `end`."""

    number: int
    end: int


class MessagePart(Struct, frozen=True, kw_only=True):
    """Bytes of a message from `start` on."""

    number: int
    start: int
    body: memoryview


class Receipt(Struct, frozen=True, kw_only=True):
    """Receipt for a whole message."""

    number: int
    is_matched: bool


class ReceivePosted(Struct, frozen=True, kw_only=True):
    """Notice that a receive was posted for a message that had arrived before."""

    number: int


class MessageRefused(Struct, frozen=True, kw_only=True):
    """Notice that a message is not the expected one, or that its rest is not wanted."""

    number: int


class Goodbye(Struct, frozen=True, kw_only=True):
    """Last frame of a connection."""


class RequestFrame(Struct, frozen=True, kw_only=True):
    """Request for a blob that the other side has, or will have."""

    number: int
    name: bytes


class CancelFrame(Struct, frozen=True, kw_only=True):
    """Notice that the response to a `RequestFrame` is not wanted."""

    number: int


class PathHello(Struct, frozen=True, kw_only=True):
    """Identity of a replica on one of several connections."""

    hello: Hello
    session: bytes  # random bytes; the connections of one session belong together
    path: int
    num_paths: int


class NumberedFrame(Struct, frozen=True, kw_only=True):
    """A frame over one of several connections; numbers count from 0 in the order of sending."""

    number: int
    frame: memoryview


class FramesArrived(Struct, frozen=True, kw_only=True):
    """Number of numbered frames that have arrived over this connection."""

    count: int


Frame = (
    Hello | MessageStart | Credit | MessagePart | Receipt | ReceivePosted | MessageRefused | Goodbye | RequestFrame
    | CancelFrame | PathHello | NumberedFrame | FramesArrived
)  # fmt: skip
_KINDS: tuple[type[Any], ...] = get_args(Frame)
_IDENTITY = f"<IIB{INCARNATION_BYTES}s"
# Fields of each kind, in the order of the kinds; of some, bytes of any length follow.
_LAYOUTS = dict(zip(_KINDS, map(struct.Struct, (
    _IDENTITY, "<QBBHIQQ", "<QQ", "<QQ", "<QB", "<Q", "<Q", "", "<Q", "<Q",
    f"{_IDENTITY}{SESSION_BYTES}sBB", "<Q", "<Q",
)), strict=True))  # fmt: skip
_WITH_BODY = (MessageStart, MessagePart, RequestFrame, NumberedFrame)
# of a numbered frame around a message's start
MOST_FRAME_BYTES = 2 * _PREFIX.size + _LAYOUTS[NumberedFrame].size + _LAYOUTS[MessageStart].size + OPENING_BYTES


def write(frame: Frame) -> bytearray:
    """Return a frame's bytes.

    Example:
        >>> read(memoryview(write(Credit(number=3, end=70_000))))
        Credit(number=3, end=70000)
    """
    kind = type(frame)
    if isinstance(frame, Hello | PathHello):
        hello = frame if isinstance(frame, Hello) else frame.hello
        values: list[Any] = [hello.replica, hello.num_replicas, ROLES.index(hello.role), hello.incarnation]
        values += [frame.session, frame.path, frame.num_paths] if isinstance(frame, PathHello) else []
    elif isinstance(frame, MessageStart):
        stream, owner, number, part, phase = frame.address
        values = [frame.number, stream, phase, owner, part, number, frame.message_bytes, frame.body]
    else:
        values = [getattr(frame, name) for name in kind.__struct_fields__]
    body = values.pop() if kind in _WITH_BODY else b""
    written = bytearray(_PREFIX.pack(_MAGIC, FORMAT_VERSION, 1 + _KINDS.index(kind)))
    written += _LAYOUTS[kind].pack(*values)
    written += body
    return written


def read(raw: memoryview) -> Frame:
    """Parse a peer's bytes; the frame's body is a view of them.

    Raises:
        FrameError: It is no frame of this version.
    """
    if len(raw) < _PREFIX.size or len(raw) > MOST_FRAME_BYTES:
        raise FrameError(f"a frame of {len(raw)} bytes, expected {_PREFIX.size} to {MOST_FRAME_BYTES}")
    magic, version, kind = _PREFIX.unpack_from(raw)
    if magic != _MAGIC:
        raise FrameError("a frame that is none of thinwire's")
    if version != FORMAT_VERSION:
        raise VersionError(version)
    if not 1 <= kind <= len(_KINDS):
        raise FrameError(f"a frame of kind {kind}, expected 1 to {len(_KINDS)}")
    kind, rest = _KINDS[kind - 1], raw[_PREFIX.size :]
    layout = _LAYOUTS[kind]
    if kind is Goodbye and len(rest):
        raise FrameError(f"a goodbye with {len(rest)} bytes, expected none")
    if len(rest) < layout.size or (len(rest) > layout.size and kind not in _WITH_BODY):
        at_least = "at least " if kind in _WITH_BODY else ""
        raise FrameError(f"{len(rest)} bytes of fields, expected {at_least}{layout.size}")
    return _checked(kind, layout.unpack_from(rest), rest[layout.size :])


def _checked(kind: type[Any], values: tuple[Any, ...], body: memoryview) -> Frame:
    """Return the frame of fields that a peer sent, checked one by one."""
    if kind is Hello:
        return _hello(*values)
    if kind is PathHello:
        *identity, session, path, num_paths = values
        if not path < num_paths <= MOST_PATHS:
            raise FrameError(f"a hello of path {path} of {num_paths}, expected at most {MOST_PATHS}")
        return PathHello(hello=_hello(*identity), session=session, path=path, num_paths=num_paths)
    if kind is MessageStart:
        return _start(body, *values)
    if kind is RequestFrame:
        if not 1 <= len(body) <= MOST_NAME_BYTES:
            raise FrameError(f"a name of {len(body)} bytes, expected 1 to {MOST_NAME_BYTES}")
        return RequestFrame(number=values[0], name=bytes(body))
    if kind is Receipt:
        if values[1] > 1:
            raise FrameError(f"a flag of {values[1]}, expected 0 or 1")
        return Receipt(number=values[0], is_matched=bool(values[1]))
    if kind is MessagePart and not 1 <= len(body) <= PART_BYTES:
        raise FrameError(f"a part of {len(body)} bytes, expected 1 to {PART_BYTES}")
    found = (*values, body) if kind in _WITH_BODY else values
    made: Frame = kind(**dict(zip(kind.__struct_fields__, found, strict=True)))
    return made


def _start(
    body: memoryview, count: int, stream: int, phase: int, owner: int, part: int, number: int, size: int
) -> MessageStart:
    if size > MOST_MESSAGE_BYTES:
        raise FrameError(f"an opening of a message of {size} bytes, expected at most {MOST_MESSAGE_BYTES}")
    if len(body) != min(size, OPENING_BYTES):
        raise FrameError(f"an opening with {len(body)} of {size} bytes, expected the first {OPENING_BYTES}")
    address = MessageAddress(stream, owner, number, part, phase)
    return MessageStart(number=count, address=address, message_bytes=size, body=body)


def _hello(replica: int, num_replicas: int, role: int, incarnation: bytes) -> Hello:
    try:
        return Hello(replica=replica, num_replicas=num_replicas, incarnation=incarnation, role=checked_role(role))
    except ValueError as error:
        raise FrameError(f"a hello of which {error}") from None
