"""Traffic that a test starts, watches and ends, and measurements that a busy machine cannot spoil."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from thinwire.lab import HostProcess, Lab

_PORT = "9998"
# On a busy machine most windows are too short for a starved sender; on an idle one the first is right.
_ATTEMPTS = 20
# Of a flow, which its test ends: on a busy machine that is minutes later.
_FLOW_S = "3600"
_SAY = """
import socket, sys
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    end.sendto(b"hello", (sys.argv[1], 9))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A TCP connection that sends all the time.

    Attributes:
        lab: Where.
        destination: The host that receives.
        sender: The process that sends.
        receiver: The process that receives.
    """

    lab: Lab
    destination: int
    sender: HostProcess
    receiver: HostProcess

    def received_bytes(self) -> int:
        """Return what the kernel counted at the receiver so far."""
        return self.lab.counters()[self.destination].received_bytes

    def rate(self, *, seconds: float) -> float:
        """Return the rate at the receiver from now on, in bits per second."""
        began_s, before = time.monotonic(), self.received_bytes()
        time.sleep(seconds)
        after, ended_s = self.received_bytes(), time.monotonic()
        return (after - before) * 8 / (ended_s - began_s)

    def wait_for_bytes(self, *, more: int = 20_000, deadline_s: float = 100.0) -> None:
        """Wait until more bytes have arrived."""
        wanted, end_s = self.received_bytes() + more, time.monotonic() + deadline_s
        while self.received_bytes() < wanted:
            assert time.monotonic() < end_s, f"less than {more} bytes arrived within {deadline_s:g} s"
            time.sleep(0.02)


@contextlib.contextmanager
def flowing(lab: Lab, source: int, destination: int, *, port: str = _PORT) -> Iterator[Flow]:
    """Send from one host to another until the block ends."""
    words = [sys.executable, "-m", "thinwire.lab.doctor"]
    receiver = lab.start([*words, "sink", port], host=destination)
    sender = lab.start([*words, "flood", lab.address(destination), port, _FLOW_S], host=source)
    flow = Flow(lab=lab, destination=destination, sender=sender, receiver=receiver)
    try:
        flow.wait_for_bytes()
        yield flow
    finally:
        for process in (sender, receiver):
            process.kill()


def is_heard(lab: Lab, source: int, destination: int) -> bool:
    """Tell whether the kernel saw datagrams of one host arrive at another: all of them, or none."""
    before, count = lab.counters()[destination].received_packets, 5
    lab.start([sys.executable, "-c", _SAY, lab.address(destination), str(count)], host=source).wait(deadline_s=120)
    time.sleep(0.1)
    heard = lab.counters()[destination].received_packets - before
    assert heard in (0, count)
    return heard == count


def assert_measured(measure: Callable[[], float], *, wanted: float, within: float) -> None:
    """Hold a measurement against the setting.

    A machine that is busy for a moment starves a sender now and then; a wrong setting is wrong every time.

    Args:
        measure: Measures once.
        wanted: The setting.
        within: Largest relative error.
    """
    found = []
    for _ in range(_ATTEMPTS):
        found.append(measure())
        if found[-1] == pytest.approx(wanted, rel=within):
            return
    raise AssertionError(f"{wanted:g} was set, and {', '.join(f'{value:g}' for value in found)} measured")
