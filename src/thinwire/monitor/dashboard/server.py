"""HTTP server of the dashboard: page, snapshot, metrics and events of one run, read-only.

Nothing of a request is ever a path of a file. On a loopback address no token is needed, but the Host header must name
this machine: a page from elsewhere whose name resolves to this address (DNS rebinding) is refused. On any other address
each request must prove a token.

Until a request has arrived whole and has proved its token, its connection holds one of a bounded number of places, for
`HEAD_S` at most; a new connection replaces the oldest one of its own address. So slow clients keep no other client out.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import io
import ipaddress
import json
import math
import re
import socket
import threading
import time
import urllib.parse
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from thinwire.errors import ThinwireError, refusal
from thinwire.monitor.dashboard.snapshot import VERSION, RunFollower
from thinwire.monitor.prometheus_text import CONTENT_TYPE, metrics_text
from thinwire.transport.admission import PendingConnections

PERIOD_S = 0.5
# Polling stops after so long without a client.
_IDLE_S = 30.0


class Feed:
    """Changes of a run's snapshot: one thread polls the run, and any number of others wait for news.

    Polling pauses while no client has asked for `_IDLE_S`.
    """

    def __init__(self, follower: RunFollower, *, period_s: float = PERIOD_S) -> None:
        self._follower = follower
        self._period_s = period_s
        self._changed = threading.Condition()
        self._sections: dict[str, tuple[int, str]] = {}
        self._version = 0
        self._wanted_s = -_IDLE_S
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, name="thinwire-dashboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wake all that wait."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def after(self, version: int, *, wait_s: float) -> tuple[int, str]:
        """Wait for sections newer than `version`, and return the latest version and one JSON object.

        Returns:
            The same version and an empty text if nothing changed in time.
        """
        with self._changed:
            self._wanted_s = time.monotonic()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._version > version or self.is_closed, timeout=wait_s)
            self._wanted_s = time.monotonic()
            if self._version <= version:
                return version, ""
            fresh = [f"{json.dumps(name)}:{text}" for name, (at, text) in self._sections.items() if at > version]
            head = f'{{"version":{VERSION},"now":{round(time.time(), 3)},"sections":{{'
            return self._version, f"{head}{','.join(fresh)}}}}}"

    def _run(self) -> None:
        while not self.is_closed:
            with self._changed:
                self._changed.wait_for(lambda: self.is_closed or time.monotonic() - self._wanted_s < _IDLE_S)
            is_behind = False
            try:
                is_behind = self._follower.poll()
                self._take({**self._follower.sections(), "fault": ""})
            except Exception as error:  # whatever the files hold: report it, and poll again
                self._take({"fault": f"The folder could not be read: {type(error).__name__}: {error}"[:500]})
            if not is_behind:
                time.sleep(self._period_s)

    def _take(self, sections: dict[str, Any]) -> None:
        texts = {name: json.dumps(value, separators=(",", ":"), allow_nan=False) for name, value in sections.items()}
        with self._changed:
            changed = [name for name, text in texts.items() if self._sections.get(name, (0, ""))[1] != text]
            if changed:
                self._version += 1
                self._sections |= {name: (self._version, texts[name]) for name in changed}
                self._changed.notify_all()


_SCRIPTS = ("measures.js", "page.js")


@cache
def page_parts() -> tuple[str, str, str]:
    """Return the page before and after the run's state, which are the same for all runs, and its security policy."""
    folder = files("thinwire.monitor.dashboard") / "page"
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    page = (folder / "page.html").read_text(encoding="utf-8")
    before, after = page.replace("/* style */", style).replace("/* script */", script).split("/* state */")
    policy = "; ".join([
        "default-src 'none'", f"style-src '{_hash(style)}'", f"script-src '{_hash(script)}'", "connect-src 'self'",
        "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'",
    ])  # fmt: skip
    return before, after, policy


def page_with(state: str) -> bytes:
    """Return the page as UTF-8 with a run's state in it, one JSON object or none, so that a saved copy shows it too."""
    before, after, _ = page_parts()
    # within a script of data nothing but < can end it or begin another
    return f"{before}{state.replace('<', chr(92) + 'u003c') or 'null'}{after}".encode()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# Streams of events, and other answers under way.
