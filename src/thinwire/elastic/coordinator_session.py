"""A replica's seat among the others: it learns what the coordinator says, and says its own until it is answered."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.elastic.adaptive_local_steps import PeerPace
from thinwire.elastic.adaptive_timeout import Patience
from thinwire.elastic.coordinator_view import CoordinatorView, Neighbour, StateOffer
from thinwire.elastic.protocol import FROM_NOBODY, RUN_OVER, Message, checked_member, numbers
from thinwire.elastic.rounds import Decision
from thinwire.elastic.routing import BEGINS, Detour
from thinwire.elastic.site_topology import LATEST, LinkRates
from thinwire.elastic.source_selection import slow_sources
from thinwire.errors import ConnectError, DroppedNonFinite, Expelled, NonFiniteError, RunOver

_RESEND_S = 2.0
# Its supervisor starts a coordinator that died again within seconds; its host may take minutes to come back.
_WARN_S, GONE_S = 30.0, 1800.0
_LEAST_TRANSFER_S, _MOST_TRANSFER_S = 2.0, 60.0
_LEAST_RELAY_S, _MOST_RELAY_S = 0.5, 20.0


@dataclass(slots=True)
class _PendingMessage:
    """What must be pending again until it is answered."""

    kind: str
    fields: dict[str, Any]
    at_s: float


def _discard(text: str) -> None:
    """Tell nobody."""


class CoordinatorSession:
    """A replica's seat among the others; safe between threads.

    Args:
        replica: This one's number.
        interval_steps: H, inner steps; decisions are kept for two of them.
        say: Sends a message to the coordinator.
        meet: Told of the neighbours whenever they change.
        warn: Told, now and then, that the coordinator has not been heard of.
        now: Gives seconds that only grow.

    Attributes:
        changed: Notified whenever something is new; held while `view` is read.
        view: What is known.
        transfers: How long parts take to come once a round was called.
        quiet: Tells from whom nothing comes just now.
        is_busy: Tells whether this replica's link is busy with what comes.
        bearable_steps: For so many steps a round's parts may be on their way without anybody waiting for its result.
        last_step: The run's last inner step.
        lacking: By decided round, how many of its parts are not here yet.
        others: When the others launch.
        rates: How fast this replica's answers reach the others.
        relayed: How long parts take to come by way of another replica.
    """

    def __init__(
        self, *, replica: int, interval_steps: int, send: Callable[..., None],
        on_roster: Callable[[Mapping[int, Neighbour]], None] = lambda neighbours: None,
        warn: Callable[[str], None] = _discard,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.replica = replica
        self.interval_steps = interval_steps
        self.changed = threading.Condition(threading.RLock())
        self.view = CoordinatorView(heard_s=now())
        self.transfer_timeout = Patience(least_s=_LEAST_TRANSFER_S, most_s=_MOST_TRANSFER_S)
        self.step = 0
        self.step_s = 0.0
        self.steps_per_interval = self.tokens_s = self.loss = 0.0
        self.pace = PeerPace()
        self.link_rates = LinkRates()
        self.relay_timeout = Patience(least_s=_LEAST_RELAY_S, most_s=_MOST_RELAY_S)
        self.used: dict[int, int] = {}
        self.quiet: Callable[[], Collection[int]] = frozenset
        self.is_busy: Callable[[], bool] = bool
        self.overdue_steps, self.last_step = 0.0, math.inf
        self.missing_parts: dict[int, int] = {}
        self._now = now
        self._send = send
        self._on_new_roster = on_roster
        self._warn = warn
        self._warn_s = _WARN_S
        self._unanswered: dict[tuple[str, int], _PendingMessage] = {}
        self._next_beat_s = 0.0

    # -- what the engine asks

    def active(self) -> tuple[int, ...]:
        """Return the replicas that take part in rounds, this one among them."""
        with self.changed:
            found = {one.replica for one in self.view.neighbours.values() if one.is_active}
            return tuple(sorted(found | {self.replica}))

    def check(self) -> None:
        """See whether this replica still takes part.

        Raises:
            Expelled: It does not.
            DroppedNonFinite: It does not, because its parts held NaN or infinity.
            RunOver: The run has come to its end without it.
            NonFiniteError: The parts of all replicas hold NaN or infinity, so the run has failed.
            ConnectError: The coordinator has been gone for so long that nobody will decide anything any more.
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
        if self.view.is_non_finite:
            raise DroppedNonFinite(
                f"replica {self.replica} {self.view.expelled_why}; it joins again and fetches the state of the others"
            )
        if self.view.expelled_why:
            raise Expelled(f"replica {self.replica} {self.view.expelled_why}; it joins again")

    def launch(self, round_id: int, *, launch_step: int) -> None:
        """Say that this replica's part of a round is there for others to fetch."""
        used = {str(shard): windows for shard, windows in self.used.items()}
        self._send_reliably("launch", round_id, step=launch_step, used=used)

    def withhold(self, round_id: int, *, launch_step: int, parts: int) -> None:
        """Report that this replica's part of a round holds NaN or infinity and is not offered.

        Args:
            round_id: The round.
            launch_step: The step that it is launched at.
            parts: How many such parts in a row there have been, this one among them.
        """
        used = {str(shard): windows for shard, windows in self.used.items()}
        self._send_reliably("withhold", round_id, step=launch_step, used=used, parts=parts)

    def vote(self, round_id: int, *, has: tuple[int, ...], reference_hash: int) -> None:
        """Say which parts of a round this replica holds."""
        self._send_reliably("vote", round_id, step=self.step, has=list(has), hash=reference_hash)

    def settle(self, round_id: int) -> None:
        """Say no more about a round."""
        with self.changed:
            self._unanswered.pop(("launch", round_id), None)
            self._unanswered.pop(("withhold", round_id), None)
            self._unanswered.pop(("vote", round_id), None)
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
        self._send_reliably("lease", number, number=number)

    def account(self, step: int, *, deadline_s: float) -> Mapping[str, Any] | None:
        """Return the account of the data at a step; None where the coordinator does not answer in time."""
        self._send_reliably("account", step, step=step)
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
        """Say something that needs no answer."""
        self._send(kind, **fields)

    def send_reliably(self, kind: str, **fields: Any) -> None:
        """Say something again and again until `done_with`."""
        self._send_reliably(kind, -1, **fields)

    def stop_resending(self, kind: str) -> None:
        """Say it no more."""
        with self.changed:
            self._unanswered.pop((kind, -1), None)

    def is_acknowledged(self, kind: str) -> bool:
        """Tell whether what was insisted on has been answered."""
        with self.changed:
            return (kind, -1) not in self._unanswered

    def wait_for(self, what: Callable[[CoordinatorView], Any], *, deadline_s: float | None, why: str) -> Any:
        """Wait until something is known.

        Args:
            what: Looks at the view; what it returns ends the wait where it is true.
            deadline_s: Seconds, None for as long as the coordinator is heard of.
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

    # -- what the line does

    def tick(self) -> None:
        """Beat, and say again what was not answered."""
        now_s = self._now()
        self._warn_of_silence(now_s - self.view.heard_s)
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + 1.0
            self._send("beat", step=self.step, step_s=round(self.step_s, 6), roster=self.view.roster_number)
            if self.tokens_s:
                work = {"steps_per_interval": self.steps_per_interval, "tokens_s": self.tokens_s, "loss": self.loss}
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
            self._send("rates", rates=rates, latest=self.link_rates.report(latest=LATEST))

    def _warn_of_silence(self, silence_s: float) -> None:
        if silence_s >= self._warn_s:
            self._warn_s *= 2
            self._warn(f"nothing was heard of the coordinator for {silence_s:.0f} s; waiting for it")

    def receive(self, message: Message) -> None:
        """Take in a message of the coordinator."""
        with self.changed:
            self.view.heard_s = self._now()
            self._warn_s = _WARN_S
            getattr(self, f"_on_{message['kind']}", self._ignore)(message)
            self.changed.notify_all()

    def _send_reliably(self, kind: str, key: int, **fields: Any) -> None:
        full = {"round": key, **fields} if kind in ("launch", "withhold", "vote") else fields
        with self.changed:
            self._unanswered[kind, key] = _PendingMessage(kind, full, self._now())
        self._send(kind, **full)

    def _ignore(self, message: Message) -> None:
        """Leave to others what is for them, such as the answer to a person's command."""

    def _on_roster(self, message: Message) -> None:
        found = {one["replica"]: Neighbour.of(one) for one in map(checked_member, message["members"])}
        self.view.neighbours = found
        if self.replica in found:
            self._unanswered.pop(("here", -1), None)
        self.view.has_started = message["started"]
        self.view.roster_number = message["number"]
        self._on_new_roster(found)

    def _on_call(self, message: Message) -> None:
        self.view.calls[message["round"]] = numbers(message["members"], what="those that are called")

    def _on_recorded(self, message: Message) -> None:
        pending = self._unanswered.get(("records", -1))
        if pending is not None and pending.fields["number"] <= message["number"]:
            del self._unanswered["records", -1]

    def _on_decision(self, message: Message) -> None:
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
        old = [number for number, found in self.view.decisions.items() if self._is_old(found)]
        for number in old:
            del self.view.decisions[number]

    def _on_pace(self, message: Message) -> None:
        self.pace.step_s = float(message["step_s"])
        self.view.sites = tuple(numbers(site, what="a site") for site in message["sites"])
        before = slow_sources(self.view.detours, replica=self.replica)
        self.view.detours = tuple(Detour.from_list(numbers(one, what="a detour")) for one in message["detours"])
        for source in slow_sources(self.view.detours, replica=self.replica) - before:
            self._distrust_rate(source)

    def _distrust_rate(self, source: int) -> None:
        """Measure the way back of a slow wire anew, unless it is slow too: receipts waited behind what came over it."""
        latest = self.link_rates.report(latest=LATEST)
        rate = latest.get(str(source))
        if rate is None or rate * BEGINS > max(latest.values()):
            self.link_rates.forget(source)

    def _is_old(self, decision: Decision) -> bool:
        return decision.launch_step + 2 * self.interval_steps < self.view.floor_step

    def _advance(self, message: Message) -> None:
        self.view.step = max(self.view.step, message["step"])
        self.view.closed_step = max(self.view.closed_step, message["closed"])

    def _on_capture(self, message: Message) -> None:
        self.view.captures.add(message["step"])

    def _on_state(self, message: Message) -> None:
        self._unanswered.pop(("here", -1), None)
        if message["root"] in FROM_NOBODY:  # what was decided after that state is for those that are gone
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
        # one that is being fetched is not left for a newer one: it would never come to an end
        if self.view.offer is None or self.view.offer.step == offer.step:
            self.view.offer = offer

    def _on_account(self, message: Message) -> None:
        self.view.accounts[message["step"]] = message["note"]

    def _on_anew(self, message: Message) -> None:
        """Forget what was decided: nobody holds that state any more, and the run goes on from an earlier one."""
        self.view.decisions.clear()
        self.view.calls.clear()
        self.pace.reset()
        self.view.step = self.view.closed_step = self.view.floor_step = self.view.kept_step = 0

    def _on_leased(self, message: Message) -> None:
        self._unanswered.pop(("lease", message["number"]), None)
        self.view.leases[message["number"]] = message["shard"], message["start"]

    def _on_pause(self, message: Message) -> None:
        self.view.is_paused = message["paused"]

    def _on_leave(self, message: Message) -> None:
        self.view.leave_why = message["why"] or "was told to leave"

    def _on_expelled(self, message: Message) -> None:
        self.view.expelled_why = message["why"] or "was let go"
        self.view.is_non_finite = message["is_non_finite"]

    def _on_failed(self, message: Message) -> None:
        self.view.failed_why = message["why"] or "the run has failed"

    def _on_unknown(self, message: Message) -> None:
        self.view.expelled_why = self.view.expelled_why or "is not known to the coordinator any more"

    def _on_refused(self, message: Message) -> None:
        self.view.refused_why = message["why"] or "no reason was given"

    def _on_finish(self, message: Message) -> None:
        self.view.finish = message
