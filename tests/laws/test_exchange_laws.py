"""What every exchange promises, with every codec, for any number of replicas and elements."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.every_case import over
from thinwire.averaging.exchange import AllGather, TwoPhase, cheapest, shard_bounds
from thinwire.averaging.round_context import RoundContext
from thinwire.averaging.topology import AllReplicas, Participation, Peers
from thinwire.codecs import NAMES, by_name, float32
from thinwire.methods.masha import Star
from thinwire.sync.in_flight import launch
from thinwire.sync.schedule import Round
from thinwire.transport.loopback import run_replicas
from thinwire.transport.process_group import MOST_PARTS, OPENING_BYTES, part_offsets
from thinwire.transport.recording import RecordingTransport

ROUND = Round(id=0, fragment=0, launch_step=1, apply_step=1)
EXCHANGES = {
    "all-gather": AllGather,
    "two-phase": TwoPhase,
    "star": lambda codec: Star(codec=codec, server_codec=codec, server=0),
}
SIZES = (0, 1, 7, 63, 64, 65, 257, 1009)


def average(exchange, tensors, *, hashes=None, topology=None):
    """Average one tensor a replica; return each replica's result and the payload bytes it sent."""

    def replica_main(transport):
        recording = RecordingTransport(transport)
        everyone = range(transport.num_replicas)
        peers = (topology or AllReplicas()).peers(round_id=0, me=transport.replica, alive=everyone)
        reference_hash = hashes[transport.replica] if hashes else 0
        context = RoundContext(
            peers=peers, transport=recording, round_id=0, seed=transport.replica, reference_hash=reference_hash
        )
        steps = exchange.steps(tensors[transport.replica], context)
        result = launch(steps, round=ROUND, deadline_s=5, in_background=False).result()
        return result, recording.log.totals("sent").payload_bytes

    return run_replicas(len(tensors), replica_main)


def random_tensors(replicas, numel, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(replicas)]


@over((name, codec) for name in EXCHANGES for codec in NAMES if name != "two-phase" or not by_name(codec).is_sparse)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_all_replicas_get_the_same_bits_and_send_no_more_than_the_formula(name, codec, replicas):
    exchange = EXCHANGES[name](codec=by_name(codec))
    for numel in SIZES:
        results = average(exchange, random_tensors(replicas, numel))
        first = results[0][0].mean
        assert first.shape == (numel,)
        assert first.dtype == torch.float32
        limit = exchange.sent_bytes(numel, num_replicas=replicas)
        for result, sent in results:
            assert torch.equal(result.mean, first)
            assert sent <= limit
        if by_name(codec).has_fixed_size:
            assert max(sent for _, sent in results) == limit, "the formula is reached by one replica"


