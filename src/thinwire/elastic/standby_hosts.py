"""Standby hosts, which wait to replace a lost replica, and the vacancies that no host has filled yet.

Pure: time comes in as a number. A standby host asks every second whether it is to join, so no answer is sent only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A host asks once a second: one heard of within this time is there.
HEARD_S = 5.0
_MAX_HOSTS, _MAX_VACANCIES = 256, 64


@dataclass(slots=True, kw_only=True)
class _StandbyHost:
    host: str
    heard_s: float
    is_called: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacancy:
    """The place of a lost replica."""

    replica: int
    host: str  # may fill it: the replica's own, or a standby host
    since_s: float  # start of the wait for that host
    is_called: bool = False  # it is a standby host


class StandbyHosts:
    """Standby hosts and vacancies.

    Attributes:
        vacancies: Places that no host has filled yet, the oldest first.

    Example:
        >>> spares = StandbyHosts()
        >>> spares.ask(b"s", "gamma", now_s=0.0), spares.waiting(now_s=1.0)
        (False, ('gamma',))
        >>> spares.lost(1, "beta", now_s=1.0)
        >>> spares.due(now_s=10.0, patience_s=20.0), spares.due(now_s=22.0, patience_s=20.0)
        ([], [])
        >>> spares.ask(b"s", "gamma", now_s=22.5), spares.due(now_s=23.0, patience_s=20.0)
        (False, [(1, 'gamma')])
        >>> spares.ask(b"s", "gamma", now_s=23.5), spares.waiting(now_s=23.5)
        (True, ())
    """

    def __init__(self) -> None:
        self.vacancies: list[Vacancy] = []
        self._has_changed = False
        self._hosts: dict[bytes, _StandbyHost] = {}
        # replicas whose standby host was called by an earlier process, which may have ended before it answered
        self._unanswered: set[int] = set()

    def ask(self, token: bytes, host: str, *, now_s: float) -> bool:
        """Note that a standby host waits; return whether it is to join.

        Args:
            token: Its connection.
            host: Its name.
            now_s: The time.
        """
        for old in [old for old, one in self._hosts.items() if now_s - one.heard_s > HEARD_S]:
            del self._hosts[old]
        spare = self._hosts.get(token)
        if spare is None:
            if len(self._hosts) >= _MAX_HOSTS:
                return False
            spare = self._hosts[token] = _StandbyHost(host=host, heard_s=now_s)
        spare.heard_s = now_s
        if not spare.is_called:
            self._call_again(spare)
        return spare.is_called

    def _call_again(self, spare: _StandbyHost) -> None:
        """Call a standby host again that was called before this process began and still asks."""
        for vacancy in self.vacancies:
            if vacancy.host == spare.host and vacancy.replica in self._unanswered:
                self._unanswered.remove(vacancy.replica)
                spare.is_called = True
                return

    def waiting(self, *, now_s: float) -> tuple[str, ...]:
        """Return the standby hosts that wait and were not called, the first to come first."""
        return tuple(one.host for one in self._free(now_s))

    def lost(self, replica: int, host: str, *, now_s: float) -> None:
        """Add the vacancy of a lost replica."""
        self._change([*self.vacancies, Vacancy(replica=replica, host=host, since_s=now_s)])

    def joined(self, host: str) -> None:
        """Note that a replica of a host has joined: it fills the oldest vacancy of that host."""
        found = next((vacancy for vacancy in self.vacancies if vacancy.host == host), None)
        if found is not None:
            self._change([vacancy for vacancy in self.vacancies if vacancy is not found])

    def call(self, replica: int, *, now_s: float) -> str | None:
        """Call a standby host for a replica's place, and return its name; None where none waits."""
        free = self._free(now_s)
        if not free:
            return None
        free[0].is_called = True
        # if it does not join in time, another one is called
        others = [vacancy for vacancy in self.vacancies if vacancy.replica != replica]
        self._change([*others, Vacancy(replica=replica, host=free[0].host, since_s=now_s, is_called=True)])
        self._unanswered.discard(replica)
        return free[0].host

    def due(self, *, now_s: float, patience_s: float) -> list[tuple[int, str]]:
        """Call standby hosts for the vacancies older than `patience_s`; return the replicas and their new hosts."""
        found = []
        for vacancy in [vacancy for vacancy in self.vacancies if now_s - vacancy.since_s > patience_s]:
            host = self.call(vacancy.replica, now_s=now_s)
            if host is None:
                break
            found.append((vacancy.replica, host))
        return found

    def take_change(self) -> list[list[int | str]] | None:
        """Return the vacancies for the journal, once after they have changed."""
        has_changed, self._has_changed = self._has_changed, False
        return self.to_json() if has_changed else None

    def to_json(self) -> list[list[int | str]]:
        """Return the vacancies as JSON values."""
        return [[vacancy.replica, vacancy.host, int(vacancy.is_called)] for vacancy in self.vacancies]

    def load(self, values: Sequence[Sequence[int | str]], *, now_s: float) -> None:
        """Load the vacancies from the journal; their times begin again, since hosts have to find this process first.

        A called host that asks again has not received the answer, and is called again at once.
        """
        self.vacancies = [
            Vacancy(replica=int(replica), host=str(host), since_s=now_s, is_called=bool(is_called))
            for replica, host, is_called in values
        ][-_MAX_VACANCIES:]
        self._unanswered = {vacancy.replica for vacancy in self.vacancies if vacancy.is_called}

    def _free(self, now_s: float) -> list[_StandbyHost]:
        return [one for one in self._hosts.values() if not one.is_called and now_s - one.heard_s <= HEARD_S]

    def _change(self, vacancies: list[Vacancy]) -> None:
        self.vacancies = vacancies[-_MAX_VACANCIES:]
        self._has_changed = True