MOST_CLIENTS, MOST_ANSWERS = 32, 16
# Connections whose request has not come whole, or has proved no token: from one address and in all. A browser opens
# up to six at a time.
MOST_PENDING_EACH, MOST_PENDING = 16, 64
# A request must have come whole within this, and be no longer.
HEAD_S, MOST_HEAD_BYTES = 5.0, 1 << 15
LEAST_TOKEN = 16
_MOST_TOKEN = 512
_BEAT_S = 5.0
_PATIENCE_S = 10.0
_FIRST_S = 1.0
_WRONG_HOST = "The Host header names another machine; use the address as it was printed."
_SAFE = {
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip


def check_token(token: str) -> str:
    """Return a token that can stand in an address and a cookie.

    Raises:
        ValueError: It is too short, too long, or holds other letters.
    """
    given = token.strip()
    if not LEAST_TOKEN <= len(given) <= _MOST_TOKEN or not re.fullmatch(r"[A-Za-z0-9._-]+", given):
        raise refusal(
            "the token cannot stand in an address", got=f"{len(given)} characters",
            allowed=f"{LEAST_TOKEN} to {_MOST_TOKEN} of A-Z a-z 0-9 - _ .", remedy="openssl rand -hex 24",
        )  # fmt: skip
    return given


class DashboardServer(ThreadingHTTPServer):
    """Serves one run; `serve_forever` and `shutdown` are those of `http.server`.

    Raises:
        ValueError: There is no token where one is needed.
        ThinwireError: The address cannot be listened at; says what to do.
    """

    daemon_threads = True
    block_on_close = False
    # accepted by the kernel beforehand; beyond it a client waits for a second and longer
    request_queue_size = 256

    def __init__(self, feed: Feed, *, host: str, port: int, token: str | None = None) -> None:
        if token is None and not is_of_this_machine(host):
            raise ValueError(
                f"{host} can be reached from other machines, so a token is needed: give --token-file FILE, or leave "
                "--host away and look through a tunnel: ssh -L"
            )
        self.feed = feed
        self.token = None if token is None else check_token(token)
        self.listens_at = host
        self._streams = threading.BoundedSemaphore(MOST_CLIENTS)
        self._lock = threading.Lock()
        self._number = 0
        self._open: dict[int, _Open] = {}
        self._numbers: dict[Any, int] = {}
        self._pending = PendingConnections(most_each=MOST_PENDING_EACH, most=MOST_PENDING)
        self._answering = PendingConnections(most_each=MOST_ANSWERS, most=MOST_ANSWERS)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            said = getattr(error, "strerror", None) or str(error)
            raise ThinwireError(
                f"cannot listen at {host}:{port}: {said}; choose another with --port, or --port 0 for any free one"
            ) from error
        self.cookie = f"thinwire-{self.server_port}"

    @property
    def url(self) -> str:
        """URL of the page, with the token if one is needed."""
        host = f"[{self.listens_at}]" if ":" in self.listens_at else self.listens_at
        ending = "" if self.token is None else f"?token={self.token}"
        return f"http://{host}:{self.server_port}/{ending}"

    def server_bind(self) -> None:
        """Take the address without asking what it is called: a name server may take long to answer."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own; where there are too many, another one ends for it."""
        with self._lock:
            self._number += 1
            self._numbers[request] = self._number
            self._open[self._number] = _Open(request, str(client_address[0]), time.monotonic() + HEAD_S)
            self._end(self._pending.add(self._number, str(client_address[0])))
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, and make its place free."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def admit(self, request: Any, *, is_stream: bool) -> bool:
        """Move a connection whose request may be answered from the pending ones; return whether there is a place."""
        if is_stream and not self._streams.acquire(blocking=False):
            return False
        with self._lock:
            number = self._numbers[request]
            one = self._open[number]
            one.until_s, one.is_stream = math.inf, is_stream
            self._pending.remove(number)
            self._pending.trust(one.address)
            if not is_stream:
                self._end(self._answering.add(number, one.address))
        return True

    def service_actions(self) -> None:
        """End connections whose request did not come whole in time; `serve_forever` calls this all the time."""
        now_s = time.monotonic()
        with self._lock:
            for number, one in self._open.items():
                if now_s > one.until_s:
                    self._end(number)

    def _end(self, number: int | None) -> None:
        """Shut a connection down: its thread finds that and ends."""
        if number is not None:
            with contextlib.suppress(OSError):
                self._open[number].request.shutdown(socket.SHUT_RDWR)

    def _forget(self, request: Any) -> None:
        with self._lock:
            number = self._numbers.pop(request)
            one = self._open.pop(number)
            self._pending.remove(number)
            self._answering.remove(number)
        if one.is_stream:
            self._streams.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: browsers often leave during a response."""

    def is_known_host(self, header: str) -> bool:
        """Return whether a Host header can only be one that the user typed: an address, or a name of this machine."""
        name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
        name = name.removeprefix("[").removesuffix("]").lower()
        if name in ("localhost", self.listens_at.lower(), socket.gethostname().lower()):
            return True
        try:
            found = ipaddress.ip_address(name)
        except ValueError:
            return False
        return not is_of_this_machine(self.listens_at) or found.is_loopback


def is_of_this_machine(host: str) -> bool:
    """Return whether an address can be reached from this machine only.

    Example:
        >>> is_of_this_machine("127.0.0.1"), is_of_this_machine("localhost"), is_of_this_machine("0.0.0.0")
        (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(slots=True)
class _Open:
    """A connection: when it must have shown its request, and what it is answered."""

    request: socket.socket
    address: str
    until_s: float
    is_stream: bool = False


class _BoundedReader(io.BufferedReader):
    """A connection's input, which ends after so many bytes."""

    left = MOST_HEAD_BYTES

    def readline(self, size: int | None = -1) -> bytes:
        """Return the next line, empty where the request is too long."""
        most = self.left if size is None or size < 0 else min(size, self.left)
        line = super().readline(most)
        self.left -= len(line)
        return line


class _Handler(BaseHTTPRequestHandler):
    server: DashboardServer
    protocol_version = "HTTP/1.1"
    server_version = "thinwire"
    sys_version = ""
    timeout = _PATIENCE_S

    def setup(self) -> None:
        """Bound what is read of a request."""
        super().setup()
        self.rfile.close()
        self.rfile = _BoundedReader(self.connection.makefile("rb", buffering=0))

    def do_GET(self) -> None:
        """Answer with the page, the run's state, or its events."""
        self.close_connection = True
        path, _, query = self.path.partition("?")
        if isinstance(self.rfile, _BoundedReader) and self.rfile.left <= 0:
            text = f"A request may have {MOST_HEAD_BYTES} bytes at most."
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)
        elif not self.server.is_known_host(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, _WRONG_HOST)
        elif not self._is_proven(path, query):
            pass
        elif not self.server.admit(self.connection, is_stream=path == "/events"):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_CLIENTS} pages are open; close one.")
        elif path == "/":
            _, state = self.server.feed.after(0, wait_s=_FIRST_S)
            policy = {"Content-Security-Policy": page_parts()[2]}
            self._answer(page_with(state), "text/html; charset=utf-8", policy)
        elif path == "/snapshot.json":
            _, text = self.server.feed.after(0, wait_s=_PATIENCE_S)
            self._answer(text.encode() or b"{}", "application/json", {})
        elif path == "/metrics":
            _, text = self.server.feed.after(0, wait_s=_PATIENCE_S)
            self._answer(metrics_text(json.loads(text or "{}").get("sections", {})).encode(), CONTENT_TYPE, {})
        elif path == "/events":
            self._stream()
        elif path == "/favicon.ico":
            self._answer(b"", "image/x-icon", {}, status=HTTPStatus.NO_CONTENT)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "There are /, /snapshot.json, /metrics and /events.")

    def _is_proven(self, path: str, query: str) -> bool:
        """Return whether the token was shown; else answer with what to do."""
        token = self.server.token
        if token is None:
            return True
        given = None
        if path == "/" and len(query) < 4096:
            with contextlib.suppress(ValueError):  # too many fields
                given = urllib.parse.parse_qs(query, max_num_fields=4).get("token")
        if given and _same(given[0], token):
            # the address bar and its history shall not hold it
            cookie = f"{self.server.cookie}={token}; HttpOnly; SameSite=Strict; Path=/"
            self._answer(b"", "text/plain", {"Location": "/", "Set-Cookie": cookie}, status=HTTPStatus.SEE_OTHER)
            return False
        with contextlib.suppress(CookieError):
            shown = SimpleCookie(self.headers.get("Cookie", "")[:4096]).get(self.server.cookie)
            if shown is not None and _same(shown.value, token):
                return True
        if _same(self.headers.get("Authorization", "").removeprefix("Bearer "), token):
            return True
        self._refuse(HTTPStatus.UNAUTHORIZED, "Open the whole address that thinwire dashboard printed, with its token.")
        return False

    def _stream(self) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in {"Content-Type": "text/event-stream", "Connection": "close", **_SAFE}.items():
            self.send_header(name, value)
        self.end_headers()
        version = 0
        while not self.server.feed.is_closed:
            version, text = self.server.feed.after(version, wait_s=_BEAT_S)
            # a comment, so that one who has gone is found out
            self.wfile.write(f"data: {text}\n\n".encode() if text else b": still here\n\n")

    def _answer(self, content: bytes, kind: str, more: dict[str, str], *, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **_SAFE, **more}.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self._answer(f"{words}\n".encode(), "text/plain; charset=utf-8", {}, status=status)

    def log_message(self, *_: Any) -> None:
        """Log nothing: requests hold the token."""


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
