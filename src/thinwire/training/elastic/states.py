"""Global states at one replica: published for joiners, written to disk, and loaded when it joins.

A joiner fetches the parameters first. The outer optimizer's state is as large or larger, and is needed only when a
round is applied. Where training continues while rounds are overdue, it arrives meanwhile.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from thinwire.elastic.coordinator_session import CoordinatorView, StateOffer
from thinwire.elastic.global_state import GlobalState, non_finite, pack, unpack, unpack_parameters
from thinwire.elastic.join import Membership
from thinwire.elastic.protocol import FROM_NOBODY
from thinwire.elastic.replica_state import (
    global_tensors,
    load_global_parameters,
    load_global_tensors,
    load_outer,
    most_state_bytes,
)
from thinwire.elastic.state_transfer import StateTransfer, publish_state, withdraw_state
from thinwire.errors import CheckpointError, ConnectError, Expelled, NotThere, Refused, RunOver, ThinwireError
from thinwire.runlog.run_identity import RunIdentity
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.sync.round_engine import RoundEngine
from thinwire.training.checkpoints.global_checkpoints import GlobalCheckpoints, Latest
from thinwire.training.config import TrainConfig
from thinwire.training.elastic.local_snapshot import HeldState, LocalSnapshot, newest_snapshot
from thinwire.units import format_bytes

_NOTE_S = 20.0
_KEPT = 2
# Seconds without a request after which a state is withdrawn; a joiner gives up after 60 s without a chunk.
_UNWANTED_S, _LOOK_S = 150.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointPolicy:
    """Place and steps of a replica's checkpoints.

    Attributes:
        checkpoints: Where states are written; None for nowhere.
        every: Steps between two checkpoints, None or 0 for none but the last.
        last_step: The run's last step.
        is_shared: Whether all replicas write to the same place, so that only the one with the lowest number does.
    """

    checkpoints: GlobalCheckpoints | None
    every: int | None
    last_step: int
    is_shared: bool = False

    def is_due(self, step: int) -> bool:
        return bool(self.every and step % self.every == 0) or step == self.last_step


class StateKeeper:
    """Copies the global state when a joiner needs it or a checkpoint is due; a thread publishes and writes it.

    `kept` takes this replica's own state, once an interval.
    """

    def __init__(
        self, membership: Membership, *, model: nn.Module, optimizer: DistributedOptimizer,
        policy: CheckpointPolicy, warn: Callable[[str], None], kept: LocalSnapshot | None = None,
    ) -> None:  # fmt: skip
        self._kept = kept
        self._policy = policy
        self._membership = membership
        self._model = model
        self._optimizer = optimizer
        self._warn = warn
        self._published: dict[int, tuple[bytes, int]] = {}
        self._published_s = 0.0
        self._begun: set[int] = set()
        self.has_kept = False  # whether this replica has begun to write a state of its own
        self._tasks: queue.SimpleQueue[tuple[GlobalState, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="thinwire-states", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join(timeout=60)
        if self._kept is not None:
            self._kept.close()
        if self._policy.checkpoints is not None:
            self._policy.checkpoints.wait(60)

    def on_exchanged(self, step: int) -> None:
        """Copy the state where it is wanted; called between two steps, when it is the same on all replicas."""
        session = self._membership.session
        session.reach(step)
        with session.changed:
            wanted = step in session.view.captures
            missed = [cut for cut in session.view.captures if cut < step]
            session.view.captures -= {step, *missed}
        for cut in missed:  # captured or missed, unless it is still being captured
            if cut in self._published:
                root, num_bytes = self._published[cut]
                session.send("captured", step=cut, root=root.hex(), bytes=num_bytes)
            elif cut not in self._begun:
                session.send("missed", step=cut)
        is_due = self._policy.is_due(step)
        if wanted or (is_due and self._policy.checkpoints is not None):
            parameters, outer = global_tensors(self._optimizer.engine, self._model)
            state = GlobalState(step=step, parameters=parameters, outer=outer)
            if bad := non_finite(state):
                self._warn(f"the state of step {step} is not kept: {bad} holds NaN or infinity")
                session.send("missed", step=step)
            else:
                self._begun.add(step)
                self._tasks.put((state, is_due))
        if self._kept is not None and step < self._policy.last_step:
            self.has_kept |= self._kept.offer(
                step, era=session.view.era, every=session.interval_steps, model=self._model, optimizer=self._optimizer
            )

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_LOOK_S)
            except queue.Empty:
                # withdraw states that no replica fetches: each is as large as the parameters and the outer momenta
                since_s = min(time.monotonic() - self._published_s, self._membership.library.bulk_unwanted_s)
                for step in [*self._published] if since_s > _UNWANTED_S else []:
                    self._withdraw(step)
                continue
            if task is None:
                return
            state, is_due = task
            try:
                self._publish(state)
                is_writer = not self._policy.is_shared or self._membership.replica == min(
                    self._membership.session.active()
                )
                if is_due and is_writer and self._policy.checkpoints is not None:
                    self._write(state)
            except RunOver:
                return  # no replica needs it any more
            except (ThinwireError, ValueError, OSError, MemoryError) as error:
                self._warn(f"the state of step {state.step} could not be kept: {error}")

    def _publish(self, state: GlobalState) -> None:
        if state.step in self._published:
            return
        vector = pack(state)
        root = publish_state(self._membership.library, state_name(state.step), vector)
        self._published[state.step] = root, vector.numel()
        self._published_s = time.monotonic()
        self._membership.session.send("captured", step=state.step, root=root.hex(), bytes=vector.numel())
        for old in sorted(self._published)[:-_KEPT]:
            if old < self._membership.session.view.floor_step:
                self._withdraw(old)

    def _withdraw(self, step: int) -> None:
        _, num_bytes = self._published.pop(step)
        self._begun.discard(step)
        withdraw_state(self._membership.library, state_name(step), num_bytes=num_bytes)

    def _write(self, state: GlobalState) -> None:
        """Write a checkpoint with the coordinator's account of the data."""
        assert self._policy.checkpoints is not None
        try:
            offer: StateOffer = self._membership.session.wait_for(
                lambda view: view.offers.get(state.step), deadline_s=_NOTE_S,
                why="the checkpoint has no account of the data",
            )  # fmt: skip
            note = {**offer.note, "era": offer.era}
        except (ConnectError, Expelled):
            note = {}
        full = GlobalState(step=state.step, parameters=state.parameters, outer=state.outer, note=note)
        self._policy.checkpoints.save(full, copy=False)


