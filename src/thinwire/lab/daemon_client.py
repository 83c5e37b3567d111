"""Client of the namespace daemon: starts it, sends requests, and receives its events over a message channel."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.errors import LabError

MAX_BYTES = 1 << 24
MAX_FILES = 3
_LENGTH_BYTES = 4


class Channel:
    """One end; messages arrive whole and in order."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Return the socket's file, for `select`."""
        return self._end.fileno()

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message and copies of open files."""
        body = json.dumps(message).encode()
        if len(body) > MAX_BYTES:
            raise ValueError(f"a message must be at most {MAX_BYTES} bytes, got {len(body)}; give a shorter command")
        # files travel with the first bytes, so these go out in a call of their own
        socket.send_fds(self._end, [len(body).to_bytes(_LENGTH_BYTES, "big")], list(files))
        self._end.sendall(body)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for the next message and its files; None when the other end is gone."""
        try:
            head, files, _, _ = socket.recv_fds(self._end, _LENGTH_BYTES, MAX_FILES)
            if not head:
                return None
            head += self._exactly(_LENGTH_BYTES - len(head))
            length = int.from_bytes(head, "big")
            if length > MAX_BYTES:
                raise ValueError(f"a message must be at most {MAX_BYTES} bytes, got {length}")
            message = json.loads(self._exactly(length))
        except (ConnectionError, EOFError):
            return None
        if not isinstance(message, dict):
            raise ValueError(f"a message must be an object, got {type(message).__name__}")
        return message, files

    def close(self) -> None:
        """Close this end; the other one sees it."""
        self._end.close()

    def _exactly(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = self._end.recv(length - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


START_S = 60.0
ANSWER_S = 60.0


class DaemonClient:
    """Starts a daemon, sends requests, and receives its events.

    Args:
        order: What the daemon shall make.
        on_exit: Called with a command's number and exit code, or None where the daemon ended first.

    Attributes:
        ready: The daemon's report when all was made.
        is_closed: Whether it was ended from here.
    """

    def __init__(self, order: Mapping[str, Any], *, on_exit: Callable[[int, int | None], None]) -> None:
        self.ready: dict[str, Any] = {}
        self._on_exit = on_exit
        self._numbers = itertools.count(1)
        self._replies: dict[int, dict[str, Any]] = {}
        self._running: set[int] = set()
        self._changed = threading.Condition()
        self._fault = ""
        self.is_closed = False
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        command = [sys.executable, "-m", "thinwire.lab.namespace_daemon", str(theirs.fileno())]
        with theirs:
            # a session of its own: the terminal's Ctrl-C is for the lab, which signals the hosts
            self._daemon = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        with contextlib.suppress(OSError):  # it ended at once; the listener sees that
            self._channel.send(dict(order))
        self._listener = threading.Thread(target=self._listen, name="thinwire-lab", daemon=True)
        self._listener.start()
        with self._changed:
            self._changed.wait_for(lambda: self.ready or self._fault, timeout=START_S)
        if not self.ready:
            fault = self._fault or f"the lab was not ready within {START_S:g} s"
            self.close()
            raise LabError(fault)

    def next_number(self) -> int:
        """Return a number that no command and no question has yet."""
        return next(self._numbers)

    def check(self) -> None:
        """Raise where the daemon broke."""
        if self._fault:
            raise LabError(f"{self._fault}; make the lab again")

    def ask(self, what: str, request: Mapping[str, Any], *, files: Sequence[int] = ()) -> dict[str, Any]:
        """Ask and wait for the answer."""
        number = self.next_number()
        with self._changed:
            self.check()
            if self.is_closed:
                raise LabError("this lab is closed; make another")
            if what == "start":
                self._running.add(request["number"])
            try:
                self._channel.send({"ask": what, "id": number, **request}, files)
            except OSError as error:
                raise LabError(f"the lab's daemon has ended: {error.strerror}; make the lab again") from None
            self._changed.wait_for(lambda: number in self._replies or self._fault, timeout=ANSWER_S)
            reply = self._replies.pop(number, None)
        if reply is None:
            raise LabError(self._fault or f"the lab's daemon did not answer within {ANSWER_S:g} s; make the lab again")
        if "error" in reply:
            if what == "start":
                self._running.discard(request["number"])
                raise ValueError(reply["error"])
            raise LabError(reply["error"])
        return reply

    def close(self) -> None:
        """End the daemon and, with it, everything in the lab; may be called again."""
        if self.is_closed:
            return
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._channel.send({"ask": "close", "id": 0})
        try:
            self._daemon.wait(timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            self._daemon.kill()  # its inner process dies with it, and all others with that one
            self._daemon.wait()
        self._listener.join(timeout=ANSWER_S)
        self._channel.close()

    def _listen(self) -> None:
        while True:
            try:
                received = self._channel.receive()
            except (OSError, ValueError):
                received = None
            with self._changed:
                if received is None:
                    self._end("" if self.is_closed else "the lab's daemon has ended")
                    return
                message = received[0]
                if "reply" in message:
                    self._replies[message["reply"]] = message
                elif message["event"] == "exit":
                    self._running.discard(message["number"])
                    self._on_exit(message["number"], message["code"])
                elif message["event"] == "ready":
                    self.ready = message
                else:
                    self._end(message["text"])
                self._changed.notify_all()

    def _end(self, fault: str) -> None:
        self._fault = self._fault or fault
        for number in self._running:
            self._on_exit(number, None)
        self._running.clear()
        self._changed.notify_all()
