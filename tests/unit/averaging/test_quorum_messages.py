"""What stands in front of a quorum's payloads comes back as it was, and what cannot be is refused on arrival."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire
from tests.reference.late_replicas import train_late
from thinwire.averaging.quorum import (
    PART_HEADER_BYTES,
    MeanHeader,
    PartHeader,
    mean_header_bytes,
    read_mean_header,
    read_part_header,
    with_mean_header,
    with_part_header,
)
from thinwire.averaging.round_context import Progress
from thinwire.codecs import float32
from thinwire.errors import PayloadError
from thinwire.methods import decoupled_diloco
from thinwire.transport.base import Envelope
from thinwire.transport.faulty import Fault, FaultyTransport

PART = torch.arange(13, dtype=torch.uint8)


def raw(layout: str, *numbers: int, then: torch.Tensor = PART) -> torch.Tensor:
    return torch.cat([torch.frombuffer(bytearray(struct.pack(layout, *numbers)), dtype=torch.uint8), then])


@given(tokens=st.integers(1, 1 << 50), steps=st.integers(1, 1000))
def test_an_offer_comes_back_with_its_part(tokens: int, steps: int) -> None:
    offer = PartHeader(num_tokens=tokens * steps, num_steps=steps, has_part=True)
    found, part = read_part_header(with_part_header(offer, PART), step=1000, what="round 0")
    assert found == offer and torch.equal(part, PART) and part.storage_offset() == 0
    assert found.weight == tokens * steps * tokens * steps / steps


def test_a_question_is_an_offer_without_a_part() -> None:
    found, part = read_part_header(with_part_header(PartHeader(), None), step=1, what="round 0")
    assert found == PartHeader() and found.weight == 0 and part.numel() == 0


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (PART, "13 bytes, fewer than an offer's 24"),
        (raw("<QQQ", 2, 5, 5), "begins with 0 or 1, got 2"),
        (raw("<QQQ", 1, 4, 5), "4 tokens of 5 steps"),
        (raw("<QQQ", 1, 4, 0), "4 tokens of 0 steps"),
        (raw("<QQQ", 1, 99, 10), "99 tokens of 10 steps, 9 steps after the start"),
        (raw("<QQQ", 0, 0, 0), "it has no part, but offers 0 tokens and 37 bytes"),
        (raw("<QQQ", 0, 5, 5, then=PART[:0]), "it has no part, but offers 5 tokens"),
    ],
)
def test_an_offer_that_cannot_be_is_refused(payload: torch.Tensor, words: str) -> None:
    with pytest.raises(PayloadError, match=f"round 7 from replica 2: .*{words}"):
        read_part_header(payload, step=9, what="round 7 from replica 2")


def test_who_may_train_on_at_a_step_may_offer_more_steps_than_that() -> None:
    assert read_part_header(raw("<QQQ", 1, 99, 10), step=None, what="round 0")[0].num_steps == 10
    with pytest.raises(PayloadError, match="offers 4 tokens of 5 steps; the replicas"):
        read_part_header(raw("<QQQ", 1, 4, 5), step=None, what="round 0")


@given(members=st.sets(st.integers(0, 129)), closed=st.integers(0, 1 << 40), ahead=st.integers(5, 100))
def test_a_verdict_comes_back_with_its_mean(members: set[int], closed: int, ahead: int) -> None:
    verdict = MeanHeader(
        members=tuple(sorted(members | {3})), progress=Progress(step=closed + ahead, closed_step=closed)
    )
    payload = with_mean_header(verdict, PART, num_replicas=130)
    assert payload.numel() == mean_header_bytes(130) + PART.numel() == 16 + 24 + 13
    found, mean = read_mean_header(payload, num_replicas=130, server=3, least=1, step=5, what="round 0")
    assert found == verdict and torch.equal(mean, PART) and mean.storage_offset() == 0


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (PART, "13 bytes, fewer than a verdict's 24"),
        (raw("<QQQ", 8, 8, 0b111), "it was at step 8 with all rounds up to step 8 closed, for a round of step 9"),
        (raw("<QQQ", 12, 13, 0b111), "it was at step 12 with all rounds up to step 13 closed"),
        (raw("<QQQ", 9, 9, 0b110), "of the replicas 1, 2; it must hold the server, replica 0, and at least 2 of 3"),
        (raw("<QQQ", 9, 9, 0b001), "of the replicas 0; it must"),
        (raw("<QQQ", 9, 9, 0b1011), "of the replicas 0, 1, 3; it must"),
        (raw("<QQQ", 9, 9, 1 << 63 | 3), "of the replicas 0, 1, 63; it must"),
        (raw("<QQQ", 9, 9, 0), "of the replicas none; it must"),
    ],
)
def test_a_verdict_that_cannot_be_is_refused(payload: torch.Tensor, words: str) -> None:
    with pytest.raises(PayloadError, match=f"round 7 from replica 0: .*{words}"):
        read_mean_header(payload, num_replicas=3, server=0, least=2, step=9, what="round 7 from replica 0")


def run_with(lie: Any, *, liar: int, holds: Any = ()) -> None:
    def forge(payload: torch.Tensor, envelope: Envelope) -> torch.Tensor:
        if envelope.address.phase == (1 if liar == 0 else 0):
            lie(payload)
        return payload

    method = decoupled_diloco(sync_interval=4, overlap_steps=1, codec=float32())
    script = [Fault(kind="forge", replica=liar, round_id=1, forge=forge)]
    thinwire.run_replicas(3, lambda t: train_late(FaultyTransport(t, script), method, until=14, holds=holds))


def write(at: int, number: int) -> Any:
    def lie(payload: torch.Tensor) -> None:
        payload[at : at + 8] = torch.frombuffer(bytearray(struct.pack("<Q", number)), dtype=torch.uint8)

    return lie


@pytest.mark.parametrize(
    ("lie", "liar", "words"),
    [
        (write(0, 9), 2, r"round 1 \(fragment 0\) from replica 2: an offer begins with 0 or 1, got 9"),
        (write(16, 99), 2, "offers 8 tokens of 99 steps|offers 4 tokens of 99 steps"),
        (write(16, 0b110), 0, "said to be of the replicas 1, 2"),
        (write(0, 3), 0, "it was at step 3"),
    ],
)
def test_a_replica_that_lies_in_front_of_its_payload_is_named(lie: Any, liar: int, words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        run_with(lie, liar=liar)


def test_a_late_replica_that_lies_is_named_too() -> None:
    with pytest.raises(PayloadError, match="from replica 2: an offer begins with 0 or 1, got 5"):
        run_with(write(0, 5), liar=2, holds=[(2, 7, 10)])


def test_who_only_asked_cannot_be_in_the_mean() -> None:
    with pytest.raises(PayloadError, match="replica 2 is said to be in the mean, but has sent no part"):
        run_with(write(16, 0b111), liar=0, holds=[(2, 3, 10)])


def test_who_asks_before_a_round_is_closed_is_refused() -> None:
    def lie(payload: torch.Tensor) -> None:
        payload[:PART_HEADER_BYTES] = 0

    with pytest.raises(PayloadError, match="it has no part, but offers 0 tokens and"):
        run_with(lie, liar=2)
