"""Session of a replica with the coordinator: keeps its view, and resends messages until they are acknowledged."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.adaptive_timeout import AdaptiveTimeout
from thinwire.elastic.adaptive_local_steps import PeerPace
from thinwire.elastic.protocol import FROM_NOBODY, RUN_OVER, Message, checked_member, numbers
from thinwire.elastic.rounds import Decision
from thinwire.elastic.routing import BEGINS, LATEST, Detour, LinkRates, Sites, slow_sources
from thinwire.errors import ConnectError, DroppedBadParts, Expelled, NonFiniteError, RunOver
from thinwire.roles import ROLES
from thinwire.transport.wire.wire_transport import WireTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another replica, or this one, as the coordinator describes it."""

    replica: int  # its number
    host: str  # its host name
    address: str  # where it is reached
    port: int
    role: str = ROLES[0]  # what it does in the run
    is_active: bool  # whether it takes part in rounds

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Neighbour:
        """Return the replica that a checked description is of."""
        names = ("replica", "host", "address", "port")
        role, is_active = described.get("role", ROLES[0]), described["state"] == "active"
        return cls(**{name: described[name] for name in names}, role=role, is_active=is_active)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOffer:
    """A state that a replica may begin from."""

    step: int  # of the state
    # its hash; `seed` for the first weights, `disk` for the replica's own last checkpoint, `own` for the state that it
    # said it holds
    root: str
    num_bytes: int  # its size
    holders: tuple[int, ...]  # replicas that publish it
    note: Mapping[str, Any]  # added by the coordinator: the data used so far
    era: int = 0  # number of times that the run continued from a disk; states of other eras do not fit


@dataclass(slots=True, kw_only=True)
class CoordinatorView:
    """State reported by the coordinator; read it with `CoordinatorSession.changed` held."""

    neighbours: dict[int, Neighbour] = field(default_factory=dict)
    has_started: bool = False
    roster_number: int = 0
    calls: dict[int, tuple[int, ...]] = field(default_factory=dict)
    decisions: dict[int, Decision] = field(default_factory=dict)
    sites: Sites = ()
    detours: tuple[Detour, ...] = ()
    step: int = 0
    closed_step: int = 0
    floor_step: int = 0
    kept_step: int = 0
    era: int = 0
    captures: set[int] = field(default_factory=set)
    offers: dict[int, StateOffer] = field(default_factory=dict)
    offer: StateOffer | None = None
    accounts: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    leases: dict[int, tuple[int, int]] = field(default_factory=dict)
    is_paused: bool = False
    leave_why: str = ""
    expelled_why: str = ""
    has_bad_parts: bool = False
    failed_why: str = ""
    refused_why: str = ""
    finish: Message | None = None
    heard_s: float = 0.0


# A message is sent again after this many seconds without an acknowledgement.
_RESEND_S = 2.0
# A supervisor restarts a dead coordinator within seconds; its host may take minutes to come back.
_WARN_S, GONE_S = 30.0, 1800.0
_LEAST_TRANSFER_S, _MOST_TRANSFER_S = 2.0, 60.0
_LEAST_RELAY_S, _MOST_RELAY_S = 0.5, 20.0


@dataclass(slots=True)
class _PendingMessage:
    """A message that is resent until it is acknowledged."""

    kind: str
    fields: dict[str, Any]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimits:
    """Limits on waiting for a round's parts."""

    overdue_steps: float = 0.0  # inner steps for which parts may be under way while no replica waits for the result
    last_step: float = math.inf  # the run's last inner step


# Seconds. A connection sends a heartbeat once a second; any byte counts as one.
SILENT_S = 3.0
_SAMPLE_S = 0.5
# Share of the highest rate of the last minute from which a link counts as busy. A link that became ten times slower
# still counts as busy; one that carries only the trickle of a slow sender does not.
_BUSY_SHARE = 1 / 16
# Bytes a second: messages and heartbeats alone stay below this.
_IDLE_BYTES = 4096
_RECENT_S, _LONG_S = 2.0, 60.0


