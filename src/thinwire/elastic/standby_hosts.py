"""Hosts that wait to take a lost replica's place, and the places that nobody has taken yet.

Pure: time comes in as a number. A spare asks again and again whether it is to come, so nothing is said to it only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A spare asks once a second: one that was heard of so lately is there.
HEARD_S = 5.0
_MOST_SPARES, _MAX_VACANCIES = 256, 64


@dataclass(slots=True, kw_only=True)
class _Spare:
    host: str
    heard_s: float
    is_called: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacancy:
    """A place that is to be taken.

    Attributes:
        replica: Who was lost.
        host: On which a process may take its place: its own, or a spare that was called.
        since_s: Since when it is waited for.
        is_called: Whether that host is a spare that was called.
    """

    replica: int
    host: str
    since_s: float
    is_called: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyCall:
    """A spare that was called.

    Attributes:
        host: The spare.
        replica: Whose place it takes.
    """

    host: str
    replica: int


class StandbyHosts:
    """See the module.

    Attributes:
        vacancies: Places that nobody has taken yet, the oldest first.

    Example:
        >>> spares = StandbyHosts()
        >>> spares.ask(b"s", "gamma", now_s=0.0), spares.waiting(now_s=1.0)
        (False, ('gamma',))
        >>> spares.lose(1, "beta", now_s=1.0)
        >>> spares.due(now_s=10.0, patience_s=20.0), spares.due(now_s=22.0, patience_s=20.0)
        ([], [])
        >>> spares.ask(b"s", "gamma", now_s=22.5), spares.due(now_s=23.0, patience_s=20.0)
        (False, [StandbyCall(host='gamma', replica=1)])
        >>> spares.ask(b"s", "gamma", now_s=23.5), spares.waiting(now_s=23.5)
        (True, ())
    """

    def __init__(self) -> None:
        self.vacancies: list[Vacancy] = []
        self._has_news = False
        self._spares: dict[bytes, _Spare] = {}
        # replicas whose place a spare was called for by a process that may have ended before it could say so
        self._untold: set[int] = set()

    def ask(self, token: bytes, host: str, *, now_s: float) -> bool:
        """Note that a spare waits; return whether it is to come.

        Args:
            token: Names its connection.
            host: As it calls itself.
            now_s: The time.
        """
        for old in [old for old, one in self._spares.items() if now_s - one.heard_s > HEARD_S]:
            del self._spares[old]
        spare = self._spares.get(token)
        if spare is None:
            if len(self._spares) >= _MOST_SPARES:
                return False
            spare = self._spares[token] = _Spare(host=host, heard_s=now_s)
        spare.heard_s = now_s
        if not spare.is_called:
            self._call_again(spare)
        return spare.is_called

    def _call_again(self, spare: _Spare) -> None:
        """Call a spare that was called before this process began, if it has not come and asks again."""
        for vacancy in self.vacancies:
            if vacancy.host == spare.host and vacancy.replica in self._untold:
                self._untold.remove(vacancy.replica)
                spare.is_called = True
                return

    def waiting(self, *, now_s: float) -> tuple[str, ...]:
        """Return the spares that are there and were not called, who came first first."""
        return tuple(one.host for one in self._free(now_s))

    def lose(self, replica: int, host: str, *, now_s: float) -> None:
        """Note that a replica was lost."""
        self._change([*self.vacancies, Vacancy(replica=replica, host=host, since_s=now_s)])

    def come(self, host: str) -> None:
        """Note that a replica of a host has joined, which takes the oldest place that waits for that host."""
        found = next((vacancy for vacancy in self.vacancies if vacancy.host == host), None)
        if found is not None:
            self._change([vacancy for vacancy in self.vacancies if vacancy is not found])

    def call(self, replica: int, *, now_s: float) -> str | None:
        """Call a spare for a replica's place, and return its host; None where none waits."""
        free = self._free(now_s)
        if not free:
            return None
        free[0].is_called = True
        # where it does not come in its turn, another one is called
        others = [vacancy for vacancy in self.vacancies if vacancy.replica != replica]
        self._change([*others, Vacancy(replica=replica, host=free[0].host, since_s=now_s, is_called=True)])
        self._untold.discard(replica)
        return free[0].host

    def due(self, *, now_s: float, patience_s: float) -> list[StandbyCall]:
        """Call spares for the places that nobody has taken for so long, as far as spares wait."""
        found = []
        for vacancy in [vacancy for vacancy in self.vacancies if now_s - vacancy.since_s > patience_s]:
            host = self.call(vacancy.replica, now_s=now_s)
            if host is None:
                break
            found.append(StandbyCall(host=host, replica=vacancy.replica))
        return found

    def news(self) -> list[list[int | str]] | None:
        """Return the places for a journal, once after they have changed."""
        has_news, self._has_news = self._has_news, False
        return self.told() if has_news else None

    def told(self) -> list[list[int | str]]:
        """Return the places as a journal holds them."""
        return [[vacancy.replica, vacancy.host, int(vacancy.is_called)] for vacancy in self.vacancies]

    def load(self, told: Sequence[Sequence[int | str]], *, now_s: float) -> None:
        """Take back what was told to a journal; patience begins anew, since spares have to find this process first.

        Whoever was called and asks again has not heard it, and is called again at once.
        """
        # a journal of an earlier version does not say who was called
        self.vacancies = [
            Vacancy(replica=int(replica), host=str(host), since_s=now_s, is_called=any(map(bool, called)))
            for replica, host, *called in told
        ][-_MAX_VACANCIES:]
        self._untold = {vacancy.replica for vacancy in self.vacancies if vacancy.is_called}

    def _free(self, now_s: float) -> list[_Spare]:
        return [one for one in self._spares.values() if not one.is_called and now_s - one.heard_s <= HEARD_S]

    def _change(self, vacancies: list[Vacancy]) -> None:
        self.vacancies = vacancies[-_MAX_VACANCIES:]
        self._has_news = True
