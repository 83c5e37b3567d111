"""The first process of a lab's own world: makes the hosts, starts commands on them, counts their bytes.

`python -m thinwire.lab.namespace_daemon FILE` talks to the lab over a socket. It is started as two processes: the outer
one only waits, the inner one is the first of a process namespace, so that the kernel ends every command when it ends.
The inner one ends when the lab closes the socket or dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import LabError
from thinwire.lab.channel import Channel
from thinwire.lab.namespaces import HostNamespaces, become_init_process, enter_namespaces
from thinwire.lab.sampler import CounterSampler
from thinwire.lab.settings import LabSettings
from thinwire.lab.wiring import LabNetwork


class NamespaceDaemon:
    """Serves one lab."""

    def __init__(self, channel: Channel, *, wiring: LabNetwork, sampler: CounterSampler) -> None:
        self._channel = channel
        self._wiring = wiring
        self._sampler = sampler
        self._commands: dict[int, int] = {}  # process id -> the lab's number for it
        self._relay_id = wiring.relay_id
        self._wake_up, self._woken = socket.socketpair()
        for end in (self._wake_up, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self._woken.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Do what the lab asks until it is gone."""
        sources: list[Any] = [self._channel, self._wake_up]
        try:
            while True:
                ready = select.select(sources, [], [], self._sampler.wait_s(time.monotonic()))[0]
                self._sampler.take_if_due(time.monotonic())
                if self._wake_up in ready:
                    self._wake_up.recv(4096)
                self._reap()
                if self._channel in ready and not self._answer():
                    return
        finally:
            # the sockets close with this object; a child that ends later must not be told of through a closed file
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _answer(self) -> bool:
        received = self._channel.receive()
        if received is None or received[0]["ask"] == "close":
            return False
        request, files = received
        try:
            reply = getattr(self, f"_on_{request['ask']}")(request, files)
        except (OSError, ValueError, LabError, subprocess.SubprocessError) as error:
            reply = {"error": _reason(error) if isinstance(error, OSError) else str(error)}
        finally:
            for file in files:
                os.close(file)
        self._channel.send({"reply": request["id"], **reply})
        return True

    def _on_start(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        world, folder = self._wiring.worlds[request["host"]], request["folder"]
        if not Path(folder).is_dir():
            raise ValueError(f"there is no folder {folder}; give one that is there")

        def enter() -> None:
            world.enter()
            os.chdir(folder)  # entering another world of mounts leads to its root

        stdin, stdout, stderr = files
        process = subprocess.Popen(
            request["command"],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **request["environment"]},
            preexec_fn=enter,  # safe: this process has one thread
            start_new_session=True,
        )
        process.returncode = 0  # we wait for all children ourselves
        self._commands[process.pid] = request["number"]
        return {"pid": process.pid}

    def _on_signal(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        for pid, number in self._commands.items():
            if number == request["number"]:
                os.killpg(pid, request["signal"])
        return {}

    def _on_signal_host(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        """Signal every process on a host, also those that left their command's group."""
        world = self._wiring.worlds[request["host"]]
        told: set[int] = set()
        # one that was told may have started another just before
        while found := processes_on(world) - told:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, request["signal"])
            told |= found
        return {"num_processes": len(told)}

    def _on_shape(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        self._wiring.change(LabSettings.from_json(request["settings"]))
        return {}

    def _on_count(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        return {"counters": [[c.sent_bytes, c.received_bytes, c.sent_packets, c.received_packets]
                             for c in self._sampler.take()]}  # fmt: skip

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self._relay_id:
                self._channel.send({"event": "fault", "text": f"the relay of delays ended with exit code {code}"})
            elif pid in self._commands:
                self._channel.send({"event": "exit", "number": self._commands.pop(pid), "code": code})


def processes_on(world: HostNamespaces) -> set[int]:
    """Return the processes that live in a host's network namespace."""
    wanted, found = world.network_id(), set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if (entry / "ns" / "net").stat().st_ino == wanted:
                    found.add(int(entry.name))
    return found


def main(arguments: Sequence[str]) -> int:
    """Start the keeper of one lab."""
    end = socket.socket(fileno=int(arguments[0]))
    os.set_inheritable(end.fileno(), False)
    channel = Channel(end)
    received = channel.receive()
    if received is None:
        return 1
    order = received[0]
    # the lab alone is meant by the terminal's signals, and tells us
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        enter_namespaces(as_user=os.geteuid() != 0)
        folder = order["folder"] or _temporary_folder()
    except (LabError, OSError) as error:
        channel.send({"event": "failed", "text": str(error)})
        return 1
    inner = os.fork()
    if inner == 0:
        os._exit(_run(channel, {**order, "folder": str(Path(folder).resolve())}))
    channel.close()
    os.waitpid(inner, 0)
    if order["folder"] is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _temporary_folder() -> str:
    try:
        return tempfile.mkdtemp(prefix="thinwire-lab-")
    except OSError as error:
        raise LabError(
            f"the lab's folder cannot be made: {_reason(error)}; set TMPDIR to a folder that takes files, or give one "
            f"(folder=)"
        ) from None


def _reason(error: OSError) -> str:
    """Say what the system refused, and where it says so which file; without a usable folder there is no file."""
    return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)


def _run(channel: Channel, order: dict[str, Any]) -> int:
    folder = Path(order["folder"])
    try:
        become_init_process()
        wiring = LabNetwork(LabSettings.from_json(order["settings"]), folder=folder, force_relay=order["force_relay"])
        sampler = CounterSampler([world.device_counters for world in wiring.worlds], path=folder / "counters.jsonl")
    except (LabError, OSError) as error:
        channel.send({"event": "failed", "text": str(error)})
        return 1
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # commands inherit what is ignored, and the first process ignores anyway
    with contextlib.suppress(OSError):  # the lab is gone
        ready = {"is_relayed": wiring.relay_id is not None, "has_netem": wiring.has_netem, "folder": order["folder"]}
        channel.send({"event": "ready", **ready})
        NamespaceDaemon(channel, wiring=wiring, sampler=sampler).serve()
    sampler.take()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
