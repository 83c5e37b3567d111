"""One stay of a process in a modelled run: what `RoundDriver`, `StateKeeper` and the training loop do there.

The session, the machines and the seat are the real ones. A global state is the row of the means that made it.
"""

import zlib
from typing import Any, Protocol

from life_parts import Flight, Means, Person, root_of
from model import NoLock, meet

from thinwire.elastic.coordinator_session import CoordinatorSession, CoordinatorView, StateOffer
from thinwire.elastic.protocol import FROM_NOBODY, Message
from thinwire.elastic.round_driver import (
    CastVote,
    GiveUp,
    ReplicaRounds,
    RequestPart,
    RoundInputs,
    RoundStateMachine,
    blob_name,
)
from thinwire.errors import Expelled, RunOver
from thinwire.events import FIRST_LAST_ROUND
from thinwire.training.elastic.states import held_offer

INTERVAL, OVERLAP, SHARD = 2, 1, 2
# Further behind than this a replica passes over what it lacks.
PATIENCE_STEPS = 1


class Around(Protocol):
    """What a life sees of its world."""

    last_step: int
    every: int
    states: dict[str, tuple[int, Means]]

    def now(self) -> float: ...

    def say(self, life: "Life", kind: str, **fields: Any) -> None: ...

    def life_of(self, number: int) -> "Life | None": ...

    def launched(self, life: "Life", round_id: int) -> None: ...

    def gives_up(self, life: "Life", round_id: int, member: int) -> None: ...


