"""Block tables: every block once, messages in time, and the published figures that follow from them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.every_case import over
from thinwire.sequences.block_tables import (
    POLICIES,
    BlockTable,
    SequencePlan,
    helper,
    keys_at_home,
    overlapped_s,
    ring,
    score_numbers,
    sequence_plan,
    striped,
    two_level,
    zigzag,
)


def layouts(ranks: int) -> list[tuple[int, ...]]:
    """Return sites of so many ranks: one, equal ones, and uneven ones in no order."""
    equal = [tuple(rank // size for rank in range(ranks)) for size in range(1, ranks + 1) if ranks % size == 0]
    return [*equal, tuple((rank * rank) % 3 for rank in range(ranks))]


@over(range(1, 17))
def test_every_block_is_computed_once_by_a_rank_that_has_its_queries_and_keys_by_then(ranks: int) -> None:
    for sites in layouts(ranks):
        for make in (ring, zigzag, helper, keys_at_home, two_level, partial(striped, parts=3)):
            try:
                table = make(sites)
            except ValueError:
                assert make is two_level
                continue
            _check(table)
            parts = len(table.owners)
            near = {(row, column) for row in range(parts) for column in range(row + 1) if row - column < 2}
            _check(table.only(near), near)


def _check(table: BlockTable, needed: set[tuple[int, int]] | None = None) -> None:
    parts = len(table.owners)
    causal = {(row, column) for row in range(parts) for column in range(row + 1)}
    done = [(block.row, block.column) for block in table.blocks]
    assert len(done) == len(set(done)) and set(done) == (causal if needed is None else needed)
    owned = {(owner, part): 0 for part, owner in enumerate(table.owners)}
    keys, rows = dict(owned), dict(owned)
    for message in table.forward:
        assert 1 <= message.posted <= message.step and message.source != message.target
        if message.kind == "keys":
            # what a rank hands on has arrived before the message is posted
            assert keys[message.source, message.part] < message.posted or table.owners[message.part] == message.source
            assert (message.target, message.part) not in keys, "no part arrives twice"
            keys[message.target, message.part] = message.step
        elif message.kind == "queries":
            rows[message.target, message.part] = message.step
        else:
            assert message.kind == "result" and message.target == table.owners[message.part]
            last = max(b.step for b in table.blocks if (b.rank, b.row) == (message.source, message.part))
            assert last + 2 <= message.posted
    for block in table.blocks:
        assert keys[block.rank, block.column] <= block.step
        assert rows[block.rank, block.row] <= block.step
    _check_gradients(table)


def _check_gradients(table: BlockTable) -> None:
    """Each rank's share of a part's gradients reaches the owner, and is complete when it leaves."""
    returned = [message for message in table.backward if message.kind == "key-gradient"]
    left = {(message.source, message.part): message for message in returned}
    assert len(left) == len(returned)
    used = {(block.rank, block.column) for block in table.blocks}
    assert {key for key in used if table.owners[key[1]] != key[0]} == set(left)
    for (source, part), message in left.items():
        assert max(b.step for b in table.blocks if (b.rank, b.column) == (source, part)) + 2 <= message.posted
        behind = [one for one in returned if (one.target, one.part) == (source, part)]
        assert all(one.step < message.posted for one in behind)
        assert message.target == table.owners[part] or (message.target, part) in left
    helped = {(block.rank, block.row) for block in table.blocks if table.owners[block.row] != block.rank}
    for kind in ("rows", "row-gradient"):
        found = [message for message in table.backward if message.kind == kind]
        assert len(found) == len(helped)


def test_the_helper_idles_as_published_and_the_ring_for_almost_half() -> None:
    """Table of arXiv 2310.03294, section 3.1, in shares of P^2 pairs of a rank and a step."""
    for ranks in range(2, 17):
        assert helper([0] * ranks).num_steps == ranks // 2 + 1
        assert helper([0] * ranks).idle_slots / ranks**2 == (1 / (2 * ranks) if ranks % 2 == 0 else 0)
        assert ring([0] * ranks).idle_slots / ranks**2 == (ranks**2 - ranks) / (2 * ranks**2)
        assert len(set(zigzag([0] * ranks).work)) == 1


# Bytes in units of N h x 4 B over all ranks: forward, of it across, both passes, of it across, blocks of each rank.
# Four ranks at two sites, 4 heads 16 wide; keys are fetched again in the backward pass but for heads+sites.
MEASURED = {
    ("ring", 4): (3.0, 2.0, 9.0, 6.0, (0.5, 1.5, 2.5, 3.5)),
    ("helper", 4): (3.015625, 2.015625, 9.03125, 6.03125, (1.5, 1.5, 2.5, 2.5)),
    ("keys-at-home", 4): (3.0625, 2.0625, 9.125, 6.125, (2.5, 3.5, 0.5, 1.5)),
    ("heads+sites", 4): (3.0, 1.0, 6.0, 2.0, (1.0, 1.0, 3.0, 3.0)),
    ("ring", 1): (0.75, 0.5, 2.25, 1.5, (0.5, 1.5, 2.5, 3.5)),
    ("helper", 1): (1.140625, 0.890625, 3.40625, 2.65625, (1.5, 1.5, 2.5, 2.5)),
    ("keys-at-home", 1): (2.3125, 2.0625, 6.875, 6.125, (2.5, 3.5, 0.5, 1.5)),
}
SEQ_LEN, HEADS, HEAD_DIM = 64, 4, 16


def units(plan: SequencePlan) -> tuple[float, float, float, float]:
    unit = SEQ_LEN * HEADS * HEAD_DIM * 4
    passes = [
        plan.sent_bytes(batch=1, seq_len=SEQ_LEN, head_dim=HEAD_DIM, item_bytes=4, backward=backward)
        for backward in (False, True)
    ]
    totals, across = [sum(sent.values()) / unit for sent in passes], [plan.border_bytes(sent) / unit for sent in passes]
    return totals[0], across[0], sum(totals), sum(across)


@pytest.mark.parametrize(("policy", "kv_heads"), MEASURED)
def test_bytes_and_work_are_those_that_were_measured_for_each_table(policy: str, kv_heads: int) -> None:
    plan = sequence_plan(policy, sites=[0, 0, 1, 1], heads=HEADS, kv_heads=kv_heads)
    if policy != "heads+sites":
        plan = replace(plan, table=replace(plan.table, keeps_border=False))
    *bytes_, work = MEASURED[policy, kv_heads]
    assert units(plan) == pytest.approx(bytes_)
    assert plan.work == pytest.approx([blocks / 8 for blocks in work])


def test_heads_move_what_ulysses_moves_whatever_the_number_of_ranks() -> None:
    """4 N h / P numbers a rank (arXiv 2309.14509, section 3.2), of which 1 / P stay at home."""
    for ranks in (2, 4, 8):
        plan = sequence_plan("heads", sites=[0] * ranks, heads=8)
        sent = plan.sent_bytes(batch=1, seq_len=256 * ranks, head_dim=16, item_bytes=4)
        for rank in range(ranks):
            crossed = sum(count for (source, _), count in sent.items() if source == rank)
            assert crossed / (1 - 1 / ranks) == 4 * 256 * 8 * 16 * 4
    # 65,536 bytes: 4 ranks, 64 positions of 4 heads 64 wide
    plan = sequence_plan("heads", sites=[0] * 4, heads=4)
    assert sum(plan.sent_bytes(batch=1, seq_len=64, head_dim=64, item_bytes=4).values()) == 4 * 65_536 * 3 // 4


def test_heads_and_two_levels_halve_the_border_bytes_of_a_flat_ring_over_two_sites_of_two() -> None:
    flat, heads, levels = (
        units(sequence_plan(policy, sites=[0, 0, 1, 1], heads=HEADS)) for policy in ("ring", "heads+sites", "two-level")
    )
    assert heads[1] == levels[1] == flat[1] / 2
    assert heads[3] == levels[3] == flat[3] / 2


def test_a_ring_of_two_levels_takes_the_published_time() -> None:
    """Figure 7 of arXiv 2510.18830, in ms: 32 steps; transfers of the flat ring outlast the computing."""
    flat = overlapped_s(32, compute_s=0.51, transfer_s=0.98)
    levels = overlapped_s(32, compute_s=0.51, transfer_s=0.51)
    assert 1.13 + 2.08 + flat == pytest.approx(34.10)
    assert 1.13 + 2.08 + levels == pytest.approx(19.53)


def test_merged_results_keep_a_row_of_numbers_where_rsa_keeps_its_scores() -> None:
    """Term B Z L^2 / N of arXiv 2105.13120, table 2, for a sequence of 4,096 and 12 heads 64 wide on 8 ranks."""
    numbers = [
        score_numbers(heads=12, head_dim=64, seq_len=4096, ranks=8, is_merged=merged) for merged in (False, True)
    ]
    assert numbers == [12 * 4096**2 / 8, 12 * 4096 / 8 * 65]
    longer = [score_numbers(heads=12, head_dim=64, seq_len=8192, ranks=8, is_merged=merged) for merged in (False, True)]
    assert [after / before for after, before in zip(longer, numbers, strict=True)] == [4, 2]


@pytest.mark.parametrize(
    ("sites", "heads", "kv_heads", "policy"),
    [
        ([0] * 4, 8, 8, "heads"),
        ([0] * 4, 4, 1, "zigzag"),  # one head of keys is small, and copying it to all ranks is not
        ([0] * 5, 4, 4, "helper"),  # balanced for odd numbers, and half of a zigzag's bytes
        ([0, 0, 1, 1], 4, 4, "heads+sites"),
        ([0, 0, 1, 1], 3, 3, "two-level"),
        ([0, 0, 1], 4, 4, "ring"),
    ],
)
def test_auto_takes_the_fewest_border_bytes_then_balance_then_the_fewest_bytes(
    sites: list[int], heads: int, kv_heads: int, policy: str
) -> None:
    chosen = sequence_plan("auto", sites=sites, heads=heads, kv_heads=kv_heads)
    assert chosen.policy == policy, {
        name: (units(plan), plan.work) for name in POLICIES[1:] if (plan := _tried(name, sites, heads, kv_heads))
    }


def _tried(policy: str, sites: list[int], heads: int, kv_heads: int) -> SequencePlan | None:
    try:
        return sequence_plan(policy, sites=sites, heads=heads, kv_heads=kv_heads)
    except ValueError:
        return None


def test_what_does_not_fit_is_refused_with_a_remedy_that_does() -> None:
    plan = sequence_plan("zigzag", sites=[0, 0, 0], heads=3)
    with pytest.raises(ValueError, match=r"got 13 positions; allowed multiples of 6; try 18 positions"):
        plan.slices(13, 0)
    assert sum(len(own) for rank in range(3) for own in plan.slices(18, rank)) == 18
    with pytest.raises(ValueError, match=r"got 2 positions; allowed multiples of 6; try 6 positions"):
        plan.slices(2, 0)
    with pytest.raises(ValueError, match=r"heads evenly.*got 6 heads, 6 of keys, on 4 ranks; allowed 1, 2, 3 ranks"):
        sequence_plan("heads", sites=[0] * 4, heads=6)
    assert sequence_plan("heads", sites=[0] * 3, heads=6).policy == "heads"
    with pytest.raises(ValueError, match=r"two-level needs sites of equally many ranks.*--cp-policy ring"):
        sequence_plan("two-level", sites=[0, 1, 0, 1], heads=4)
    assert sequence_plan("ring", sites=[0, 1, 0, 1], heads=4).policy == "ring"
    with pytest.raises(ValueError, match=r"unknown sequence policy; got 'rings'.*try ring"):
        sequence_plan("rings", sites=[0, 0], heads=4)
    for policy in ("auto", "ring"):
        with pytest.raises(ValueError, match=r"got no sites; allowed one number a rank; try sites=\[0\]"):
            sequence_plan(policy, sites=[], heads=4)
        assert sequence_plan(policy, sites=[0], heads=4).num_parts
    with pytest.raises(ValueError, match=r"got 6 and 4.*try kv_heads=6"):
        sequence_plan("ring", sites=[0, 0], heads=6, kv_heads=4)
