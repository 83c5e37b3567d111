"""Dialer: failures at the start of a connection."""

from __future__ import annotations

import socket
from typing import Any

import zmq

from thinwire.transport.secret import Secret
from thinwire.transport.wire.connection import key_pair
from thinwire.transport.wire.dialer import DialedConnection
from thinwire.transport.wire.framing import Hello


class FullSocket(zmq.Socket[bytes]):
    """A socket without room, as one whose connection was refused before anything was sent."""

    def send(self, *unused: Any, **unused_too: Any) -> None:  # type: ignore[override]
        raise zmq.Again


def test_a_connection_that_was_refused_before_its_first_word_is_a_problem_and_no_error() -> None:
    secret = Secret(key=bytes(range(32)))
    with zmq.Context() as context, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, so that it is nobody else's, and not listening
        port = closed.getsockname()[1]
        context._socket_class = FullSocket
        hello = Hello(replica=1, num_replicas=2, incarnation=bytes(16))
        dial = DialedConnection(
            context, address="127.0.0.1", port=port, own=key_pair(secret, replica=1, role="dialler"),
            other=key_pair(secret, replica=0, role="door").public, hello=hello,
        )  # fmt: skip
        dial.read_events()
        assert dial.problem == "it takes no connection, or a firewall drops it" and not dial.is_mistrusted
        dial.close()