class Life:
    """See the module; `phase` tells how far it has come."""

    def __init__(self, world: Around, person: Person, token: bytes) -> None:
        self.world, self.person, self.token = world, person, token
        self.phase, self.why, self.is_alive = "joining", "", True
        self.number = -1
        self.session: CoordinatorSession
        self.early: list[Message] = []
        self.offer: StateOffer | None = None
        self.is_from_held = self.has_kept = False
        self.step, self.means = 0, Means()
        self.flights: dict[int, Flight] = {}
        self.blobs: dict[tuple[int, int], int] = {}
        self.let_go: set[tuple[int, int]] = set()
        self.shown: dict[int, str] = {}
        self.used: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.lease, self.shard = -1, -1
        self.next_kept = 0

    @property
    def is_here(self) -> bool:
        return self.is_alive and self.phase not in ("expelled", "ended")

    @property
    def has_session(self) -> bool:
        return self.phase != "joining" and self.number >= 0

    # -- words

    def hear(self, message: Message) -> None:
        """Do what `_Greeting` does, and then the session."""
        if self.has_session:
            self.session.receive(message)
        elif message["kind"] == "welcome":
            self._sit_down(message["replica"])
        elif message["kind"] == "refused":
            self.end(message["why"])
        else:
            self.early.append(message)

    def _sit_down(self, number: int) -> None:
        self.number = number
        session = self.session = CoordinatorSession(
            replica=number, interval_steps=INTERVAL, send=Mouth(self), on_roster=meet, now=self.world.now
        )
        session.changed = NoLock()  # type: ignore[assignment]
        session.report_work(step_s=1.0)
        session.track_windows(self.used)
        self.seat = ReplicaRounds(session, Shelf(self))
        self.phase = "arriving"
        for message in self.early:
            session.receive(message)
        step, era, _ = self.person.held or (0, 0, ())
        session.send_reliably("here", address="127.0.0.1", port=1, corpus="c", windows=9, held=step, era=era, disk=0)

    def end(self, why: str) -> None:
        """End for good, and be told why."""
        self.phase, self.why, self.person.has_left = "ended", why, True
        self.world.say(self, "leave", why=why)

    def _fall_out(self, why: str) -> None:
        """Join again in another life."""
        self.phase, self.why = "expelled", why
        if self.is_from_held and not self.has_kept:
            self.person.held = None
        self.world.say(self, "leave", why=why)

    # -- what follows by itself

    def move(self) -> None:
        """Do all that needs no time and no choice."""
        if not self.is_here or not self.has_session:
            return
        view = self.session.view
        try:
            self.session.check()
        except RunOver as over:
            self.end(str(over))
            return
        except Expelled as expelled:
            self._fall_out(str(expelled))
            return
        if view.refused_why:
            self.end(view.refused_why)
        else:
            self._move_on(view)

    def _move_on(self, view: CoordinatorView) -> None:
        if self.phase == "arriving" and view.has_started and view.offer:
            self.offer, self.phase = view.offer, "loading"
            self._announce_fetch()
        elif self.phase == "lost":
            self._seek_another(view)
        elif self.phase == "waiting" and self.number in view.neighbours and view.neighbours[self.number].is_active:
            self.session.stop_resending("active")
            self.phase = "training"
            self._take_part_in_what_is_in_flight()
        elif self.phase == "done" and view.finish:
            self.session.stop_resending("done")
            self.end("finish")
        elif self.phase in ("training", "last"):
            self._move_flights()

    def _seek_another(self, view: CoordinatorView) -> None:
        self.offer = held_offer(view)
        if self.offer is not None and self.offer.root in FROM_NOBODY:
            self._fall_out("goes on from a disk")
        elif self.offer is not None:
            self.phase = "loading"
            self._announce_fetch()

    def _announce_fetch(self) -> None:
        assert self.offer is not None
        if self.offer.holders:
            self.session.reach(self.offer.step)

    def _move_flights(self) -> None:
        for round_id, flight in list(self.flights.items()):
            self._move_flight(round_id, flight)
            if self.phase == "expelled":
                return
        due = FIRST_LAST_ROUND + self.step if self.phase == "last" else self._due(self.step)
        if due in self.flights and self._land(due):
            if self.phase == "last":
                self.phase = "done"
                self.session.send_reliably("done", note={"n": self.number})
            else:
                self._look(self.step)
        if self.phase == "training" and self.step < self.world.last_step and not self._has_data():
            self.session.ask_lease(self.lease + 1)

    def _move_flight(self, round_id: int, flight: Flight) -> None:
        """Do what `RoundDriver._move` does."""
        view, now_s = self.session.view, self.world.now()
        flight.decision = flight.decision or view.decisions.get(round_id)
        if flight.decision is not None:
            self.session.settle(round_id)
        seen = RoundInputs(
            called=view.calls.get(round_id), decision=flight.decision, active=self.session.active(),
            neighbours=tuple(view.neighbours), limit_s=self.session.transfer_timeout.limit_s,
        )  # fmt: skip
        for _ in range(8):  # a part comes at once, and then there is more to do
            actions = flight.machine.advance(seen, now_s=now_s)
            for action in actions:
                match action:
                    case RequestPart(source=source, member=member):
                        flight.asked.add((member, source))
                    case CastVote(has=has):
                        self.session.vote(round_id, has=has, reference_hash=flight.reference)
                    case GiveUp(member=member):
                        self.world.gives_up(self, round_id, member)
                        self.session.send("stuck", round=round_id, why="nobody gives it")
                        self._fall_out("stuck")
                        return
            if not self._pull(round_id, flight) and not actions:
                return

    def _pull(self, round_id: int, flight: Flight) -> bool:
        """Take in what comes; tell whether anything did."""
        has_come = False
        for member, asked in sorted(flight.asked):
            source = self.world.life_of(asked)
            found = None if source is None or not source.is_here else source.blobs.get((round_id, member))
            if found == flight.reference:
                flight.machine.on_part(member)
                flight.parts[member] = self.blobs[round_id, member] = found
                flight.asked = {one for one in flight.asked if one[0] != member}
                has_come = True
            elif found is not None or source is None or not source.is_here or source.has_forgotten(round_id, member):
                flight.machine.on_failure(member, now_s=self.world.now(), source=asked)
                flight.asked.discard((member, asked))
        return has_come

    def has_forgotten(self, round_id: int, member: int) -> bool:
        return self.seat.is_past(blob_name(round_id, member))

    # -- steps

    def _due(self, step: int) -> int | None:
        """Return the round that is applied at a step."""
        launch = step - OVERLAP
        return launch // INTERVAL - 1 if launch > 0 and launch % INTERVAL == 0 else None

    def can_go(self) -> bool:
        """Tell whether it has something to do of its own."""
        if not self.is_here or not self.has_session:
            return False
        if self.phase == "loading":
            return self._fetched() is not None
        view = self.session.view
        if self.phase != "training" or self._due(self.step) in self.flights:
            return False
        return bool(view.leave_why) or (not view.is_paused and self._may_step())

    def go(self) -> None:
        """Do it."""
        if self.phase == "loading":
            self._take_in()
        elif self.session.view.leave_why:
            self.end(self.session.view.leave_why)
        elif self.step == self.world.last_step:
            self._say_last()
        else:
            self._train()

    def _fetched(self) -> "tuple[str, Life | None] | None":
        """Return what a fetch comes to now, None where it goes on."""
        assert self.offer is not None
        if not self.offer.root.isalnum() or len(self.offer.root) < 64:
            return "alone", None
        view = self.session.view
        newest = view.offers.get(self.offer.step, self.offer)
        present = [self.world.life_of(one) for one in newest.holders if one in view.neighbours]
        if not present:
            return "nobody", None
        for holder in present:
            if holder is not None and holder.is_here and holder.shown.get(self.offer.step) == self.offer.root:
                return "held", holder
        return None

    def _take_in(self) -> None:
        found, offer = self._fetched(), self.offer
        assert found is not None and offer is not None
        if found[0] == "nobody":
            self.session.view.offers.pop(offer.step, None)
            self.phase = "lost"
            return
        if offer.root == "own":
            if self.person.held is None or self.person.held[0] != offer.step:
                self._fall_out("holds no such state")
                return
            self.step, _, self.means = self.person.held
            self.is_from_held = True
        elif offer.root == "disk":
            self.step, self.means = self.person.disk or (0, ())
        elif offer.root != "seed":
            self.step, self.means = self.world.states[offer.root]
        self.session.reach(self.step)
        self.phase = "waiting"
        self.session.send_reliably("active", step=self.step)

    def _may_step(self) -> bool:
        """Tell whether the next step can be done: there is data for it, or it is passed over."""
        if self.step == self.world.last_step:
            return all(self._is_there(flight) for flight in self.flights.values())
        return self._passes() or self._has_data() or self.lease + 1 in self.session.view.leases

    def _has_data(self) -> bool:
        return self.shard >= 0 and self.used[self.shard] < SHARD

    def _passes(self) -> bool:
        return self.session.view.step - self.step > PATIENCE_STEPS

    def _train(self) -> None:
        if not self._passes():
            self._use_window()
        self.step += 1
        self.session.reach(self.step)
        if self.step % INTERVAL == 0:
            self._launch(self.step // INTERVAL - 1)
        if self._due(self.step) is None:
            self._look(self.step)

    def _take_part_in_what_is_in_flight(self) -> None:
        """Do what `Engine.begin_at` does."""
        if self.step and self.step % INTERVAL == 0:
            self._launch(self.step // INTERVAL - 1)

    def _use_window(self) -> None:
        if self.shard < 0 or self.used[self.shard] == SHARD:
            self.lease += 1
            self.shard, start = self.session.view.leases[self.lease]
            self.used[self.shard] = self.starts[self.shard] = start
        self.used[self.shard] += 1

    def _say_last(self) -> None:
        """Flush, then give the last word."""
        for number in sorted(self.flights):
            self._land(number)
        self._launch(FIRST_LAST_ROUND + self.step)
        self.phase = "last"

    def _launch(self, round_id: int) -> None:
        self.seat._forget_old()
        self.seat._kept[round_id] = self.step
        reference = zlib.crc32(repr(self.means).encode())
        is_offered = round_id not in self.session.view.decisions
        machine = RoundStateMachine(replica=self.number, has_part=is_offered)
        flight = self.flights[round_id] = Flight(launch_step=self.step, machine=machine, reference=reference)
        if is_offered:
            flight.parts[self.number] = self.blobs[round_id, self.number] = reference
            self.world.launched(self, round_id)
            self.session.launch(round_id, launch_step=self.step)

    def _is_there(self, flight: Flight) -> bool:
        return flight.decision is not None and not flight.machine.num_lacking(flight.decision)

    def _land(self, round_id: int) -> bool:
        """Apply a round whose parts are all there."""
        flight = self.flights[round_id]
        if not self._is_there(flight):
            return False
        assert flight.decision is not None
        self.session.settle(round_id)
        self.means += ((round_id, tuple((one, flight.parts[one]) for one in flight.decision.members)),)
        del self.flights[round_id]
        return True

    def _look(self, step: int) -> None:
        """Do what `StateKeeper._look` does."""
        view = self.session.view
        wanted = step in view.captures
        missed = sorted(cut for cut in view.captures if cut < step)
        view.captures -= {step, *missed}
        for cut in missed:
            if cut in self.shown:
                self.session.send("captured", step=cut, root=self.shown[cut], bytes=1)
            else:
                self.session.send("missed", step=cut)
        is_due = step % self.world.every == 0
        if wanted or is_due:
            self.shown[step] = root_of(step, self.means)
            self.world.states[self.shown[step]] = step, self.means
            self.session.send("captured", step=step, root=self.shown[step], bytes=1)
        if is_due:
            self.person.disk = step, self.means
        if step < self.world.last_step and step >= self.next_kept:
            self.person.held = step, view.era, self.means
            self.has_kept, self.next_kept = True, step + INTERVAL


class Shelf:
    """A life's blobs, as its seat lets go of them."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def forget_past(self) -> None:
        for key in [key for key in self._life.blobs if self._life.seat.is_past(blob_name(*key))]:
            del self._life.blobs[key]
            self._life.let_go.add(key)


class Mouth:
    """What a session says goes into its life's connection."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def __call__(self, kind: str, **fields: Any) -> None:
        self._life.world.say(self._life, kind, **fields)