@pytest.mark.parametrize("name", EXCHANGES)
@given(replicas=st.integers(1, 6), numel=st.integers(0, 300), seed=st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_a_lossless_code_gives_the_mean_in_the_order_of_replicas(name, replicas, numel, seed):
    tensors = random_tensors(replicas, numel, seed=seed)
    total = torch.zeros(numel)
    for tensor in tensors:
        total += tensor
    for result, _ in average(EXCHANGES[name](codec=float32()), tensors):
        assert torch.equal(result.mean, total / replicas)


@pytest.mark.parametrize("codec", ["e3m0", "block-int8", "block-int4", "bfloat16"])
@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_all_gather_and_two_phase_agree_within_one_more_coding_of_the_mean(codec, replicas):
    code = by_name(codec)
    tensors = random_tensors(replicas, 1009)
    gathered = average(AllGather(codec=code), tensors)[0][0].mean
    reduced = average(TwoPhase(codec=code), tensors)[0][0].mean
    # shards are whole blocks, so coding shard by shard is coding the whole
    assert torch.equal(reduced, code.decode(code.encode(gathered), numel=1009))


@pytest.mark.parametrize("name", ["all-gather", "two-phase"])
def test_every_member_learns_every_reference_hash(name):
    tensors = random_tensors(3, 130)
    for result, _ in average(EXCHANGES[name](codec=float32()), tensors, hashes=[7, 8, 2**32 - 1]):
        assert result.reference_hashes == {0: 7, 1: 8, 2: 2**32 - 1}


def test_the_server_learns_every_reference_hash_and_the_others_the_servers():
    exchange = Star(codec=float32(), server_codec=float32())
    results = average(exchange, random_tensors(3, 7), hashes=[7, 8, 9])
    assert [result.reference_hashes for result, _ in results] == [{0: 7, 1: 8, 2: 9}, {0: 7, 1: 8}, {0: 7, 2: 9}]


@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("codec", ["e3m0", "block-int8", "top-k"])
def test_a_star_codes_the_mean_once_more(codec, replicas):
    code = by_name(codec)
    tensors = random_tensors(replicas, 1009)
    gathered = average(AllGather(codec=code), tensors)[0][0].mean
    through_server = average(Star(codec=code, server_codec=code, server=replicas - 1), tensors)[0][0].mean
    assert torch.equal(through_server, code.decode(code.encode(gathered), numel=1009))


@pytest.mark.parametrize("name", ["all-gather", "star"])
@pytest.mark.parametrize("absent", [(), (0,), (1, 2), (0, 1, 2, 3)])
def test_absent_members_send_nothing_and_count_as_zero_in_the_mean_that_all_get(name, absent):
    tensors = random_tensors(4, 65)

    class Absent:
        def peers(self, *, round_id, me, alive):
            return Peers(me=me, members=tuple(alive), absent=absent)

    results = average(EXCHANGES[name](codec=float32()), tensors, topology=Absent())
    total = torch.zeros(65)
    for replica in range(4):
        if replica not in absent:
            total += tensors[replica]
    for replica, (result, sent) in enumerate(results):
        assert torch.equal(result.mean, total / 4)
        if replica in absent and (name, replica) != ("star", 0):  # a server speaks, whether it has something of its own
            assert sent == 0


def test_the_two_phase_exchange_refuses_absent_members():
    with pytest.raises(ValueError, match="each owns a shard; use AllGather"):
        average(TwoPhase(codec=float32()), random_tensors(3, 65), topology=Participation(probability=0.01))


@given(seed=st.integers(0, 1000), share=st.floats(0.05, 1), replicas=st.integers(1, 6), rounds=st.integers(1, 3))
def test_all_replicas_toss_the_same_coins_for_everyone(seed, share, replicas, rounds):
    topology = Participation(probability=share, seed=seed, rounds_per_coin=rounds)
    for number in range(6):
        seen = [topology.peers(round_id=number, me=me, alive=range(replicas)) for me in range(replicas)]
        assert len({peers.senders for peers in seen}) == 1
        assert seen[0].members == tuple(range(replicas))
        assert (
            seen[0].senders == topology.peers(round_id=number // rounds * rounds, me=0, alive=range(replicas)).senders
        )


def test_replicas_take_part_as_often_as_they_should():
    coins = [Participation(probability=0.3).peers(round_id=r, me=0, alive=range(5)).senders for r in range(2000)]
    for replica in range(5):
        assert abs(sum(replica in senders for senders in coins) / 2000 - 0.3) < 0.04
    assert Participation(probability=1.0).peers(round_id=3, me=0, alive=range(5)).absent == ()


@given(numel=st.integers(0, 5000), shards=st.integers(1, 17), block=st.sampled_from([1, 64, 256]))
def test_shards_cover_everything_once_in_whole_blocks(numel, shards, block):
    bounds = shard_bounds(numel, num_shards=shards, block=block)
    assert len(bounds) == shards
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    for (_, stop), (start, _) in pairwise(bounds):
        assert stop == start
        assert stop % block == 0 or stop == numel
    sizes = [-(-(stop - start) // block) for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_few_replicas_gather_and_many_take_two_phases():
    kinds = {m: type(cheapest(by_name("e3m0"), num_replicas=m)) for m in (1, 2, 4, 5, 64)}
    assert kinds == {1: AllGather, 2: AllGather, 4: AllGather, 5: TwoPhase, 64: TwoPhase}
    assert isinstance(cheapest(float32(), num_replicas=3), TwoPhase)


def test_two_phases_keep_a_replicas_traffic_constant():
    numel, code = 64 * 1000, by_name("e3m0")
    one_payload = code.payload_bytes(numel)
    assert TwoPhase(codec=code).sent_bytes(numel, num_replicas=50) <= 2 * one_payload
    assert AllGather(codec=code).sent_bytes(numel, num_replicas=50) == 49 * one_payload


@given(st.integers(1, 10 * OPENING_BYTES) | st.integers(1, 1 << 34))
def test_the_parts_of_a_message_follow_each_other_to_its_end(message_bytes: int) -> None:
    ends = part_offsets(message_bytes)
    assert ends[0] == min(message_bytes, OPENING_BYTES) and ends[-1] == message_bytes
    sizes = [after - before for before, after in pairwise(ends)]
    assert len(sizes) <= MOST_PARTS and all(size > 0 for size in sizes)
    # parts are even but for the last, and none is needlessly small
    assert len(set(sizes[:-1])) <= 1 and all(size >= OPENING_BYTES for size in sizes[:-1])