def checkpoints_of(
    config: TrainConfig, *, run: RunIdentity | None, warn: Callable[[str], None] | None = None
) -> GlobalCheckpoints:
    """Return a run's checkpoints on this host, or under its URL."""
    place = config.elastic.checkpoint_to or config.run_dir / "checkpoints"
    return GlobalCheckpoints(place, keep_last=config.elastic.keep_checkpoints, run=run, on_warning=warn)


def newest_state(
    config: TrainConfig, *, run: RunIdentity, report: Callable[[str], None]
) -> tuple[GlobalState | None, bool]:
    """Return the newest global state of a run that this host can read, and whether a replica kept it.

    Raises:
        ForeignCheckpoint: Checkpoints of another run lie there; names both.
        CheckpointError: There are checkpoints and none verifies.
    """
    latest, kept = _latest(checkpoints_of(config, run=run), report), newest_snapshot(config.run_dir, run=run)
    is_kept = kept.order > latest.order
    return kept.state if is_kept else latest.state, is_kept


def _latest(checkpoints: GlobalCheckpoints, report: Callable[[str], None]) -> Latest:
    latest = checkpoints.latest()
    for warning in latest.warnings:
        report(warning)
    return latest


def take_in(
    offer: StateOffer, *, membership: Membership, model: nn.Module, optimizer: DistributedOptimizer,
    checkpoints: GlobalCheckpoints | None, held: HeldState | None = None, report: Callable[[str], None],
    may_begin_early: bool = False,
) -> tuple[int, IncomingState | None]:  # fmt: skip
    """Begin from a state: fetched from others, from this host's disk, the replica's own, or from the seed.

    With `may_begin_early` the outer optimizer's memory may come after the parameters: training goes on while rounds are
    overdue.

    Returns:
        The step to go on from, and the state of which some is still on its way.
    """
    if offer.root == "seed":
        return 0, None
    is_held = held is not None and held.step == offer.step
    if offer.root == "own" and not is_held:
        raise Expelled(f"was to go on from a state of its own of step {offer.step}, and holds none; joining again")
    if held is not None and is_held and offer.root in ("own", "disk"):  # on disk the same, without the inner moments
        held.take_in(model=model, optimizer=optimizer)
        whose = "its own state" if offer.root == "own" else "the checkpoint"
        report(f"going on from {whose} of step {held.step}" + ", as this host holds it" * (offer.root == "disk"))
        return held.step, None
    if offer.root == "disk":
        state = None
        if checkpoints is not None:
            state = checkpoints.load(offer.step) if offer.step else _latest(checkpoints, report).state
        if state is None:
            report("there is no checkpoint on this host; starting from the seed")
            return 0, None
        if bad := non_finite(state):
            raise CheckpointError(
                f"{bad} of the checkpoint of step {state.step} holds NaN or infinity; delete it, and resume from the "
                f"one before it"
            )
        report(f"going on from the checkpoint of step {state.step}")
        if state.step:
            load_global_tensors(optimizer.engine, model, dict(state.parameters), dict(state.outer))
        return state.step, None
    coming, parameters = fetch(
        offer, membership=membership, most_bytes=most_state_bytes(model), report=report, may_begin_early=may_begin_early
    )
    load_global_parameters(optimizer.engine, model, parameters)
    membership.session.reach(coming.step)
    return coming.step, coming


