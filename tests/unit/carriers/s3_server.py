"""An S3 server in this process, of moto, between whose network and store faults are put."""

from __future__ import annotations

import functools
import logging
import threading
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

CREDENTIALS = {"access_key_id": "AKIDOFTESTS", "secret_access_key": "SECRETOFTESTS", "region": "us-east-1"}
Answer = tuple[str, dict[str, str], str]  # status line, headers, body


@dataclass(kw_only=True)
class S3Server:
    """Its endpoint and its faults.

    Attributes:
        answers: What the next requests get instead of the store's answer: None passes one on.
        after: The same, but the store does what is asked: its answer is lost.
        is_faking: Whether conditions of writes are ignored, as by stores that do not know them.
    """

    app: Callable[..., Iterable[bytes]]
    endpoint: str = ""
    answers: list[Answer | None] = field(default_factory=list)
    after: list[Answer | None] = field(default_factory=list)
    is_faking: bool = False
    buckets: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if self.is_faking:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        answer = self.answers.pop(0) if self.answers else None
        lost = self.after.pop(0) if self.after else None
        if answer is None:
            if lost is None:
                with self.lock:  # moto looks first and then writes, while a store does both at once
                    return list(self.app(environ, start))
            list(self.app(environ, lambda *given: None))  # it is done, and its answer is lost
            answer = lost
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, headers, body = answer
        start(status, [("Content-Length", str(len(body))), *headers.items()])
        return [body.encode()]

    def reset(self) -> str:
        """Forget the faults, and return the name of a new, empty bucket."""
        self.answers.clear()
        self.after.clear()
        self.is_faking = False
        self.buckets += 1
        name = f"bucket-{self.buckets}"
        with urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT"), timeout=60):
            return name

    def options(self) -> dict[str, str]:
        return {**CREDENTIALS, "endpoint": self.endpoint}


@functools.cache
def s3_server() -> S3Server:
    """Return the server of this process, which ends with it."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = S3Server(app=DomainDispatcherApplication(create_backend_app))
    http = make_server("127.0.0.1", 0, server, threaded=True)
    server.endpoint = f"http://127.0.0.1:{http.server_port}"
    threading.Thread(target=http.serve_forever, daemon=True).start()
    return server


def error(status: str, code: str, more: str = "", **headers: str) -> Answer:
    """Return an answer of S3 that reports an error."""
    return status, headers, f"<Error><Code>{code}</Code><Message>no</Message>{more}</Error>"
