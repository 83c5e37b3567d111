"""Admin commands of the coordinator: status, pause, resume, leave, and those of launchers and standby hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire.elastic.coordinator_state import CoordinatorState
from thinwire.elastic.protocol import VERSION, printable
from thinwire.elastic.roster import RosterMember
from thinwire.errors import PayloadError

_MAX_FINDINGS, _MAX_DIGITS = 20, 10
# The answer to a standby host that is to join now.
COME = "come"
Send = Callable[[bytes, str, dict[str, Any]], None]


class AdminCommands:
    """Commands of users and launchers."""

    def __init__(
        self, state: CoordinatorState, *, send: Send, expel: Callable[[int, str], None],
        report: Callable[[str], None], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._state = state
        self._send = send
        self._expel = expel
        self._report = report
        self._clock = clock

    def handle(self, token: bytes, *, verb: str, target: str, now_s: float) -> None:
        """Execute a command, and answer with its result and the status.

        Raises:
            PayloadError: There is no such command.
        """
        match verb:
            case "status":
                is_done, text = True, ""
            case "pause" | "resume":
                is_done, text = self._set_paused(target, is_paused=verb == "pause")
            case "leave":
                found = self._named(target) if target else []
                for member in found:
                    self._send(member.token, "leave", {"why": "was told to leave"})
                is_done, text = self._result("was told to leave", found, target)
            case "expel":
                is_done, text = self._remove(target, result="was let go")
            case "restart":
                result = "was let go, and its host starts another process in its place"
                is_done, text = self._remove(target, result=result, order="kill")
            case "end":
                is_done, text = self._remove(target, result="was let go, and its host ends its process", order="end")
            case "spare":
                is_called = self._state.standby_hosts.ask(token, printable(target, most=200), now_s=now_s)
                is_done, text = True, COME if is_called else ""
            case "call":
                is_done, text = self._call_standby(target, now_s=now_s)
            case _:
                raise PayloadError(f"there is no command {verb[:40]!r}")
        self._send(token, "answer", {"ok": is_done, "text": text, "status": self.status(now_s=now_s)})

    def status(self, *, now_s: float | None = None) -> dict[str, Any]:
        """Return the run's status; with the time, also for how long each replica has been silent."""
        state, job = self._state, self._state.config.job
        members = []
        for member in state.roster:
            silent_s = {} if now_s is None else {"silent_s": round(max(0.0, now_s - member.heard_s), 3)}
            members.append({**member.describe(), "lost": member.is_suspect, **silent_s, "relayed": member.relayed})
        step_s = state.roster.step_s()
        return {
            "thinwire": job.get("thinwire"), "protocol": VERSION, "identity": job.get("identity"),
            "unix_s": self._clock(), "loss": round(state.roster.loss(), 4), "step": state.rounds.step,
            "started": state.has_started, "finished": state.has_finished or bool(state.failure),
            "paused": state.is_paused, "rounds": len(state.rounds.decisions), "members": members,
            "data": {key: value for key, value in state.leases.state_dict().items() if isinstance(value, int)},
            "sites": [list(site) for site in state.sites.sites], "detours": state.detours.describe(),
            "findings": list(state.findings)[-_MAX_FINDINGS:], "orders": list(state.orders),
            "spares": [] if now_s is None else list(state.standby_hosts.waiting(now_s=now_s)),
            "replaced": list(state.replaced), "grace_s": round(state.rounds.grace_s(step_s=step_s), 3),
            "vote_s": round(state.rounds.vote_s, 3), "silence_s": round(state.roster.silence_s, 3),
        }  # fmt: skip

    def call_due_standby_hosts(self, *, now_s: float) -> None:
        """Call standby hosts for replicas that their own hosts do not bring back in time.

        A replica is removed after the limit of silence, and its host has as long again.
        """
        if self._state.has_finished:
            return
        for replica, host in self._state.standby_hosts.due(now_s=now_s, patience_s=2 * self._state.roster.silence_s):
            self._replace(replica, host)

    def _set_paused(self, target: str, *, is_paused: bool) -> tuple[bool, str]:
        found = self._named(target)
        for member in found:
            member.is_paused = is_paused
            self._send(member.token, "pause", {"paused": is_paused})
        if found:
            self._state.is_paused = all(member.is_paused for member in self._state.roster)
        return self._result("paused" if is_paused else "goes on", found, target)

    def _remove(self, target: str, *, result: str, order: str = "") -> tuple[bool, str]:
        """Remove replicas that do not answer; their launchers read in the status to "kill" or "end" their processes.

        One that lives learns of it and joins again.
        """
        found = self._named(target) if target else []
        for member in found:
            self._expel(member.replica, "was let go, since it hangs")
            if order:
                self._state.orders.append({"replica": member.replica, "what": order})
        return self._result(result, found, target)

    def _call_standby(self, target: str, *, now_s: float) -> tuple[bool, str]:
        """Call a standby host for the place of a replica that has been removed, or is about to leave."""
        # Python refuses to read numbers of thousands of digits
        is_number = target.isascii() and target.isdecimal() and len(target) <= _MAX_DIGITS
        if not (is_number and int(target) < self._state.roster.next_replica):
            return False, f"there was no replica {target[:80]!r}"
        host = self._state.standby_hosts.call(int(target), now_s=now_s)
        if host is None:
            return False, "no spare host waits; add one with: thinwire join ADDRESS --spare"
        self._replace(int(target), host)
        return True, f"spare {host} takes its place"

    def _replace(self, replica: int, host: str) -> None:
        self._state.replaced.append({"replica": replica, "host": host})
        self._report(f"spare {host} is called to take the place of replica {replica}")

    def _named(self, target: str) -> list[RosterMember]:
        """Return the replicas of a number or a host; all for an empty target."""
        return [member for member in self._state.roster if target in ("", str(member.replica), member.host)]

    def _result(self, what: str, found: list[RosterMember], target: str) -> tuple[bool, str]:
        if found:
            return True, "; ".join(f"replica {member.replica} on {member.host} {what}" for member in found)
        there = ", ".join(f"{member.replica} ({member.host})" for member in self._state.roster) or "none"
        return False, f"there is no replica or host {target[:80]!r}; there are: {there}"
