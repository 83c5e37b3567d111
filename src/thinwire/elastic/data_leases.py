"""Data leases: shards of the shuffled data, leased to one replica at a time and counted.

A shard is a fixed number of windows of the shuffled data; shard numbers continue through all epochs. A replica trains
on its shard from the first window of its lease to the end. Windows whose training was in a decided round are *counted*.
When the replica goes, the rest is leased to another one. Windows trained beyond the counted ones are trained again, and
counted as *repeated*. So no sample is lost, and every repetition is reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

# Rounds of each replica whose counting can be undone: a bad part is reported within a round or two of its own, and
# rounds are open at most eight intervals.
_UNDOABLE_ROUNDS = 64


@dataclass(slots=True, kw_only=True)
class Lease:
    """A shard that is leased to a replica."""

    shard: int
    start: int = 0  # the first window of the lease
    used: int = 0  # end of the windows trained so far, as last reported
    counted: int = 0  # end of the windows whose training was in a decided round


class DataLeases:
    """All leases of a run, in shards of so many windows, and the counts of its data.

    Raises:
        ValueError: `shard_windows` is less than 1.

    Attributes:
        repeated: Windows trained by replicas that went before a round counted them.

    Example:
        >>> leases = DataLeases(shard_windows=10)
        >>> leases.lend(0).shard, leases.lend(1).shard
        (0, 1)
        >>> leases.use(0, {0: 8})
        >>> leases.count(0, {0: 6})
        >>> leases.release(0)
        >>> again = leases.lend(2)
        >>> again.shard, again.start, leases.repeated, leases.counted
        (0, 6, 2, 6)
    """

    def __init__(self, *, shard_windows: int) -> None:
        if shard_windows < 1:
            raise ValueError(f"shard_windows must be at least 1, got {shard_windows}")
        self.shard_windows = shard_windows
        self.repeated = 0
        self._next = 0
        self._returned: dict[int, int] = {}
        self._leases: dict[int, dict[int, Lease]] = {}
        # by replica, the latest rounds that counted its work, and its leases before each
        self._before: dict[int, deque[tuple[int, tuple[Lease, ...]]]] = {}

    @property
    def counted(self) -> int:
        """Windows of all epochs whose training was in a decided round."""
        whole = self._next * self.shard_windows
        lent = sum(self.shard_windows - lease.counted for held in self._leases.values() for lease in held.values())
        return whole - lent - sum(self.shard_windows - start for start in self._returned.values())

    def lend(self, replica: int) -> Lease:
        """Lease a shard to a replica: a returned one, or the next."""
        if self._returned:
            shard = min(self._returned)
            start = self._returned.pop(shard)
        else:
            shard, start = self._next, 0
            self._next += 1
        lease = Lease(shard=shard, start=start, used=start, counted=start)
        self._leases.setdefault(replica, {})[shard] = lease
        return lease

    def borrowers(self) -> tuple[int, ...]:
        """Return the replicas that have leases."""
        return tuple(self._leases)

    def num_lent(self, replica: int) -> int:
        """Return the number of leases of a replica that are not counted whole."""
        return len(self._leases.get(replica, {}))

    def use(self, replica: int, used: Mapping[int, int]) -> None:
        """Note how many windows of its shards a replica has trained; shards of others are left out."""
        for shard, lease in self._held(replica, used):
            lease.used = max(lease.used, min(used[shard], self.shard_windows))

    def count(self, replica: int, used: Mapping[int, int], *, round_id: int | None = None) -> None:
        """Count the windows of a replica that were in a round.

        Args:
            replica: The replica.
            used: By shard, the windows that it had trained.
            round_id: The round, where its counting may have to be undone.
        """
        self.use(replica, used)
        if round_id is not None and replica in self._leases:
            kept = tuple(replace(lease) for _, lease in self._held(replica, used))
            self._before.setdefault(replica, deque(maxlen=_UNDOABLE_ROUNDS)).append((round_id, kept))
        for shard, lease in self._held(replica, used):
            lease.counted = max(lease.counted, min(used[shard], lease.used))
            if lease.counted == self.shard_windows:
                del self._leases[replica][shard]

    def uncount(self, replica: int, *, since: int) -> None:
        """Undo the counting of a replica's windows in rounds from one on: its parts there were of no use.

        Windows of shards that were counted whole are the replica's again, so that `release` takes them back.
        """
        kept = self._before.get(replica, deque())
        for round_id, leases in reversed(kept):
            if round_id >= since:
                for lease in leases:
                    held = self._leases.setdefault(replica, {})
                    latest = held.get(lease.shard)  # none where it was counted whole
                    used = self.shard_windows if latest is None else latest.used
                    held[lease.shard] = replace(lease, used=used)
        self._before[replica] = deque((one for one in kept if one[0] < since), maxlen=_UNDOABLE_ROUNDS)

    def release(self, replica: int) -> None:
        """Return all shards of a replica that is gone."""
        self.forget_undo(replica)
        for lease in self._leases.pop(replica, {}).values():
            self.repeated += lease.used - lease.counted
            self._returned[lease.shard] = lease.counted

    def state_dict(self) -> dict[str, Any]:
        """Return all leases and counts as JSON values; keys are texts."""
        return {
            "shard_windows": self.shard_windows,
            "next": self._next,
            "repeated": self.repeated,
            "counted": self.counted,
            "returned": {str(shard): start for shard, start in self._returned.items()},
            "leases": {str(one): [asdict(lease) for lease in held.values()] for one, held in self._leases.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load leases and counts; shards stay leased to the same replicas."""
        self.shard_windows = int(state["shard_windows"])
        self._next, self.repeated = int(state["next"]), int(state["repeated"])
        self._returned = {int(shard): int(start) for shard, start in state["returned"].items()}
        self._leases = {
            int(one): {int(lease["shard"]): Lease(**lease) for lease in held} for one, held in state["leases"].items()
        }

    def forget_undo(self, replica: int) -> None:
        """Forget what `uncount` needs of a replica."""
        self._before.pop(replica, None)

    def undo_state(self) -> dict[str, Any]:
        """Return the history that `uncount` needs, as JSON values; checkpoints do without it."""
        before = {replica: list(kept) for replica, kept in self._before.items()}
        return dict(msgspec.to_builtins(before, str_keys=True))

    def load_undo_state(self, state: Mapping[str, Any]) -> None:
        """Load the history that `uncount` needs."""
        before = msgspec.convert(state, dict[int, list[tuple[int, tuple[Lease, ...]]]], strict=False)
        self._before = {replica: deque(kept, maxlen=_UNDOABLE_ROUNDS) for replica, kept in before.items()}

    def release_all(self) -> None:
        """Return all shards, as where a run goes on with other replicas."""
        for replica in list(self._leases):
            self.release(replica)

    def go_back_to(self, state: Mapping[str, Any] | None) -> None:
        """Go back to an earlier account: shards leased since are leased again, and windows counted since are repeated.

        Args:
            state: The account, from `state_dict`; None for the beginning of the run.
        """
        self.release_all()
        repeated, counted = self.repeated, self.counted
        begin = DataLeases(shard_windows=self.shard_windows).state_dict()
        self.load_state_dict(begin if state is None else state)
        self.release_all()
        self.repeated = repeated + counted - self.counted

    def _held(self, replica: int, used: Mapping[int, int]) -> list[tuple[int, Lease]]:
        held = self._leases.get(replica, {})
        return [(shard, held[shard]) for shard in used if shard in held]
