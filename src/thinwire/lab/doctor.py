"""Self-test of the lab: tries what this machine can shape, and measures it with probes of traffic."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import LabError
from thinwire.lab.lab import TOOLS, HostProcess, Lab, check_machine
from thinwire.lab.settings import Link
from thinwire.units import format_rate, format_seconds

_PORT = 9_999
_SETTLE_S = 0.3
_SLACK_S = 20.0
_STAMP = struct.Struct("!Qd")
_CHUNK = bytes(65_536)


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayMeasurement:
    """Delays and losses of packets sent one at a time.

    Attributes:
        delays_s: One-way seconds of those that arrived, in the order in which they did.
        loss: Share of those that did not.
        num_late: How many came after one that was sent later.
    """

    delays_s: tuple[float, ...]
    loss: float
    num_late: int

    @property
    def median_s(self) -> float:
        """Median delay; not a number where nothing arrived."""
        if not self.delays_s:
            return math.nan
        return statistics.median(self.delays_s)


def measure_rate(lab: Lab, source: int, destination: int, *, seconds: float = 2.0) -> float:
    """Send as fast as TCP can and return the rate that the kernel counted at the receiver, in bits per second.

    Link-layer headers count. The first moments are left out, while TCP finds the rate.
    """
    port, before = str(_PORT), lab.counters()[destination].received_bytes
    # far longer than it is measured, and ended then: this process may be stopped for a while on a busy machine
    lasts_s = str(seconds + 3 * _SLACK_S)
    with (
        _running(lab, ["sink", port], host=destination),
        _running(lab, ["flood", lab.address(destination), port, lasts_s], host=source),
    ):
        _wait_for_bytes(lab, destination, before=before)
        time.sleep(_SETTLE_S)
        began_s, before = time.monotonic(), lab.counters()[destination].received_bytes
        time.sleep(seconds)
        after, ended_s = lab.counters()[destination].received_bytes, time.monotonic()
    return (after - before) * 8 / (ended_s - began_s)


def measure_delays(
    lab: Lab, source: int, destination: int, *, packets: int = 200, interval_s: float = 0.005
) -> DelayMeasurement:
    """Send small packets, one after the other, and return what became of them."""
    with tempfile.NamedTemporaryFile() as heard:
        command = _command("receive", str(_PORT), str(packets), str(packets * interval_s + _SLACK_S / 4), heard.name)
        hearing = lab.start(command, host=destination)
        _wait_for_port(lab, destination)
        words = _command("tick", lab.address(destination), str(_PORT), str(packets), str(interval_s))
        lab.start(words, host=source).wait(deadline_s=packets * interval_s + _SLACK_S)
        if hearing.wait(deadline_s=packets * interval_s + _SLACK_S) != 0:
            raise LabError(f"the program that receives packets on host {destination} ended with {hearing.exit_code}")
        heard.seek(0)
        arrived = [(int(number), float(delay_s)) for number, delay_s in json.load(heard)]
    highest, num_late = -1, 0
    for number, _ in arrived:
        num_late += number < highest
        highest = max(highest, number)
    delays_s = tuple(delay_s for _, delay_s in arrived)
    return DelayMeasurement(delays_s=delays_s, loss=1 - len(arrived) / packets, num_late=num_late)


@contextlib.contextmanager
def _running(lab: Lab, words: Sequence[str], *, host: int) -> Iterator[None]:
    process: HostProcess = lab.start(_command(*words), host=host)
    try:
        yield
    finally:
        process.kill()


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "thinwire.lab.doctor", *words]


def _wait_for_bytes(lab: Lab, host: int, *, before: int) -> None:
    end_s = time.monotonic() + _SLACK_S
    while lab.counters()[host].received_bytes < before + 2000:
        if time.monotonic() > end_s:
            raise TimeoutError(f"host {host} received nothing within {_SLACK_S:g} s")
        time.sleep(0.02)


def _wait_for_port(lab: Lab, host: int) -> None:
    """Wait until the hearer has its port: packets to a closed one would be lost, and counted as the link's losses."""
    command = ["sh", "-c", f"until grep -q :{_PORT:04X} /proc/net/udp; do sleep 0.02; done"]
    lab.start(command, host=host).wait(deadline_s=_SLACK_S)


def _sink(port: str) -> None:
    with socket.create_server(("", int(port))) as listener:
        connection = listener.accept()[0]
        while connection.recv(1 << 20):
            pass


def _flood(address: str, port: str, seconds: str) -> None:
    end_s = time.monotonic() + float(seconds)
    with _connected(address, int(port)) as connection:
        while time.monotonic() < end_s:
            connection.sendall(_CHUNK)


def _connected(address: str, port: int) -> socket.socket:
    end_s = time.monotonic() + _SLACK_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=_SLACK_S)
        except ConnectionRefusedError:  # it is still starting
            if time.monotonic() > end_s:
                raise
            time.sleep(0.02)


