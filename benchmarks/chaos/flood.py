"""Admission under a flood: how long `thinwire status` and a new replica wait while strangers open connections.

Three hosts of a lab with latency: a coordinator, a flooder without the secret, and a user. Prints one JSON line.

    python benchmarks/chaos/flood.py --rate 1000 --latency-ms 50 --addresses 1
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import json
import os
import resource
import selectors
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_client import CoordinatorConnection, send_command
from thinwire.elastic.coordinator_server import CoordinatorServer
from thinwire.elastic.coordinator_state import CoordinatorConfig
from thinwire.elastic.invitation import Invitation
from thinwire.elastic.protocol import VERSION, Message
from thinwire.errors import ConnectError
from thinwire.lab import Lab
from thinwire.lab.settings import Link
from thinwire.transport.secret import make_secret, read_secret
from thinwire.version import __version__

PORT = 7700
DEADLINE_S = 10.0
# Of Linux: the port is chosen by `connect`, not by `bind`, which has half as many.
_BIND_ADDRESS_NO_PORT = 24
_FIRST_EXTRA_ADDRESS = 20


def serve(folder: Path) -> None:
    """Be a coordinator until the process is ended."""
    hub = CoordinatorServer(
        secret=read_secret(folder / "secret"), address="10.77.0.1", port=PORT, say=lambda text: None
    )
    coordinator = Coordinator(
        CoordinatorConfig(
            job={"thinwire": __version__}, initial_replicas=1, sync_interval=10, overlap_steps=1, shard_windows=8,
        ),
        send=hub.send, record=lambda what, fields: None, generation="g",
    )  # fmt: skip
    print("ready", flush=True)
    hub.serve(coordinator, until=lambda: False)


def flood(rate: float, addresses: int) -> None:
    """Open connections to the coordinator at a rate, keep them while it does, and report once a second."""
    names = (
        [f"10.77.0.{_FIRST_EXTRA_ADDRESS + index}" for index in range(addresses)] if addresses > 1 else ["10.77.0.2"]
    )
    for name in names if addresses > 1 else ():
        subprocess.run(["ip", "address", "add", f"{name}/24", "dev", "eth0"], check=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    begin_s, count, made, next_report_s = time.monotonic(), 0, 0, time.monotonic() + 1
    selector = selectors.DefaultSelector()
    while True:
        now_s = time.monotonic()
        while count < (now_s - begin_s) * rate:
            count += 1
            with contextlib.suppress(OSError):
                begin(selector, names[count % len(names)])
        for key, events in selector.select(0.002):
            one = key.fileobj
            assert isinstance(one, socket.socket)
            if events & selectors.EVENT_WRITE and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                made += 1
                selector.modify(one, selectors.EVENT_READ)
            else:  # the coordinator has closed it
                selector.unregister(one)
                one.close()
        if now_s > next_report_s:
            next_report_s = now_s + 1
            print(json.dumps({"tried_a_second": count / (now_s - begin_s), "made": made}), flush=True)


def begin(selector: selectors.BaseSelector, address: str) -> None:
    """Begin to open a connection from an address; its port is free again as soon as it is closed."""
    one = socket.socket()
    one.setblocking(False)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
    one.bind((address, 0))
    if one.connect_ex(("10.77.0.1", PORT)) == errno.EINPROGRESS:
        selector.register(one, selectors.EVENT_WRITE)
    else:
        one.close()


def join(invitation: Invitation, folder: Path) -> float | None:
    """Return how long a new replica waits for its welcome, None where it does not come in time."""
    has_come = threading.Event()

    def hear(message: Message) -> None:
        if message["kind"] == "welcome":
            has_come.set()

    begin_s = time.monotonic()
    line = CoordinatorConnection(invitation, secret=read_secret(folder / "secret"), hear=hear)
    line.send("join", version=VERSION, thinwire=__version__, host="new")
    is_there = has_come.wait(DEADLINE_S)
    line.close()
    return time.monotonic() - begin_s if is_there else None


def use(folder: Path, count: int) -> None:
    """Ask for the status and join, again and again, and print how long each took."""
    invitation = Invitation(host="10.77.0.1", port=PORT)
    secret = read_secret(folder / "secret")
    status: list[float | None] = []
    for _ in range(count):
        begin_s = time.monotonic()
        try:
            send_command(invitation, secret=secret, deadline_s=DEADLINE_S, verb="status", target="")
            status.append(time.monotonic() - begin_s)
        except ConnectError:
            status.append(None)
    joined = [join(invitation, folder) for _ in range(count)]
    words = [sys.executable, "-m", "thinwire.cli.main", "status", f"10.77.0.1:{PORT}", "--secret"]
    begin_s = time.monotonic()
    code = subprocess.run([*words, str(folder / "secret")], capture_output=True, check=False).returncode
    command_s = time.monotonic() - begin_s
    print(json.dumps({"status": status, "join": joined, "command_code": code, "command_s": command_s}), flush=True)


def summary(times: list[float | None]) -> dict[str, Any]:
    """Return how many were answered, and how long those took."""
    came = [one for one in times if one is not None]
    return {
        "tries": len(times), "answered": len(came),
        "median_s": round(statistics.median(came), 3) if came else None,
        "max_s": round(max(came), 3) if came else None,
    }  # fmt: skip


def measure(*, rate: float, latency_s: float, addresses: int, count: int) -> dict[str, Any]:
    """Return what a user waits for beside a flood."""
    script = [sys.executable, str(Path(__file__).resolve())]
    with tempfile.TemporaryDirectory() as name, Lab(hosts=3, link=Link(latency_s=latency_s)) as lab:
        folder = Path(name)
        make_secret(folder / "secret")
        logs = {role: (folder / role).open("w+b") for role in ("serve", "flood", "use")}
        with contextlib.ExitStack() as stack:
            for log in logs.values():
                stack.enter_context(log)
            server = lab.start([*script, "--role", "serve", name], host=0, stdout=logs["serve"])
            _wait_for(folder / "serve")
            flooder = None
            if rate:
                words = ["--role", "flood", "--rate", str(rate), "--addresses", str(addresses)]
                flooder = lab.start([*script, *words], host=1, stdout=logs["flood"])
                _wait_for(folder / "flood")
            user = lab.start([*script, "--role", "use", name, "--count", str(count)], host=2, stdout=logs["use"])
            user.wait(deadline_s=600)
            for process in (server, flooder):
                if process is not None:
                    process.kill()
        found = json.loads((folder / "use").read_text())
        flooded = json.loads((folder / "flood").read_text().splitlines()[-1]) if rate else {}
    has_quota = importlib.util.find_spec("thinwire.transport.admission") is not None
    return {
        "has_quota": has_quota, "rate_a_second": rate, "latency_one_way_s": latency_s, "addresses": addresses,
        "tried_a_second": round(flooded.get("tried_a_second", 0.0)), "connections_made": flooded.get("made", 0),
        "status": summary(found["status"]), "join": summary(found["join"]),
        "command_exit_code": found["command_code"], "command_s": round(found["command_s"], 3),
        "deadline_s": DEADLINE_S, "cores": os.cpu_count(),
    }  # fmt: skip


def _wait_for(path: Path) -> None:
    until_s = time.monotonic() + 60
    while not path.stat().st_size:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{path.name} did not begin within 60 s")
        time.sleep(0.05)


def main() -> None:
    """Run the benchmark, or one of its roles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--role", choices=("serve", "flood", "use"))
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--addresses", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args()
    if options.role == "serve":
        serve(options.folder)
    elif options.role == "flood":
        flood(options.rate, options.addresses)
    elif options.role == "use":
        use(options.folder, options.count)
    else:
        found = measure(
            rate=options.rate, latency_s=options.latency_ms / 1000, addresses=options.addresses, count=options.count
        )
        print(json.dumps(found))


if __name__ == "__main__":
    main()
