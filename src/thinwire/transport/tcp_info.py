"""TCP connection statistics from Linux (`TCP_INFO`)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

# struct tcp_info of Linux: 8 bytes of flags and counts, 24 numbers of 32 bits, 4 of 64. The kernel only ever adds at
# its end: since 4.10 also 6 of 32 bits, and 4 of 64.
_EARLY, _LATER = struct.Struct("<2x2B4x24I4Q"), struct.Struct("<2x2B4x24I4Q6I4Q")
_SENT_AGAIN, _ASKED_AGAIN, _LAST_DATA_MS, _LAST_ACK_MS, _RTT_US = 0, 1, 13, 14, 17
_ACKED, _RECEIVED, _BUSY_US, _HELD_US = 28, 29, 37, 38


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpInfo:
    """What the kernel knows of a connection.

    Attributes:
        sent_again: How often in a row the same was sent again without an answer.
        asked_again: How often in a row it was asked whether the other end is there.
        last_data_s: Since the last byte of data came.
        last_ack_s: Since the last acknowledgement came.
        rtt_s: The smoothed round-trip time.
        acked_bytes: That the other end has acknowledged.
        received_bytes: That have come.
        busy_s: For how long there was something to send, or that was not acknowledged; none where the kernel is old.
        held_s: For how much of that the other end would take no more, since its process did not read.
    """

    sent_again: int
    asked_again: int
    last_data_s: float
    last_ack_s: float
    rtt_s: float
    acked_bytes: int
    received_bytes: int
    busy_s: float | None
    held_s: float | None


def tcp_info(connection: socket.socket) -> TcpInfo | None:
    """Ask the kernel about a TCP connection; None where it does not tell: it is very old, or not Linux.

    Raises:
        OSError: The connection is gone.
    """
    name = getattr(socket, "TCP_INFO", None)
    if name is None:
        return None
    raw = connection.getsockopt(socket.IPPROTO_TCP, name, _LATER.size)
    if len(raw) < _EARLY.size:
        return None
    is_new = len(raw) >= _LATER.size
    found = _LATER.unpack(raw) if is_new else _EARLY.unpack(raw[: _EARLY.size])
    return TcpInfo(
        sent_again=found[_SENT_AGAIN], asked_again=found[_ASKED_AGAIN],
        last_data_s=found[_LAST_DATA_MS] / 1e3, last_ack_s=found[_LAST_ACK_MS] / 1e3, rtt_s=found[_RTT_US] / 1e6,
        acked_bytes=found[_ACKED], received_bytes=found[_RECEIVED],
        busy_s=found[_BUSY_US] / 1e6 if is_new else None, held_s=found[_HELD_US] / 1e6 if is_new else None,
    )  # fmt: skip
