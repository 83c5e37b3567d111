"""One host's part of a store of several hosts: promises and values of names, and large blobs as files.

`thinwire store` serves it. Callers prove the run's secret (CURVE), and all that they send is bounded and checked.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from thinwire.carriers.majority import MOST_NUMBER, MOST_WRITER_CHARACTERS, Acceptor, AcceptorReply, Ballot
from thinwire.errors import PayloadError
from thinwire.transport.secret import Secret
from thinwire.transport.wire.connection import HANDSHAKE_S, KeyPair, set_socket_options
from thinwire.transport.wire.listener import ACCEPTED, Listener, ReceivedFrame
from thinwire.transport.wire.zeromq import z85, zmq

# A value up to the first lies at every host; a larger one on one host, in pieces of the second.
MOST_VALUE_BYTES = PIECE_BYTES = 1 << 20
MOST_NAMES = 1000
_MOST_FRAME_BYTES = PIECE_BYTES + (1 << 16)
_WAITING = 256
_TICK_S, _GUARD_S = 0.1, 0.5
# Keys of a table, never paths.
_NAME = re.compile(r"[A-Za-z0-9_=./-]{1,1024}")
_BLOB = re.compile(r"[0-9a-f]{32}")
_What = Literal["read", "prepare", "accept", "forget", "names", "store", "load", "drop"]


class StoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Request to a host of a store.

    Attributes:
        number: Of the caller's choice; the answer has it too.
        name: Of a value; of `names`, what they begin with.
        blob: 32 hexadecimal digits, of `store`, `load` and `drop`.
        offset: Of a blob's piece, in bytes.
        data: A value, or a blob's piece.
    """

    number: int
    what: _What
    name: str = ""
    ballot: Ballot = (0, "")
    blob: str = ""
    offset: int = 0
    data: bytes = b""
    after: str = ""


class StoreAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A host's answer; `problem` says in words why it did not do it."""

    number: int
    now_s: float
    reply: AcceptorReply | None = None
    names: list[tuple[str, bytes, float]] = []
    data: bytes = b""
    problem: str = ""


def store_keys(secret: Secret) -> KeyPair:
    """Return the keys by which a host of the store proves that it holds the secret."""
    return _pair(secret, "thinwire store v1 host")


def caller_keys(secret: Secret) -> KeyPair:
    """Return the keys by which its callers do."""
    return _pair(secret, "thinwire store v1 caller")


def _pair(secret: Secret, label: str) -> KeyPair:
    private = z85.encode(secret.derive(label))
    return KeyPair(public=zmq.curve_public(private), private=private)


def set_store_socket_options(plug: zmq.Socket[bytes]) -> None:
    """Set bounds and times for both ends of the store's connections."""
    set_socket_options(plug, most_bytes=_MOST_FRAME_BYTES, receive_frames=_WAITING, send_frames=_WAITING,
                       silence_ms=round(HANDSHAKE_S * 1000))  # fmt: skip