_HOLDER_POLL_S = 0.2
_FIRST_POLL_S = 0.05
# A state may be large and its wire thin: what ends a fetch is that nothing comes, not that it takes long.
_FETCH_S, _STALL_S = 7 * 24 * 3600.0, 60.0
# Intervals within which the rest must arrive: a replica that applies no round for eight is removed.
_MOST_LATE_INTERVALS = 3.0


def state_name(step: int) -> bytes:
    """Return the name under which a state is published."""
    return b"s%d" % step


def held_offer(view: CoordinatorView) -> StateOffer | None:
    """Return the newest state that a connected replica holds, or that needs no holder."""
    present = set(view.neighbours)
    held = [offer for offer in view.offers.values() if offer.root in FROM_NOBODY or set(offer.holders) & present]
    return max(held, key=lambda offer: offer.step, default=None)


def fetch(
    offer: StateOffer, *, membership: Membership, most_bytes: int, report: Callable[[str], None],
    may_begin_early: bool = False,
) -> tuple[IncomingState, dict[str, Tensor]]:  # fmt: skip
    """Fetch a state's parameters; where all that hold it go, a newer one's.

    Returns:
        The state, of which the rest may come later with `may_begin_early`, and its global parameters by name.

    Raises:
        Expelled: It could not be had; this replica joins again.
        Refused: It is larger than a state of this model can be.
        ThinwireError: The run is over, or its coordinator gone.
    """
    session = membership.session
    while True:
        if offer.num_bytes > most_bytes:  # before memory is asked for
            raise Refused(
                f"the state of step {offer.step} is offered with {format_bytes(offer.num_bytes)}, and one of this "
                f"model has at most {format_bytes(most_bytes)}: replica {', '.join(map(str, offer.holders))} trains "
                f"another model, or lies; remove it with: thinwire leave --replica N"
            )
        session.reach(offer.step)  # so that the others keep the rounds after it
        coming = IncomingState(offer, membership=membership, report=report)
        try:
            return coming, coming.parameters(may_begin_early=may_begin_early)
        except NotThere:
            coming.close()
            session.check()
            with session.changed:
                session.view.offers.pop(offer.step, None)
            report(f"no replica holds the state of step {offer.step} any more; waiting for another one")
            offer = session.wait_for(held_offer, deadline_s=None, why="")
            if offer.root in FROM_NOBODY:  # another life begins from it
                raise Expelled(
                    "all that held the state are gone, and the run goes on from a disk; joining again"
                ) from None
        except ThinwireError as error:
            coming.close()
            session.check()
            raise Expelled(f"the state of step {offer.step} could not be fetched: {error}; joining again") from None


