"""Relay that adds delay, jitter and loss in user space, between TAP devices, for kernels without `netem`.

The daemon opens the files and starts `python -m thinwire.lab.relay CONTROL HOST_FILE:SWITCH_FILE...`. What a
host sends waits for its link's latency; what comes back from the switch passes at once, so a packet waits once.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import select
import sys
import time
from collections.abc import Sequence

from thinwire.lab.settings import LabSettings, Link

Pair = tuple[int, int | None]
FRAME_ROOM = 65_536
MOST_WAITING = 200_000
_FRAMES_A_TURN = 64
# Jitter that changed with every packet would be eaten by keeping their order. One that lasts this many times its own
# width, as a queue somewhere on the way would, moves the mean by a 24th of the jitter.
_JITTERS_A_HOLD = 4
_OUR_ADDRESSES = bytes.fromhex("02747700")


class LinkEmulator:
    """Emulates links: drops frames, and gives the others their departure time. Pure, with seeded random numbers."""

    def __init__(self, settings: LabSettings) -> None:
        self._random = random.Random(settings.seed)
        self._settings = settings
        self._last_due_s: dict[Pair, float] = {}
        self._jitters: dict[Pair, tuple[float, float]] = {}

    def change(self, settings: LabSettings) -> None:
        """Take other settings for frames from now on; frames of a pair still keep their order."""
        self._settings = settings
        self._jitters.clear()

    def due_s(self, frame: bytes, *, source: int, now_s: float) -> float | None:
        """Return when a frame leaves, or None for one that is lost.

        Args:
            frame: An Ethernet frame.
            source: The host that sent it.
            now_s: The time now.
        """
        destination = host_of(frame[:6])
        link = self._link(source, destination)
        if link.loss and self._random.random() < link.loss:
            return None
        pair = (source, destination)
        jitter_s = self._jitter_s(pair, link, now_s=now_s) if link.jitter_s else 0.0
        due_s = max(self._last_due_s.get(pair, 0.0), now_s + link.latency_s + jitter_s)
        self._last_due_s[pair] = due_s
        return due_s

    def _jitter_s(self, pair: Pair, link: Link, *, now_s: float) -> float:
        jitter_s, until_s = self._jitters.get(pair, (0.0, 0.0))
        if now_s >= until_s:
            jitter_s = self._random.uniform(-link.jitter_s, link.jitter_s)
            self._jitters[pair] = (jitter_s, now_s + _JITTERS_A_HOLD * link.jitter_s)
        return jitter_s

    def _link(self, source: int, destination: int | None) -> Link:
        return self._settings.link if destination is None else self._settings.between(source, destination)


class Relay:
    """Moves frames.

    Args:
        delays: Says when.
        ports: One a host: the file of its own TAP device, and of the switch's.
        control: A file that settings arrive on, a line each; its end ends the relay.
    """

    def __init__(self, delays: LinkEmulator, ports: Sequence[tuple[int, int]], *, control: int) -> None:
        self._delays = delays
        self._control = control
        self._hosts = {host_file: (host, switch_file) for host, (host_file, switch_file) in enumerate(ports)}
        self._back = {switch_file: host_file for host_file, switch_file in ports}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._order = 0
        for file in (*self._hosts, *self._back):
            os.set_blocking(file, False)

    def run(self) -> None:
        """Move frames until the control file ends."""
        files = [*self._hosts, *self._back, self._control]
        text = b""
        while True:
            wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for file in select.select(files, [], [], wait_s)[0]:
                if file == self._control:
                    read = os.read(file, FRAME_ROOM)
                    if not read:
                        return
                    text = self._obey(text + read)
                elif file in self._hosts:
                    self._take(file)
                else:
                    self._pass(file)
            self._release()

    def _take(self, file: int) -> None:
        host, switch_file = self._hosts[file]
        for frame in _frames(file):
            due_s = self._delays.due_s(frame, source=host, now_s=time.monotonic())
            if due_s is not None and len(self._waiting) < MOST_WAITING:
                self._order += 1
                heapq.heappush(self._waiting, (due_s, self._order, switch_file, frame))

    def _pass(self, file: int) -> None:
        for frame in _frames(file):
            _write(self._back[file], frame)

    def _release(self) -> None:
        now_s = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now_s:
            _, _, switch_file, frame = heapq.heappop(self._waiting)
            _write(switch_file, frame)

    def _obey(self, text: bytes) -> bytes:
        *lines, rest = text.split(b"\n")
        for line in lines:
            self._delays.change(LabSettings.from_json(json.loads(line)))
        return rest


def host_of(hardware_address: bytes) -> int | None:
    """Return the host of an address on the link layer; None for a broadcast."""
    if hardware_address[:4] != _OUR_ADDRESSES:
        return None
    return int.from_bytes(hardware_address[4:6], "big")


def hurry() -> None:
    """Ask the kernel to run this process before those that compute: a late relay is a longer link."""
    with contextlib.suppress(OSError):
        os.nice(-15)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _frames(file: int) -> list[bytes]:
    frames: list[bytes] = []
    with contextlib.suppress(OSError):  # no more for now, or the device is down
        while len(frames) < _FRAMES_A_TURN:
            frames.append(os.read(file, FRAME_ROOM))
    return frames


def _write(file: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the device is down or full: the frame is lost, as on a real link
        os.write(file, frame)


def main(arguments: Sequence[str]) -> None:
    """Run the relay."""
    with open(int(arguments[0]), "rb", buffering=0, closefd=False) as control:
        settings = LabSettings.from_json(json.loads(control.readline()))
    ports = []
    for port in arguments[1:]:
        host_file, _, switch_file = port.partition(":")
        ports.append((int(host_file), int(switch_file)))
    hurry()
    Relay(LinkEmulator(settings), ports, control=int(arguments[0])).run()


if __name__ == "__main__":
    main(sys.argv[1:])