class HostStore:
    """Serves one host's part, in one thread.

    Args:
        secret: The run's.
        folder: Where all of it is kept; made where there is none.
        address: The IP address to listen on; `::` is all.
        port: The port; 0 takes a free one.
        most_bytes: What its blobs may take on the disk.
        say: Reports invalid requests, a few.

    Raises:
        ConnectError: The address or port cannot be listened on.
        PayloadError: The folder holds something else.

    Attributes:
        port: The port.
    """

    def __init__(
        self, *, secret: Secret, folder: Path, address: str = "::", port: int = 0, most_bytes: int = 1 << 36,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self._blobs = folder / "blobs"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._most_bytes, self._say, self._reports_left = most_bytes, say, 16
        self._held_bytes = sum(file.stat().st_size for file in self._blobs.iterdir())
        self._acceptor = Acceptor(folder / "values.sqlite")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._door = Listener(
                self._context, address=address, ports=(port,), keys=store_keys(secret),
                callers={z85.decode(caller_keys(secret).public): 0}, decide=lambda caller: ACCEPTED,
                prepare=set_store_socket_options,
            )  # fmt: skip
        except BaseException:
            self._acceptor.close()
            self._context.destroy(linger=0)
            raise
        self.port = self._door.port

    def serve(self, *, until: Callable[[], bool]) -> None:
        """Serve until `until` returns true."""
        poller = zmq.Poller()
        for plug in (self._door.plug, self._door.monitor, self._door.decider):
            poller.register(plug, zmq.POLLIN)
        guard_s = 0.0
        while not until():
            poller.poll(round(1000 * _TICK_S))
            for _ in self._door.departed():
                pass
            self._door.decisions()
            for found in self._door.delivered():
                self._answer(found)
                self._door.know(found.fd)
            if time.monotonic() - guard_s > _GUARD_S:
                guard_s = time.monotonic()
                self._door.guard()

    def close(self) -> None:
        """Close sockets and files."""
        self._door.close()
        with contextlib.suppress(zmq.ZMQError):
            self._context.term()
        self._acceptor.close()

    def _answer(self, found: ReceivedFrame) -> None:
        try:
            if found.frame is None:
                raise PayloadError("a message of several frames")
            request = _checked(found.frame)
        except PayloadError as error:
            self._report(f"a caller sent {error}; allowed are requests of the same thinwire")
            return
        now_s = time.time()
        try:
            answer = self._done(request, now_s)
        except OSError as error:
            answer = StoreAnswer(number=request.number, now_s=now_s, problem=error.strerror or str(error))
        self._door.send(found.caller, bytearray(msgspec.msgpack.encode(answer)))

    def _done(self, asked: StoreRequest, now_s: float) -> StoreAnswer:
        acceptor, reply, names, data = self._acceptor, None, [], b""
        match asked.what:
            case "read":
                reply = acceptor.read(asked.name)
            case "prepare":
                reply = acceptor.prepare(asked.name, asked.ballot)
            case "accept":
                reply = acceptor.accept(asked.name, asked.ballot, asked.data, now_s=now_s)
                reply = msgspec.structs.replace(reply, accepted=None)  # its writer has it
            case "forget":
                acceptor.forget(asked.name)
            case "names":
                names = acceptor.names(asked.name, after=asked.after, most=MOST_NAMES)
            case "store":
                self._store(asked)
            case "load":
                data = self._load(asked)
            case "drop":
                self._drop(asked.blob)
        return StoreAnswer(number=asked.number, now_s=now_s, reply=reply, names=names, data=data)

    def _store(self, asked: StoreRequest) -> None:
        if not asked.offset:  # a blob begins again where the answer to its first piece was lost
            self._drop(asked.blob)
        if self._held_bytes + len(asked.data) > self._most_bytes:
            raise OSError(0, f"blobs take {self._held_bytes} bytes here, and at most {self._most_bytes} are allowed")
        with (self._blobs / asked.blob).open("r+b" if asked.offset else "wb") as file:
            file.seek(0, os.SEEK_END)
            if file.tell() < asked.offset:
                raise OSError(0, f"piece {asked.offset} came before those it follows")
            self._held_bytes += max(0, asked.offset + len(asked.data) - file.tell())
            file.seek(asked.offset)
            file.write(asked.data)

    def _load(self, asked: StoreRequest) -> bytes:
        with (self._blobs / asked.blob).open("rb") as file:
            file.seek(asked.offset)
            return file.read(PIECE_BYTES)

    def _drop(self, blob: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            size = (self._blobs / blob).stat().st_size
            (self._blobs / blob).unlink()
            self._held_bytes -= size

    def _report(self, text: str) -> None:
        if self._reports_left:
            self._reports_left -= 1
            self._say(text)


def _checked(frame: memoryview) -> StoreRequest:
    """Read a request, and refuse what no carrier of this version sends."""
    try:
        asked = msgspec.msgpack.decode(frame, type=StoreRequest)
        if asked.what in ("store", "load", "drop"):
            is_sound = bool(_BLOB.fullmatch(asked.blob)) and 0 <= asked.offset < MOST_NUMBER
        elif asked.what == "names":
            is_sound = len(asked.name) + len(asked.after) <= 1024
        else:
            is_sound = bool(_NAME.fullmatch(asked.name))
        number, writer = asked.ballot
        is_sound &= 0 <= number < MOST_NUMBER and len(writer) <= MOST_WRITER_CHARACTERS
        is_sound &= len(asked.data) <= PIECE_BYTES
    except ValueError as error:
        raise PayloadError(f"no request: {str(error)[:120]}") from None
    if not is_sound:
        raise PayloadError(f"a request {asked.what} with a name, ballot, size or offset out of bounds")
    return asked