class IncomingState:
    """State that a thread fetches from all its holders."""

    def __init__(self, offer: StateOffer, *, membership: Membership, report: Callable[[str], None]) -> None:
        self._offer, self._membership, self._report = offer, membership, report
        self._source = f"the state of step {offer.step}"
        self._fetch = StateTransfer(
            membership.library, state_name(offer.step), num_bytes=offer.num_bytes, root=bytes.fromhex(offer.root),
            on_finding=lambda found: membership.session.send(
                "note", level="warning", text=found.describe(),
                about=f"state of step {offer.step} from replica {found.holder}",
            ),
        )  # fmt: skip
        self._watch = _HolderTracker(self._fetch, offer=offer, membership=membership)
        self._state: GlobalState | None = None
        self._failure: BaseException | None = None
        self._has_ended = threading.Event()
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="thinwire-fetch", daemon=True)
        self._thread.start()

    @property
    def step(self) -> int:
        return self._offer.step

    def parameters(self, *, may_begin_early: bool) -> dict[str, Tensor]:
        """Wait for the global parameters by name; with `may_begin_early` no longer than the rest will soon be here."""
        while not self._has_ended.wait(_FIRST_POLL_S):
            # what is missing comes soon enough, at the rate so far
            session, here = self._membership.session, self._fetch.bytes_here
            missing_s = (self._offer.num_bytes - here) / max(1, here) * (time.monotonic() - self._began_s)
            interval_s = session.interval_steps * session.pace.step_s
            if may_begin_early and missing_s <= _MOST_LATE_INTERVALS * interval_s:
                found = unpack_parameters(self._fetch.first_bytes, num_bytes=self._offer.num_bytes, source=self._source)
                if found is not None:
                    return found
        return dict(self._whole().parameters)

    def is_here(self) -> bool:
        return self._has_ended.is_set()

    def load_into(self, engine: RoundEngine) -> None:
        self._has_ended.wait()
        try:
            outer = dict(self._whole().outer)
        except ThinwireError as error:
            self._membership.session.check()
            raise Expelled(f"the rest of {self._source} could not be fetched: {error}; joining again") from None
        load_outer(engine, outer)
        self._state = None
        self._fetch.forget()

    def close(self) -> None:
        self._watch.give_up()
        self._thread.join()

    def _whole(self) -> GlobalState:
        if self._failure is not None:
            raise self._failure
        assert self._state is not None
        return self._state

    def _run(self) -> None:
        try:
            vector = self._fetch.run(deadline_s=_FETCH_S, stall_s=_STALL_S, may_wait=False)
            self._state = unpack(vector, source=self._source)
            offer, num_holders = self._offer, self._watch.num_holders
            self._report(f"fetched {self._source} ({offer.num_bytes} bytes) from {num_holders} replicas")
        except BaseException as failure:  # raised in the waiting thread
            self._failure = failure
        finally:
            self._watch.close()
            self._has_ended.set()


class _HolderTracker:
    """Keeps the holders of a transfer up to date as replicas come and go."""

    def __init__(self, fetch: StateTransfer, *, offer: StateOffer, membership: Membership) -> None:
        self.num_holders = 0
        self._fetch = fetch
        self._offer = offer
        self._membership = membership
        self._known: set[int] = set()
        self._is_over = threading.Event()
        self._update()
        self._thread = threading.Thread(target=self._run, name="thinwire-holders", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def give_up(self) -> None:
        """Stop updating, and remove all holders, which ends the transfer."""
        self.close()
        for holder in self._known:
            self._fetch.remove_holder(holder)

    def _run(self) -> None:
        while not self._is_over.wait(_HOLDER_POLL_S):
            self._update()

    def _update(self) -> None:
        with self._membership.session.changed:
            view = self._membership.session.view
            newest = view.offers.get(self._offer.step, self._offer)
            # one that does not take part any more ends its fetch at once
            present = set() if view.expelled_why else set(newest.holders) & set(view.neighbours)
        for holder in present - self._known:
            self._fetch.add_holder(holder)
        for holder in self._known - present:
            self._fetch.remove_holder(holder)
        self._known = present
        self.num_holders = max(self.num_holders, len(present))
