"""An elastic run in one process: the real coordinator and sessions, with queues of threads in the place of wires."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.coordinator_state import CoordinatorConfig
from thinwire.elastic.protocol import VERSION, decode, encode
from thinwire.elastic.round_driver import ReplicaRounds
from thinwire.errors import DeadlineExceeded, PeerLost
from thinwire.version import __version__

JOB = {"thinwire": __version__, "config": {}}


class Fetch:
    """A blob of another shelf, there or not yet."""

    def __init__(self, town: "Town", reader: int, source: int, name: bytes) -> None:
        self._town, self._reader, self._source, self._name = town, reader, source, name

    def _look(self) -> torch.Tensor | None:
        if not self._town.is_joined(self._reader, self._source):
            raise PeerLost(f"replica {self._source} is gone")
        return self._town.blobs.get(self._source, {}).get(self._name)

    def done(self) -> bool:
        try:
            return self._look() is not None
        except PeerLost:
            return True

    def cancel(self) -> None: ...

    def wait(self, *, deadline_s: float) -> torch.Tensor:
        until_s = time.monotonic() + deadline_s
        while (found := self._look()) is None:
            if time.monotonic() > until_s:
                raise DeadlineExceeded(f"replica {self._source} did not send {self._name!r}")
            time.sleep(0.002)
        return found


class TownShelf:
    """One replica's blobs."""

    def __init__(self, town: "Town", replica: int) -> None:
        self._town, self._replica = town, replica
        self.is_past: Callable[[bytes], bool] = lambda name: False

    def publish(self, name: bytes, payload: torch.Tensor) -> None:
        self._town.blobs.setdefault(self._replica, {})[name] = payload

    def get(self, source: int, name: bytes, *, most_bytes: int) -> Fetch:
        return Fetch(self._town, self._replica, source, name)

    def forget_past(self) -> None:
        blobs = self._town.blobs.get(self._replica, {})
        for name in [name for name in blobs if self.is_past(name)]:
            del blobs[name]


class Town:
    """A coordinator, and whoever moves in."""

    def __init__(self, *, planned: int, sync_interval: int = 4, overlap_steps: int = 1, **more: Any) -> None:
        self.lock = threading.RLock()
        self.blobs: dict[int, dict[bytes, torch.Tensor]] = {}
        self.cut: set[frozenset[int]] = set()
        self.dead: set[int] = set()
        self.journal: list[dict[str, Any]] = []
        self.sent: list[tuple[bytes, str]] = []
        self._homes: dict[bytes, Callable[[dict[str, Any]], None]] = {}
        self._settings = dict(
            initial_replicas=planned, sync_interval=sync_interval, overlap_steps=overlap_steps, **more
        )
        self.coordinator = self._made()
        self._is_over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()

    def _made(self) -> Coordinator:
        return Coordinator(
            CoordinatorConfig(job=JOB, shard_windows=8, **self._settings),
            send=self._send, record=lambda what, fields: self.journal.append({"what": what, **fields}),
            generation="g",
        )  # fmt: skip

    def restart(self) -> None:
        """Replace the coordinator by one that knows the journal only."""
        with self.lock:
            lines = [dict(line) for line in self.journal]
            self.coordinator = self._made()
            self.coordinator.replay(lines, now_s=time.monotonic())

    def _send(self, token: bytes, kind: str, fields: dict[str, Any]) -> None:
        self.sent.append((token, kind))
        home = self._homes.get(token)
        if home is not None:
            home(decode(encode(kind, **fields), to_member=True))

    def _tick(self) -> None:
        while not self._is_over.wait(0.01):
            with self.lock:
                self.coordinator.tick(time.monotonic())

    def say(self, token: bytes, kind: str, **fields: Any) -> None:
        with self.lock:
            message = decode(encode(kind, **fields), to_member=False)
            self.coordinator.handle(token, message, now_s=time.monotonic())

    def is_joined(self, one: int, other: int) -> bool:
        return other not in self.dead and one not in self.dead and frozenset({one, other}) not in self.cut

    def close(self) -> None:
        self._is_over.set()
        self._ticker.join()


class Resident:
    """One replica's session and seat."""

    def __init__(
        self, town: Town, *, name: str, interval_steps: int = 4, held: int = 0,
        make_shelf: Callable[[Town, int], Any] = TownShelf,
    ) -> None:  # fmt: skip
        self.town = town
        self.token = name.encode()
        self._welcome: dict[str, Any] = {}
        self.session: CoordinatorSession | None = None
        town._homes[self.token] = self._hear
        town.say(self.token, "join", version=VERSION, thinwire=__version__, host=name)
        self.replica = int(self._welcome["replica"])
        self.session = CoordinatorSession(replica=self.replica, interval_steps=interval_steps, send=self._say)
        self.shelf = make_shelf(town, self.replica)
        self.seat = ReplicaRounds(self.session, self.shelf)
        self.shelf.is_past = self.seat.is_past
        self._say(
            "here", address="127.0.0.1", port=1000 + self.replica, corpus="c", windows=1000, held=held, era=0, disk=0
        )
        self._is_over = threading.Event()
        self._beats = threading.Thread(target=self._turn, daemon=True)
        self._beats.start()

    def _turn(self) -> None:
        while not self._is_over.wait(0.1):
            if self.replica not in self.town.dead:
                self.session.tick()

    def _hear(self, message: dict[str, Any]) -> None:
        if message["kind"] == "welcome":
            self._welcome = message
        elif self.session is not None and self.session.replica not in self.town.dead:
            self.session.receive(message)

    def _say(self, kind: str, **fields: Any) -> None:
        if self.session is None or self.replica not in self.town.dead:
            self.town.say(self.token, kind, **fields)

    def begin(self, step: int = 0) -> None:
        self._say("active", step=step)

    def die(self) -> None:
        """Fall silent and answer nobody, as a process that was killed."""
        self.town.dead.add(self.replica)
        self.close()

    def close(self) -> None:
        self._is_over.set()

    def live(self, num_rounds: int) -> bytes:
        """Take part in some rounds, and return what was applied: each member and its part of nine bytes."""
        applied = b""
        for round_id in range(num_rounds):
            part = torch.full((9,), 10 * round_id + self.replica, dtype=torch.uint8)
            proposal = self.seat.propose(
                part, round_id=round_id, launch_step=4 * round_id + 4, reference_hash=5, most_bytes=9
            )
            proposal.wait(deadline_s=1)
            assert proposal.agreed is not None
            for member, found in proposal.agreed.parts.items():
                applied += bytes([member]) + bytes(found.numpy())
        return applied


def live_together(town: Town, residents: list[Resident], num_rounds: int) -> list[bytes]:
    """Let all take part in some rounds, close the town, and return what each of them applied."""
    with ThreadPoolExecutor(len(residents)) as pool:
        lives = [pool.submit(resident.live, num_rounds) for resident in residents]
        try:
            return [life.result(timeout=60) for life in lives]
        finally:
            for resident in residents:
                resident.close()
            town.close()
