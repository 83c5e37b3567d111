"""A state on its way to a replica that comes: its parameters first, so that training need not wait for the rest.

The outer optimizer's memory is as large as the parameters, or larger, and is needed only when a round is applied. Where
training goes on while rounds are overdue it comes meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch import Tensor

from thinwire.elastic.coordinator_view import CoordinatorView, StateOffer
from thinwire.elastic.join import Membership
from thinwire.elastic.protocol import FROM_NOBODY
from thinwire.elastic.state_transfer import StateTransfer
from thinwire.errors import Expelled, NotThere, ThinwireError
from thinwire.sync.elastic import load_outer
from thinwire.sync.engine import Engine
from thinwire.training.checkpoints.global_state import GlobalState, unpack, unpack_parameters

_LOOK_S = 0.2
_FIRST_LOOK_S = 0.05
# A state may be large and its wire thin: what ends a fetch is that nothing comes, not that it takes long.
_FETCH_S, _STALL_S = 7 * 24 * 3600.0, 60.0
# What is still on its way must be here within so many intervals: whoever takes no round in for eight is let go.
_MOST_LATE_INTERVALS = 3.0


def state_name(step: int) -> bytes:
    """Return the name under which a state is shown."""
    return b"s%d" % step


def held_offer(view: CoordinatorView) -> StateOffer | None:
    """Return the newest state that somebody holds who is there, or that nobody needs to."""
    present = set(view.neighbours)
    held = [offer for offer in view.offers.values() if offer.root in FROM_NOBODY or set(offer.holders) & present]
    return max(held, key=lambda offer: offer.step, default=None)


def fetch(
    offer: StateOffer, *, membership: Membership, report: Callable[[str], None], may_begin_early: bool = False
) -> tuple[IncomingState, dict[str, Tensor]]:
    """Fetch a state's parameters; where all that hold it go, a newer one's.

    Args:
        offer: What the coordinator offers.
        membership: This replica's seat.
        report: Takes progress messages, maybe from another thread.
        may_begin_early: Whether the rest may come later; else it is waited for.

    Returns:
        The state, and its global parameters by name.

    Raises:
        Expelled: It could not be had; this replica joins again.
        ThinwireError: The run is over, or its coordinator gone.
    """
    session = membership.session
    while True:
        session.step = offer.step  # so that the others keep the rounds after it
        coming = IncomingState(offer, membership=membership, report=report)
        try:
            return coming, coming.parameters(may_begin_early=may_begin_early)
        except NotThere:
            coming.close()
            session.check()
            with session.changed:
                session.view.offers.pop(offer.step, None)
            report(f"nobody holds the state of step {offer.step} any more; waiting for another one")
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
    """One state, fetched by a thread from all that hold it.

    Args:
        offer: What is fetched.
        membership: This replica's seat.
        report: Called, by that thread, when all is here.
    """

    def __init__(self, offer: StateOffer, *, membership: Membership, report: Callable[[str], None]) -> None:
        self._offer, self._membership, self._report = offer, membership, report
        self._source = f"the state of step {offer.step}"
        self._fetch = StateTransfer(
            membership.library, state_name(offer.step), num_bytes=offer.num_bytes, root=bytes.fromhex(offer.root),
            on_finding=lambda found: membership.session.send("note", level="warning", text=found.describe()),
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
        """The step that the state is of."""
        return self._offer.step

    def parameters(self, *, may_begin_early: bool) -> dict[str, Tensor]:
        """Wait for the global parameters, and return them by name.

        Args:
            may_begin_early: Whether to return before the rest is here, if that will not take long.

        Raises:
            NotThere: Nobody holds the state any more.
            ThinwireError: It could not be had.
        """
        while not self._has_ended.wait(_FIRST_LOOK_S):
            if may_begin_early and self._is_rest_soon():
                found = unpack_parameters(self._fetch.first_bytes, num_bytes=self._offer.num_bytes, source=self._source)
                if found is not None:
                    return found
        return dict(self._whole().parameters)

    def _is_rest_soon(self) -> bool:
        """Tell whether what is missing comes within `_MOST_LATE_INTERVALS`, at the rate so far."""
        session = self._membership.session
        interval_s = session.interval_steps * session.pace.step_s
        here = self._fetch.bytes_here
        missing_s = (self._offer.num_bytes - here) / max(1, here) * (time.monotonic() - self._began_s)
        return missing_s <= _MOST_LATE_INTERVALS * interval_s

    def hand_to(self, engine: Engine) -> None:
        """Let an engine wait for the rest where it needs it; it is taken in there, between two steps."""
        engine.is_whole = self._has_ended.is_set

        def make_whole() -> None:
            self._has_ended.wait()
            try:
                outer = dict(self._whole().outer)
            except ThinwireError as error:
                self._membership.session.check()
                raise Expelled(f"the rest of {self._source} could not be fetched: {error}; joining again") from None
            load_outer(engine, outer)
            engine.is_whole, engine.make_whole = lambda: True, lambda: None
            self._state = None
            self._fetch.forget()

        engine.make_whole = make_whole
        if engine.is_whole():
            make_whole()

    def close(self) -> None:
        """Fetch no more."""
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
        except BaseException as failure:  # handed to whoever waits
            self._failure = failure
        finally:
            self._watch.close()
            self._has_ended.set()


class _HolderTracker:
    """Tells a fetch who holds the state, as replicas come and go."""

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
        """Look no more."""
        self._is_over.set()
        self._thread.join()

    def give_up(self) -> None:
        """Look no more, and leave nobody to fetch from, which ends the fetch."""
        self.close()
        for holder in self._known:
            self._fetch.remove_holder(holder)

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
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
