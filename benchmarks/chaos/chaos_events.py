"""What happens to a run, chosen by a seed: one fault every few seconds, and its end."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

from chaos_job import ChaosJob, Host

KINDS = ("kill", "stop", "cut", "slow", "join", "leave", "coordinator")
# So many hosts' replicas take part, at least, that no fault of the last seconds has hit.
_LEAST_CALM = 2
_CALM_AGAIN_S = 15.0


class Chaos:
    """Chooses faults, does them, and undoes those that pass.

    Args:
        job: The run.
        seed: Chooses.
        rates: Each host's access, such as `20mbit`.
        kinds: Which faults there are.
    """

    def __init__(self, job: ChaosJob, *, seed: int, rates: list[str], kinds: tuple[str, ...] = KINDS) -> None:
        self.events: list[dict[str, Any]] = []
        self._job = job
        self._random = random.Random(seed)
        self._rates = rates
        self._kinds = kinds
        self._hit_s: dict[int, float] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    @property
    def has_kinds(self) -> bool:
        """Whether anything may happen."""
        return bool(self._kinds)

    def strike(self) -> None:
        """Do the next fault; one that is not possible now is passed over for the next."""
        first, *others = self._random.sample(self._kinds, len(self._kinds))
        for kind in (first, *(other for other in others if other != "coordinator")):  # it is always possible
            if self.do(kind):
                return

    def do(self, kind: str) -> bool:
        """Do a fault of a kind; return whether it was possible."""
        found = getattr(self, f"_{kind}")()
        if found is None:
            return False
        self.events.append({"at_s": time.time(), "kind": kind, **found})
        return True

    def turn(self) -> None:
        """Undo what is over."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()

    def calm(self) -> None:
        """Undo everything now."""
        while self._due:
            heapq.heappop(self._due)[2]()

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), what))

    def _victim(self) -> Host | None:
        """Return a host whose replica takes part, where enough others do that nothing has happened to."""
        now_s = time.monotonic()
        live = [host for host in self._job.hosts if host.pid and host.lives and host.lives[-1].live_s is not None]
        calm = [host for host in live if self._hit_s.get(host.number, -1e9) < now_s]
        if len(calm) <= _LEAST_CALM:
            return None
        return self._random.choice(calm)

    def _hit(self, host: Host, *, for_s: float = 0.0) -> None:
        self._hit_s[host.number] = time.monotonic() + for_s + _CALM_AGAIN_S

    def _kill(self) -> dict[str, Any] | None:
        host = self._victim()
        if host is None:
            return None
        self._hit(host)
        self._job.kill(host.number)
        return {"host": host.number}

    def _stop(self) -> dict[str, Any] | None:
        host = self._victim()
        if host is None:
            return None
        for_s = self._random.uniform(2, 15)
        self._hit(host, for_s=for_s)
        pid, life = self._job.stop(host.number), host.lives[-1]

        def go_on() -> None:
            life.stopped_s += for_s
            if pid is not None and self._job.processes().get(host.number) == pid:
                os.kill(pid, signal.SIGCONT)

        self._later(for_s, go_on)
        return {"host": host.number, "for_s": for_s}

    def _cut(self) -> dict[str, Any] | None:
        host = self._victim()
        if host is None:
            return None
        for_s = self._random.uniform(2, 15)
        self._hit(host, for_s=for_s)
        self._job.lab.cut(host.number)
        self._later(for_s, lambda: self._job.lab.mend(host.number))
        return {"host": host.number, "for_s": for_s}

    def _slow(self) -> dict[str, Any] | None:
        host = self._victim()
        if host is None:
            return None
        for_s, rate = self._random.uniform(5, 20), self._rates[host.number]
        self._hit(host, for_s=for_s)
        self._job.lab.set_rate(host.number, f"{float(rate.removesuffix('mbit')) / 10:g}mbit")
        self._later(for_s, lambda: self._job.lab.set_rate(host.number, rate))
        return {"host": host.number, "for_s": for_s}

    def _join(self) -> dict[str, Any] | None:
        free = [host for host in self._job.hosts if not host.is_running]
        if not free:
            return None
        host = self._random.choice(free)
        self._job.join(host.number)
        return {"host": host.number}

    def _leave(self) -> dict[str, Any] | None:
        host = self._victim()
        if host is None or host.number == 0:
            return None
        self._hit(host)
        replica = host.lives[-1].replica
        assert replica is not None
        self._job.leave(replica)
        return {"host": host.number, "replica": replica}

    def _coordinator(self) -> dict[str, Any] | None:
        pid = self._job.coordinator()
        if pid is None:
            return None
        os.kill(pid, signal.SIGKILL)
        return {"host": 0}
