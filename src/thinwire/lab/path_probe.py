"""Path probe of a lab's fabric: the spine that each source port takes, by the kernel's byte counts of the cables.

A leaf picks the spine of a connection by a hash of its addresses and ports. So a sender that binds its source port
chooses its spine, once it knows the table. `probe_paths` measures it; `Transfers` sends over chosen ports.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import LabError
from thinwire.lab.lab import HostProcess, Lab

SINK_PORT = 5_001
_PROBE_BYTES = 30_000  # far above what connections open and close with
_DEADLINE_S = 60.0

# Each connection's bytes are appended to a file once it ends.
_SINK = """
import socket, sys, threading
server = socket.create_server(("", int(sys.argv[1])), backlog=64)
def take(connection, port):
    count = 0
    while data := connection.recv(1 << 16):
        count += len(data)
        if data.endswith(b"E"):
            break
    with open(sys.argv[2], "a") as file:
        file.write(f"{port} {count}\\n")
    connection.send(b"k")
print("ready", flush=True)
while True:
    connection, (_, port) = server.accept()
    threading.Thread(target=take, args=(connection, port), daemon=True).start()
"""
# Its last byte is another one, which the sink answers: then all has arrived. The reset at the end spares the port a
# minute of waiting for late packets, so that it can be used again.
_SENDER = """
import socket, struct, sys, time
address, sink, port, seconds, most = sys.argv[1], *map(float, sys.argv[2:])
connection = socket.socket()
connection.bind(("", int(port)))
connection.settimeout(60)
connection.connect((address, int(sink)))
end_s, count, data = time.monotonic() + seconds, 0, b"x" * 15000
while time.monotonic() < end_s and count < most:
    count += connection.send(data)
connection.sendall(b"E")
assert connection.recv(1) == b"k"
connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
connection.close()
print(count + 1, flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortTransfer:
    """A transfer between two hosts over a chosen source port."""

    source: int
    destination: int
    port: int


class Transfers:
    """Sinks on all hosts of a lab, and senders with chosen source ports.

    Args:
        lab: The lab; its folder takes the counts.
    """

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._num_senders = 0
        for host in range(lab.num_hosts):
            with self._output(f"sink-{host}").open("wb") as output:
                command = [sys.executable, "-c", _SINK, str(SINK_PORT), str(self._counts(host))]
                lab.start(command, host=host, stdout=output, stderr=output)
        for host in range(lab.num_hosts):
            self._wait_for_sink(host)

    def send(
        self, transfer: PortTransfer, *, seconds: float, most_bytes: float = float("inf")
    ) -> tuple[HostProcess, Path]:
        """Start to send, for some time or bytes; return the process and the file of what it has sent."""
        self._num_senders += 1
        path = self._output(f"sender-{self._num_senders}")
        arguments = (self._lab.address(transfer.destination), SINK_PORT, transfer.port, seconds, most_bytes)
        with path.open("wb") as output:
            command = [sys.executable, "-c", _SENDER, *map(str, arguments)]
            return self._lab.start(command, host=transfer.source, stdout=output, stderr=output), path

    def received_bytes(self, host: int) -> dict[int, int]:
        """Return the bytes of each ended connection of a host, by its source port."""
        path = self._counts(host)
        lines = path.read_text().splitlines() if path.exists() else []
        return {int(port): int(count) for port, count in map(str.split, lines)}

    def _wait_for_sink(self, host: int) -> None:
        end_s = time.monotonic() + _DEADLINE_S
        while b"ready" not in self._output(f"sink-{host}").read_bytes():
            if time.monotonic() > end_s:
                raise LabError(f"the sink on host {host} has not started within {_DEADLINE_S:g} s")
            time.sleep(0.02)

    def _output(self, name: str) -> Path:
        return self._lab.folder / f"{name}.txt"

    def _counts(self, host: int) -> Path:
        return self._lab.folder / f"received-{host}.txt"


def probe_paths(
    lab: Lab, transfers: Transfers, *, source: int, destination: int, ports: Iterable[int], enough: int | None = None
) -> Mapping[int, int]:
    """Return the spine of each source port from one host to another.

    Args:
        lab: A lab with a fabric and no other traffic.
        transfers: Its sinks.
        source: The sending host.
        destination: The receiving host, on another leaf.
        ports: Source ports to try, one after another.
        enough: Stop once so many spines are known.

    Raises:
        LabError: A probe crossed no spine.
    """
    found: dict[int, int] = {}
    for port in ports:
        before = lab.cable_bytes()
        transfer = PortTransfer(source=source, destination=destination, port=port)
        transfers.send(transfer, seconds=_DEADLINE_S, most_bytes=_PROBE_BYTES)[0].wait(deadline_s=_DEADLINE_S)
        sent = {cable: up - before[cable][0] for cable, (up, _) in lab.cable_bytes().items()}
        (_, spine), count = max(sent.items(), key=lambda pair: pair[1])
        if count < _PROBE_BYTES:
            raise LabError(f"source port {port} of host {source} sent no {_PROBE_BYTES} bytes over any cable")
        found[port] = spine
        if enough is not None and len(set(found.values())) >= enough:
            break
    return found