def _receive(port: str, packets: str, seconds: str, path: str) -> None:
    arrived: list[tuple[int, float]] = []
    end_s = time.monotonic() + float(seconds)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        end.bind(("", int(port)))
        while len(arrived) < int(packets) and time.monotonic() < end_s:
            end.settimeout(max(0.001, end_s - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                number, sent_s = _STAMP.unpack(end.recv(64))
                arrived.append((number, time.monotonic() - sent_s))
                # the last packets may be the lost ones: do not wait long for those
                end_s = min(end_s, time.monotonic() + 2) if number >= int(packets) - 20 else end_s
    Path(path).write_text(json.dumps(arrived))


def _tick(address: str, port: str, packets: str, interval_s: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        due_s = time.monotonic()
        for number in range(int(packets)):
            due_s += float(interval_s)
            time.sleep(max(0.0, due_s - time.monotonic()))
            end.sendto(_STAMP.pack(number, time.monotonic()), (address, int(port)))


_PARTS: dict[str, Callable[..., None]] = {"sink": _sink, "flood": _flood, "receive": _receive, "tick": _tick}

if __name__ == "__main__":
    _PARTS[sys.argv[1]](*sys.argv[2:])


RATE_TOLERANCE = 0.05
_RATE_BITS_PER_S = 20e6
_LINK = Link(latency_s=0.02, jitter_s=0.002, loss=0.02)
_DELAY_TOLERANCE_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class LabCheck:
    """One thing that was tried.

    Attributes:
        name: What.
        is_ok: Whether it works.
        detail: What was found.
        remedy: What to do where it does not work.
    """

    name: str
    is_ok: bool
    detail: str
    remedy: str = ""


def examine() -> Iterator[LabCheck]:
    """Try what a lab needs, one thing after the other; the first three are needed by all that follow."""
    try:
        check_machine()
    except LabError as error:
        yield LabCheck(name="programs", is_ok=False, detail=str(error), remedy="see the text")
        return
    tools = ", ".join(str(shutil.which(tool)) for tool in TOOLS)
    yield LabCheck(name="programs", is_ok=True, detail=f"{sys.platform}; {tools}")
    for name, attempt in (("hosts", _try_hosts), ("rates", _try_rates), ("links", _try_links), ("delays", _try_delays)):
        check = _tried(name, attempt)
        yield check
        if name == "hosts" and not check.is_ok:
            return


def _tried(name: str, attempt: Callable[[], tuple[bool, str]]) -> LabCheck:
    try:
        is_ok, detail = attempt()
    except (LabError, TimeoutError) as error:
        text, _, remedy = str(error).partition("; ")
        return LabCheck(name=name, is_ok=False, detail=text, remedy=remedy or "see the text")
    remedy = "" if is_ok else "close what else runs on this machine, and try again"
    return LabCheck(name=name, is_ok=is_ok, detail=detail, remedy=remedy)


def _try_hosts() -> tuple[bool, str]:
    with Lab(hosts=2) as lab:
        results = lab.run(["hostname"], deadline_s=20)
        names = [result.stdout.strip() for result in results]
        rate = measure_rate(lab, 0, 1, seconds=0.5)
    return names == ["host-0", "host-1"], f"hosts with names of their own; {format_rate(rate)} without a limit"


def _try_rates() -> tuple[bool, str]:
    with Lab(hosts=2, rate="20mbit") as lab:
        return _compare(measure_rate(lab, 0, 1))


def _try_links() -> tuple[bool, str]:
    with Lab(hosts=2, links={(0, 1): Link(rate_bits_per_s=_RATE_BITS_PER_S)}) as lab:
        return _compare(measure_rate(lab, 0, 1))


def _compare(rate: float) -> tuple[bool, str]:
    is_ok = abs(rate / _RATE_BITS_PER_S - 1) <= RATE_TOLERANCE
    return is_ok, f"{format_rate(rate)} measured where {format_rate(_RATE_BITS_PER_S)} was set"


def _try_delays() -> tuple[bool, str]:
    with Lab(hosts=2, link=_LINK) as lab:
        maker = "the kernel's netem" if lab.delays_by == "netem" else "our relay (this kernel has no netem)"
        found = measure_delays(lab, 0, 1, packets=1000, interval_s=0.002)
    if not found.delays_s:
        return False, f"by {maker}: no packet arrived"
    is_ok = abs(found.median_s - _LINK.latency_s) <= _DELAY_TOLERANCE_S and 0 < found.loss < 3 * _LINK.loss
    return is_ok, (
        f"by {maker}: {format_seconds(found.median_s)} and {found.loss:.1%} lost where "
        f"{format_seconds(_LINK.latency_s)} and {_LINK.loss:.1%} were set"
    )
