"""A replica's seat as the engine uses it: the session's words and the library's blobs together."""

from __future__ import annotations

import torch

from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.round_driver import PartStore, RoundDriver, round_of_name


class ElasticRounds:
    """Implements `thinwire.averaging.elastic_mean.ElasticSession`.

    Args:
        session: What the coordinator says.
        store: Where parts are offered and fetched.
    """

    def __init__(self, session: CoordinatorSession, store: PartStore) -> None:
        self._session = session
        self._store = store
        self._kept: dict[int, int] = {}

    def active(self) -> tuple[int, ...]:
        """Return the replicas that take part, this one among them."""
        return self._session.active()

    def known_step(self) -> int:
        """Return the furthest step at which somebody has launched a round."""
        with self._session.changed:
            return self._session.view.step

    def is_decided(self, round_id: int) -> bool:
        """Tell whether a round was decided without this replica."""
        with self._session.changed:
            return round_id in self._session.view.decisions

    def propose(
        self, part: torch.Tensor | None, *, round_id: int, launch_step: int, reference_hash: int, most_bytes: int,
        bad_parts: int = 0,
    ) -> RoundDriver:  # fmt: skip
        """Offer a part and take part in what is agreed on; see `RoundDriver`."""
        self._forget_old()
        self._kept[round_id] = launch_step
        return RoundDriver(
            session=self._session, store=self._store, round_id=round_id, launch_step=launch_step, part=part,
            reference_hash=reference_hash, most_bytes=most_bytes, bad_parts=bad_parts,
        )  # fmt: skip

    def reject(self, member: int, *, round_id: int, bad_parts: int, since: int) -> None:
        """Report that a part held NaN or infinity and was left out; see `ElasticSession.reject`."""
        self._session.send("reject", round=round_id, member=member, parts=bad_parts, since=since)

    def is_past(self, name: bytes) -> bool:
        """Tell of a blob's name whether it is a part of a round that nobody needs any more."""
        round_id = round_of_name(name)
        oldest = min(list(self._kept), default=0)
        return round_id is not None and round_id < oldest

    def _forget_old(self) -> None:
        """Let go of rounds that all have applied, and that nobody needs who is coming, or may come back."""
        view = self._session.view
        floor = min(view.floor_step, view.kept_step) - self._session.interval_steps
        old = [round_id for round_id, launch_step in self._kept.items() if launch_step < floor]
        for round_id in old:
            del self._kept[round_id]
        if old:
            self._store.forget_past()
