"""Admin commands of the coordinator: status, pause, resume, leave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from thinwire.elastic.journal_replay import Memory
from thinwire.elastic.protocol import VERSION, printable
from thinwire.elastic.roster import RosterMember
from thinwire.errors import PayloadError

# Launchers ask once a second.
_MOST_ORDERS, _MOST_DIGITS = 64, 10
# What a spare is answered that is to come, and not to wait on.
COME = "come"


class Counter(Memory):
    """A desk that people can turn to; see `Desk`."""

    def status(self, *, now_s: float | None = None) -> dict[str, Any]:
        """Return what people and launchers are shown; with the time, also how long each replica was not heard of."""
        members = [member.describe() for member in self.roster]
        for one, member in zip(members, self.roster, strict=True):
            one["lost"] = member.is_suspect
            if now_s is not None:
                one["silent_s"] = round(max(0.0, now_s - member.heard_s), 3)
        return {
            "thinwire": self._job.get("thinwire"), "protocol": VERSION, "identity": self._job.get("identity"),
            "unix_s": self._clock(),
            "loss": round(self.roster.loss(), 4),
            "step": self.book.step, "started": self.has_started, "finished": self.has_finished or bool(self.failure),
            "paused": self.is_paused,
            "rounds": len(self.book.decisions), "members": members,
            "data": {key: value for key, value in self.ledger.state_dict().items() if isinstance(value, int)},
            "sites": [list(site) for site in self.places.sites], "detours": self.detours.describe(),
            "findings": self.findings[-20:], "orders": self.orders[-_MOST_ORDERS:],
            "spares": [] if now_s is None else list(self.spares.waiting(now_s=now_s)), "replaced": self.replaced,
            "grace_s": round(self.book.grace_s(step_s=self.roster.step_s()), 3),
            "vote_s": round(self.book.vote_s, 3), "silence_s": round(self.roster.silence_s, 3),
        }  # fmt: skip

    def _obey(self, token: bytes, *, verb: str, target: str, now_s: float) -> None:
        verbs: dict[str, Callable[[str], tuple[bool, str]]] = {
            "status": self._do_status, "pause": self._do_pause, "resume": self._do_resume, "leave": self._do_leave,
            "expel": self._do_expel, "restart": self._do_restart, "end": self._do_end,
            "spare": partial(self._do_spare, token, now_s), "call": partial(self._do_call, now_s),
        }  # fmt: skip
        if verb not in verbs:
            raise PayloadError(f"there is no command {verb[:40]!r}")
        is_done, text = verbs[verb](target)
        self._send(token, "answer", {"ok": is_done, "text": text, "status": self.status(now_s=now_s)})

    def _do_status(self, target: str) -> tuple[bool, str]:
        return True, ""

    def _do_pause(self, target: str) -> tuple[bool, str]:
        return self._set_paused(target, is_paused=True)

    def _do_resume(self, target: str) -> tuple[bool, str]:
        return self._set_paused(target, is_paused=False)

    def _set_paused(self, target: str, *, is_paused: bool) -> tuple[bool, str]:
        found = self._named(target)
        if not found:
            return False, self._nobody(target)
        for member in found:
            member.is_paused = is_paused
            self._send(member.token, "pause", {"paused": is_paused})
        self.is_paused = all(member.is_paused for member in self.roster)
        return True, self._told("paused" if is_paused else "goes on", found)

    def _do_leave(self, target: str) -> tuple[bool, str]:
        found = self._named(target) if target else []
        if not found:
            return False, self._nobody(target)
        for member in found:
            self._send(member.token, "leave", {"why": "was told to leave"})
        return True, self._told("was told to leave", found)

    def _do_expel(self, target: str) -> tuple[bool, str]:
        """Let replicas go that do not answer; one that lives learns of it and joins again."""
        found = self._named(target) if target else []
        if not found:
            return False, self._nobody(target)
        for member in found:
            self._expel(member.replica, why="was let go, since it hangs")
        return True, self._told("was let go", found)

    def _do_restart(self, target: str) -> tuple[bool, str]:
        """Let replicas go that do not answer, and have their hosts start other processes in their places."""
        return self._order(target, what="kill", told="was let go, and its host starts another process in its place")

    def _do_end(self, target: str) -> tuple[bool, str]:
        """Let replicas go that do not answer, and have their hosts end their processes."""
        return self._order(target, what="end", told="was let go, and its host ends its process")

    def _do_spare(self, token: bytes, now_s: float, target: str) -> tuple[bool, str]:
        """Note that a host waits as a spare, and tell it whether it is to come."""
        host = printable(target, most=200)
        return True, COME if self.spares.ask(token, host, now_s=now_s) else ""

    def _do_call(self, now_s: float, target: str) -> tuple[bool, str]:
        """Call a spare for the place of a replica that has been let go, or is about to leave."""
        # Python refuses to read numbers of thousands of digits
        is_number = target.isascii() and target.isdecimal() and len(target) <= _MOST_DIGITS
        if not (is_number and int(target) < self.roster.next_replica):
            return False, f"there was no replica {target[:80]!r}"
        host = self.spares.call(int(target), now_s=now_s)
        if host is None:
            return False, "no spare host waits; add one with: thinwire join ADDRESS --spare"
        self._replace(int(target), host)
        return True, f"spare {host} takes its place"

    def _call_spares(self, now_s: float) -> None:
        """Call spares for those that were lost and that their own hosts do not bring back.

        A replica is let go after so long a silence, and its host has as long again.
        """
        patience_s = 2 * self.roster.silence_s
        for one in () if self.has_finished else self.spares.due(now_s=now_s, patience_s=patience_s):
            self._replace(one.replica, one.host)
        if (gaps := self.spares.news()) is not None:
            self._record("gaps", {"gaps": gaps})

    def _was_called(self, member: RosterMember) -> bool:
        return any(one["host"] == member.host for one in self.replaced)

    def _replace(self, replica: int, host: str) -> None:
        self.replaced.append({"replica": replica, "host": host})
        del self.replaced[:-_MOST_ORDERS]
        self._find(f"spare {host} is called to take the place of replica {replica}")

    def _order(self, target: str, *, what: str, told: str) -> tuple[bool, str]:
        """Let replicas go; the launchers of their hosts, which own the processes, read the rest in the status."""
        found = self._named(target) if target else []
        is_done, text = self._do_expel(target)
        self.orders += [{"replica": member.replica, "what": what} for member in found]
        del self.orders[:-_MOST_ORDERS]
        return is_done, self._told(told, found) if is_done else text

    def _expel(self, replica: int, *, why: str) -> None:
        """Let a replica go; see `Coordinator`."""
        raise NotImplementedError

    def _named(self, target: str) -> list[RosterMember]:
        """Return the replicas of a number or a host; all where nothing is named."""
        return [member for member in self.roster if target in ("", str(member.replica), member.host)]

    def _nobody(self, target: str) -> str:
        there = ", ".join(f"{member.replica} ({member.host})" for member in self.roster) or "none"
        return f"there is no replica or host {target[:80]!r}; there are: {there}"

    def _told(self, what: str, found: list[RosterMember]) -> str:
        return "; ".join(f"replica {member.replica} on {member.host} {what}" for member in found)
