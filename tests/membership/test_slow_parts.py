"""Parts of a decided round on a wire that has become slow: they are waited for, not asked for anew."""

import time
from typing import Any

import torch

from thinwire.membership.council import Council
from thinwire.membership.patience import Patience
from thinwire.membership.proposal import HEAD_BYTES, Proposal

LONG_S, USUAL_S = 0.6, 0.05


class SlowFetch:
    """Takes long; what is cancelled never comes."""

    def __init__(self) -> None:
        self.there_s = time.monotonic() + LONG_S
        self.is_cancelled = False

    def done(self) -> bool:
        return time.monotonic() > self.there_s

    def wait(self, *, deadline_s: float) -> torch.Tensor:
        blob = torch.zeros(HEAD_BYTES + 3, dtype=torch.uint8)
        blob[0], blob[8] = 77, 9  # the hash of the global value, and the round
        return blob

    def cancel(self) -> None:
        self.is_cancelled = True


class SlowShelf:
    """Counts who was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, SlowFetch]] = []

    def publish(self, name: bytes, payload: torch.Tensor) -> None: ...

    def get(self, source: int, name: bytes, *, most_bytes: int) -> SlowFetch:
        self.asked.append((source, SlowFetch()))
        return self.asked[-1][1]

    def forget_past(self) -> None: ...


def member(replica: int) -> dict[str, Any]:
    return {"replica": replica, "host": "h", "address": "10.0.0.1", "port": 7, "standing": "active"}


def proposal_of(shelf: SlowShelf, *, holders: list[int], there: range) -> Proposal:
    """Return replica 2's view of a decided round whose mean is replica 0's part."""
    council = Council(replica=2, interval_steps=4, say=lambda kind, **fields: None)
    council.transfers = Patience(least_s=USUAL_S, most_s=USUAL_S)
    council.hear({"kind": "roster", "members": [member(n) for n in there], "started": True, "number": 1})
    council.hear({
        "kind": "decision", "round": 9, "launch_step": 12, "members": [0], "holders": holders, "step": 12, "closed": 12,
    })  # fmt: skip
    return Proposal(
        council=council, shelf=shelf, round_id=9, launch_step=12, part=None, reference_hash=77, most_bytes=10
    )


def test_a_part_whose_first_holders_have_gone_is_had_from_those_that_fetched_it() -> None:
    shelf = SlowShelf()
    proposal = proposal_of(shelf, holders=[0], there=range(1, 4))
    proposal.wait(deadline_s=1)
    assert proposal.agreed is not None and {source for source, _ in shelf.asked} <= {1, 3}


def test_a_part_that_takes_longer_than_usual_still_comes() -> None:
    shelf = SlowShelf()
    proposal = proposal_of(shelf, holders=[0, 1], there=range(3))
    began_s = time.monotonic()
    proposal.wait(deadline_s=1)
    assert proposal.agreed is not None and list(proposal.agreed.parts) == [0]
    assert time.monotonic() - began_s < 3 * LONG_S
    assert sorted(source for source, _ in shelf.asked) == [0, 1], "each holder is asked once"
    assert sum(fetch.is_cancelled for _, fetch in shelf.asked) == 1, "and the later one no longer when it has come"