class PeerActivity:
    """Samples the connections twice a second at most, however often it is asked.

    Args:
        wire: Connections of this replica; None sees no activity.
        now: Clock in seconds that never goes back.
    """

    def __init__(self, wire: WireTransport | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._wire = wire
        self._now = now
        self._sampled_s: float | None = None
        self._silent: frozenset[int] = frozenset()
        self._received_bytes: dict[int, int] = {}
        self._rates: deque[tuple[float, float, float]] = deque()  # begin, end, bytes a second

    def silent_peers(self) -> frozenset[int]:
        """Return the peers silent for `SILENT_S`; a lost connection is reported elsewhere and does not count."""
        self._sample()
        return self._silent

    def is_link_busy(self) -> bool:
        """Return whether the last seconds brought much, compared with what this link can carry."""
        self._sample()
        if not self._rates:
            return False
        now_s = self._rates[-1][1]
        recent = [(end_s - begin_s, rate) for begin_s, end_s, rate in self._rates if end_s > now_s - _RECENT_S]
        rate = sum(seconds * rate for seconds, rate in recent) / sum(seconds for seconds, _ in recent)
        return rate >= max(_IDLE_BYTES, _BUSY_SHARE * max(found for _, _, found in self._rates))

    def relayed_peers(self) -> tuple[int, ...]:
        """Return the peers that are reached by a relay."""
        return () if self._wire is None else self._wire.relayed_peers()

    def _sample(self) -> None:
        now_s = self._now()
        if self._sampled_s is not None and now_s - self._sampled_s < _SAMPLE_S:
            return
        readings = {peer: self._wire.reading(peer) for peer in self._wire.peers()} if self._wire is not None else {}
        known = {peer: one for peer, one in readings.items() if one is not None}
        self._silent = frozenset(peer for peer, one in known.items() if one.silence_s > SILENT_S)
        totals = {peer: one.received_bytes for peer, one in known.items()}
        if self._sampled_s is not None:
            # a new connection counts from 0 again
            came = [total - before if total >= (before := self._received_bytes.get(peer, 0)) else total
                    for peer, total in totals.items()]  # fmt: skip
            self._rates.append((self._sampled_s, now_s, sum(came) / (now_s - self._sampled_s)))
            while self._rates[0][1] < now_s - _LONG_S:
                self._rates.popleft()
        self._received_bytes, self._sampled_s = totals, now_s


def _ignore(text: str) -> None:
    """Drop a warning; a function, so that a session can be copied."""


class CoordinatorSession:
    """A replica's session with the coordinator; safe between threads.

    Args:
        replica: Number of this replica.
        interval_steps: H, inner steps; decisions are kept for two of them.
        send: Sends a message to the coordinator.
        on_roster: Called with the members whenever they change.
        warn: Called at growing intervals while the coordinator is silent.
        now: Clock in seconds that never goes back.
        activity: Activity on this replica's links.
        limits: Limits on waiting for parts.

    Attributes:
        changed: Notified after every message; held while `view` is read.
        view: State reported by the coordinator.
        transfer_timeout: Time that parts take to arrive after a round was called.
        relay_timeout: The same for parts that come through a relay.
        missing_parts: Number of parts not here yet, by decided round.
        verifiers: Called with a round and a replica whose part in it the coordinator asks about.
        pace: Launches of the fastest replicas.
        link_rates: Rates at which this replica's answers reach the others.
    """

    def __init__(
        self, *, replica: int, interval_steps: int, send: Callable[..., None],
        on_roster: Callable[[Mapping[int, Neighbour]], None] = lambda neighbours: None,
        warn: Callable[[str], None] = _ignore, now: Callable[[], float] = time.monotonic,
        activity: PeerActivity | None = None, limits: RoundLimits = RoundLimits(),
    ) -> None:  # fmt: skip
        self.replica = replica
        self.interval_steps = interval_steps
        self.changed = threading.Condition(threading.RLock())
        self.view = CoordinatorView(heard_s=now())
        self.transfer_timeout = AdaptiveTimeout(least_s=_LEAST_TRANSFER_S, most_s=_MOST_TRANSFER_S)
        self.relay_timeout = AdaptiveTimeout(least_s=_LEAST_RELAY_S, most_s=_MOST_RELAY_S)
        self.step = 0
        self.step_s = self._steps_per_interval = self._tokens_s = self._loss = 0.0
        self.pace = PeerPace()
        self.link_rates = LinkRates()
        self.activity = activity or PeerActivity()
        self.limits = limits
        self.missing_parts: dict[int, int] = {}
        self.verifiers: list[Callable[[int, int], None]] = []
        self._used_windows: Mapping[int, int] = {}
        self._now = now
        self._send = send
        self._on_new_roster = on_roster
        self._warn = warn
        self._warn_s = _WARN_S
        self._unanswered: dict[tuple[str, int], _PendingMessage] = {}
        self._next_beat_s = 0.0

    # -- progress of this replica

    def reach(self, step: int) -> None:
        """Record the inner step that this replica has reached."""
        self.step = max(self.step, step)

    def report_work(
        self, *, step_s: float | None = None, steps_per_interval: float | None = None, tokens_s: float | None = None,
        loss: float | None = None,
    ) -> None:  # fmt: skip
        """Record this replica's throughput for the next heartbeats; None keeps a value."""
        self.step_s = self.step_s if step_s is None else step_s
        self._steps_per_interval = self._steps_per_interval if steps_per_interval is None else steps_per_interval
        self._tokens_s = self._tokens_s if tokens_s is None else tokens_s
        self._loss = self._loss if loss is None else loss

    def track_windows(self, used: Mapping[int, int]) -> None:
        """Report with each launch the windows used of each leased shard; `used` is read then."""
        self._used_windows = used

    # -- requests

    def active(self) -> tuple[int, ...]:
        """Return the replicas that take part in rounds, this one among them."""
        with self.changed:
            found = {one.replica for one in self.view.neighbours.values() if one.is_active}
            return tuple(sorted(found | {self.replica}))

    def check(self) -> None:
        """Raise unless this replica still takes part.

        Raises:
            Expelled: It does not.
            DroppedBadParts: It does not, because its parts could not be used, as with NaN.
            RunOver: The run has come to its end without it.
            NonFiniteError: The parts of all replicas hold NaN or infinity, so the run has failed.
            ConnectError: The coordinator has been silent for `GONE_S`.
        """
        silence_s = self._now() - self.view.heard_s
        if silence_s > GONE_S:
            raise ConnectError(
                f"nothing was heard of the coordinator for {silence_s:.0f} s, and at most {GONE_S:g} s are waited; go "
                f"on from one host's newest state: thinwire train --elastic --resume FOLDER"
            )
        if self.view.failed_why:
            raise NonFiniteError(self.view.failed_why)
        if self.view.expelled_why == RUN_OVER:
            raise RunOver(RUN_OVER)
        if self.view.has_bad_parts:
            raise DroppedBadParts(
                f"replica {self.replica} {self.view.expelled_why}; it joins again and fetches the state of the others"
            )
        if self.view.expelled_why:
            raise Expelled(f"replica {self.replica} {self.view.expelled_why}; it joins again")

    def launch(self, round_id: int, *, launch_step: int) -> None:
        """Announce that this replica's part of a round can be fetched."""
        self._send_keyed("launch", round_id, round=round_id, step=launch_step, used=self._used())

    def withhold(self, round_id: int, *, launch_step: int, parts: int) -> None:
        """Report that this replica's part of a round holds NaN or infinity and is not offered.

        Args:
            round_id: The round.
            launch_step: The step that it is launched at.
            parts: How many such parts in a row there have been, this one among them.
        """
        self._send_keyed("withhold", round_id, round=round_id, step=launch_step, used=self._used(), parts=parts)

    def _used(self) -> dict[str, int]:
        return {str(shard): windows for shard, windows in self._used_windows.items()}

    def vote(self, round_id: int, *, has: tuple[int, ...], reference_hash: int) -> None:
        """Report the parts of a round that this replica holds."""
        self._send_keyed("vote", round_id, round=round_id, step=self.step, has=list(has), hash=reference_hash)

    def settle(self, round_id: int) -> None:
        """Stop sending messages about a round."""
        with self.changed:
            for kind in ("launch", "withhold", "vote"):
                self._unanswered.pop((kind, round_id), None)
            self.view.calls.pop(round_id, None)

    def lease(self, number: int) -> tuple[int, int]:
        """Return the shard that is this replica's n-th, and its first window there; waits for the coordinator.

        Raises:
            Expelled: This replica does not take part any more.
        """
        self.ask_lease(number)
        with self.changed:
            while number not in self.view.leases:
                self.check()
                self.changed.wait(1.0)
            return self.view.leases[number]

    def ask_lease(self, number: int) -> None:
        """Ask for the n-th shard ahead of time."""
        with self.changed:
            if number in self.view.leases or ("lease", number) in self._unanswered:
                return
        self._send_keyed("lease", number, number=number)

    def account(self, step: int, *, deadline_s: float) -> Mapping[str, Any] | None:
        """Return the account of the data at a step; None where the coordinator does not answer in time."""
        self._send_keyed("account", step, step=step)
        try:
            found: Mapping[str, Any] = self.wait_for(
                lambda view: view.accounts.get(step), deadline_s=deadline_s, why="the state is kept without it"
            )
        except (ConnectError, Expelled, RunOver):
            return None
        finally:
            with self.changed:
                self._unanswered.pop(("account", step), None)
                self.view.accounts.clear()
        return found

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message once, without acknowledgement."""
        self._send(kind, **fields)

    def send_reliably(self, kind: str, **fields: Any) -> None:
        """Send a message repeatedly until it is answered, or until `stop_resending`."""
        self._send_keyed(kind, -1, **fields)

    def _send_keyed(self, kind: str, key: int, **fields: Any) -> None:
        with self.changed:
            self._unanswered[kind, key] = _PendingMessage(kind, fields, self._now())
        self._send(kind, **fields)

    def stop_resending(self, kind: str) -> None:
        """Stop sending a message again."""
        with self.changed:
            self._unanswered.pop((kind, -1), None)

    def is_acknowledged(self, kind: str) -> bool:
        """Return whether a reliable message was acknowledged."""
        with self.changed:
            return (kind, -1) not in self._unanswered

    def wait_for(self, what: Callable[[CoordinatorView], Any], *, deadline_s: float | None, why: str) -> Any:
        """Wait until something is known.

        Args:
            what: Evaluated on the view; a true result ends the wait.
            deadline_s: Seconds; None for no limit while the coordinator answers.
            why: Ends the error's text.

        Raises:
            Expelled: This replica does not take part any more.
            ConnectError: It did not come in time, or the coordinator is gone.
        """
        until_s = None if deadline_s is None else self._now() + deadline_s
        with self.changed:
            while not (found := what(self.view)):
                self.check()
                if until_s is not None and self._now() > until_s:
                    raise ConnectError(f"the coordinator did not answer within {deadline_s:g} s; {why}")
                self.changed.wait(0.5)
            return found

    # -- connection

    def tick(self) -> None:
        """Send a heartbeat when due, and resend unacknowledged messages."""
        now_s = self._now()
        silence_s = now_s - self.view.heard_s
        if silence_s >= self._warn_s:
            self._warn_s *= 2
            self._warn(f"nothing was heard of the coordinator for {silence_s:.0f} s; waiting for it")
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + 1.0
            beat: dict[str, Any] = {
                "step": self.step,
                "step_s": round(self.step_s, 6),
                "roster": self.view.roster_number,
            }
            if relayed := self.activity.relayed_peers():
                beat["relayed"] = relayed
            self._send("beat", **beat)
            if self._tokens_s:
                work = {"steps_per_interval": self._steps_per_interval, "tokens_s": self._tokens_s, "loss": self._loss}
                self._send("work", **{name: round(value, 4) for name, value in work.items()})
            self._report_rates()
        with self.changed:
            due = [pending for pending in self._unanswered.values() if now_s - pending.at_s > _RESEND_S]
            for pending in due:
                pending.at_s = now_s
        for pending in due:
            self._send(pending.kind, **pending.fields)

    def _report_rates(self) -> None:
        self.link_rates.retain(self.active())
        if rates := self.link_rates.report():
            avoided = {one.replica for one in self.view.detours if one.source == self.replica}
            probes = self.link_rates.newest(avoided)
            self._send("rates", rates=rates, latest=self.link_rates.report(latest=LATEST), probes=probes)

    def receive(self, message: Message) -> None:
        """Process a message from the coordinator."""
        with self.changed:
            self.view.heard_s = self._now()
            self._warn_s = _WARN_S
            # other kinds are for other listeners, such as the answer to an admin command
            if (handler := _HANDLERS.get(message["kind"])) is not None:
                handler(self, message)
            self.changed.notify_all()

    def _on_roster(self, message: Message) -> None:
        found = {one["replica"]: Neighbour.of(one) for one in map(checked_member, message["members"])}
        self.view.neighbours = found
        if self.replica in found:
            self._unanswered.pop(("here", -1), None)
        self.view.has_started = message["started"]
        self.view.roster_number = message["number"]
        self._on_new_roster(found)

    def _on_notice(self, message: Message) -> None:
        """Take in a message that changes one field of the view."""
        view = self.view
        match message["kind"]:
            case "call":
                view.calls[message["round"]] = numbers(message["members"], what="those that are called")
            case "capture":
                view.captures.add(message["step"])
            case "account":
                view.accounts[message["step"]] = message["note"]
            case "pause":
                view.is_paused = message["paused"]
            case "leave":
                view.leave_why = message["why"] or "was told to leave"
            case "failed":
                view.failed_why = message["why"] or "the run has failed"
            case "unknown":
                view.expelled_why = view.expelled_why or "is not known to the coordinator any more"
            case "refused":
                view.refused_why = message["why"] or "no reason was given"
            case "finish":
                view.finish = message

    def _on_recorded(self, message: Message) -> None:
        pending = self._unanswered.get(("records", -1))
        if pending is not None and pending.fields["number"] <= message["number"]:
            del self._unanswered["records", -1]

    def _on_decision(self, message: Message) -> None:
        if message["round"] not in self.view.decisions:
            self.link_rates.count_round()
        self.view.decisions[message["round"]] = Decision(
            round_id=message["round"],
            launch_step=message["launch_step"],
            members=numbers(message["members"], what="the members of a mean"),
            holders=numbers(message["holders"], what="the holders of a mean's parts"),
            step=message["step"],
        )
        self._advance(message)

    def _on_progress(self, message: Message) -> None:
        self._advance(message)
        self.pace.observe(message["step"], now_s=self._now())
        self.view.floor_step = max(self.view.floor_step, message["floor"])
        self.view.kept_step = max(self.view.kept_step, message["kept"])
        oldest = self.view.floor_step - 2 * self.interval_steps
        for number in [number for number, found in self.view.decisions.items() if found.launch_step < oldest]:
            del self.view.decisions[number]

    def _on_pace(self, message: Message) -> None:
        self.pace.step_s = float(message["step_s"])
        self.view.sites = tuple(numbers(site, what="a site") for site in message["sites"])
        before = slow_sources(self.view.detours, replica=self.replica)
        self.view.detours = tuple(Detour.from_list(numbers(one, what="a detour")) for one in message["detours"])
        for source in slow_sources(self.view.detours, replica=self.replica) - before:
            # a slow link's reverse direction is measured again unless it is slow too: its receipts may have queued
            # behind the parts that came over the slow direction
            latest = self.link_rates.report(latest=LATEST)
            if latest.get(str(source), math.inf) * BEGINS > max(latest.values(), default=0):
                self.link_rates.forget(source)

    def _advance(self, message: Message) -> None:
        self.view.step = max(self.view.step, message["step"])
        self.view.closed_step = max(self.view.closed_step, message["closed"])

    def _on_state(self, message: Message) -> None:
        self._unanswered.pop(("here", -1), None)
        if message["root"] in FROM_NOBODY:  # decisions after that state concern replicas that are gone
            self.view.decisions.clear()
        offer = StateOffer(
            step=message["step"], root=message["root"], num_bytes=message["bytes"],
            holders=numbers(message["holders"], what="the holders of a state"), note=message["note"],
            era=message["era"],
        )  # fmt: skip
        self.view.offers[offer.step] = offer
        for step in sorted(self.view.offers)[:-8]:
            del self.view.offers[step]
        self.view.era = offer.era
        # a state being fetched is not replaced by a newer one: the fetch would never end
        if self.view.offer is None or self.view.offer.step == offer.step:
            self.view.offer = offer

    def _on_verify(self, message: Message) -> None:
        for verify in self.verifiers:
            verify(message["round"], message["member"])

    def _on_anew(self, message: Message) -> None:
        """Forget all decisions: no replica holds that state any more, and the run continues from an earlier one."""
        self.view.decisions.clear()
        self.view.calls.clear()
        self.pace.reset()
        self.view.step = self.view.closed_step = self.view.floor_step = self.view.kept_step = 0

    def _on_leased(self, message: Message) -> None:
        self._unanswered.pop(("lease", message["number"]), None)
        self.view.leases[message["number"]] = message["shard"], message["start"]

    def _on_expelled(self, message: Message) -> None:
        self.view.expelled_why = message["why"] or "was removed"
        self.view.has_bad_parts = message["has_bad_parts"]


_HANDLERS: Mapping[str, Callable[[CoordinatorSession, Message], None]] = {
    "roster": CoordinatorSession._on_roster,
    "recorded": CoordinatorSession._on_recorded,
    "decision": CoordinatorSession._on_decision,
    "progress": CoordinatorSession._on_progress,
    "pace": CoordinatorSession._on_pace,
    "verify": CoordinatorSession._on_verify,
    "state": CoordinatorSession._on_state,
    "anew": CoordinatorSession._on_anew,
    "leased": CoordinatorSession._on_leased,
    "expelled": CoordinatorSession._on_expelled,
    **dict.fromkeys(
        ("call", "capture", "account", "pause", "leave", "failed", "unknown", "refused", "finish"),
        CoordinatorSession._on_notice,
    ),
}
