"""Liveness of a silent peer: the kernel's time since its last byte, against a limit.

Both ends send a ZMTP heartbeat every `BEAT_S`. libzmq's own thread sends and answers them, so a replica whose Python is
busy for long is not taken for dead; one whose process is stopped, or whose host is off the network, is. What is judged
is the kernel's own reading of when the last byte came: a slow wire that is in the middle of a large frame is not
silent, and neither is one whose bytes lie unread because this process was busy.
"""

from __future__ import annotations

import socket
import statistics
from collections import deque
from dataclasses import dataclass

from thinwire.transport.tcp_info import tcp_info

BEAT_S = 1.0
LEAST_SILENCE_S = 10.0
MOST_SILENCE_S = 30.0
_SAMPLES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpReading:
    """What the kernel knows of a connection.

    Attributes:
        silence_s: Since the last byte came.
        rtt_s: Its smoothed round-trip time.
        sent_bytes: That the other end has acknowledged.
        received_bytes: That have come.
        busy_s: For how long there was something to send, or that was not acknowledged yet; 0 where the kernel is old.
        held_s: For how much of that the other end would take no more, since its process did not read.
        has_signs: Whether a sign of life comes over it once a second while it is well, also when nothing is sent.
    """

    silence_s: float
    rtt_s: float
    sent_bytes: int
    received_bytes: int
    busy_s: float = 0.0
    held_s: float = 0.0
    has_signs: bool = True


def read_tcp(connection: socket.socket) -> TcpReading | None:
    """Ask the kernel about a TCP connection; None where it does not tell (it is gone, or this is not Linux)."""
    try:
        found = tcp_info(connection)
    except OSError:
        return None
    if found is None:
        return None
    return TcpReading(
        silence_s=found.last_data_s, rtt_s=found.rtt_s, sent_bytes=found.acked_bytes,
        received_bytes=found.received_bytes, busy_s=found.busy_s or 0.0, held_s=found.held_s or 0.0,
    )  # fmt: skip


class Liveness:
    """How long a peer may be silent, from the round-trip times of the last minute.

    Three beats may be late, and four round trips (a lost packet is sent again after more than one of them), where a
    round trip is taken as the median and eight times the median deviation from it. A glitch of `LEAST_SILENCE_S` is
    always borne, and nobody is waited for longer than `MOST_SILENCE_S`.

    Example:
        >>> liveness = Liveness()
        >>> liveness.observe(0.05)
        >>> liveness.limit_s
        10.0
        >>> liveness = Liveness()
        >>> for rtt_s in (2.0, 2.5, 3.0):
        ...     liveness.observe(rtt_s)
        >>> liveness.limit_s  # 3 + 4 * (2.5 + 8 * 0.5)
        29.0
    """

    def __init__(self) -> None:
        self._rtts_s: deque[float] = deque(maxlen=_SAMPLES)

    def observe(self, rtt_s: float) -> None:
        """Note a round-trip time."""
        self._rtts_s.append(rtt_s)

    @property
    def limit_s(self) -> float:
        """Seconds of silence after which the peer counts as lost."""
        if not self._rtts_s:
            return MOST_SILENCE_S
        median = statistics.median(self._rtts_s)
        deviation = statistics.median(abs(rtt_s - median) for rtt_s in self._rtts_s)
        trip_s = median + 8 * deviation
        return min(max(LEAST_SILENCE_S, 3 * BEAT_S + 4 * trip_s), MOST_SILENCE_S)
