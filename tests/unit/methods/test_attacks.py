"""Attacks send what they say, alike on every run, and a replica can lie through a real exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.attacks import (
    ATTACKS,
    LONE_ATTACKS,
    PayloadAttack,
    attack,
    attack_script,
    largest_hidden_shift,
)
from thinwire.averaging.exchange import AllGather
from thinwire.averaging.round_context import RoundContext
from thinwire.averaging.topology import Peers
from thinwire.codecs import by_name
from thinwire.transport.base import Envelope
from thinwire.transport.faulty import FaultyTransport
from thinwire.transport.loopback import LoopbackTransport, LoopbackWorld
from thinwire.transport.streams import BUFFERS, ROUNDS

NUM_REPLICAS = 4


def vectors(num_rows: int, numel: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("numel", [0, 1, 101])
@pytest.mark.parametrize("name", ATTACKS)
def test_every_attacker_sends_a_vector_and_the_honest_ones_stay_as_they_are(name: Any, numel: int) -> None:
    honest = vectors(5, numel)
    before = honest.clone()
    for num_bad in (1, 2) if name == "little-is-enough" else (0, 1, 7):
        lies = attack(name, honest, num_bad=num_bad, seed=3)
        assert lies.shape == (num_bad, numel) and lies.dtype == torch.float32
        assert torch.equal(lies, attack(name, honest, num_bad=num_bad, seed=3))
        assert torch.isfinite(lies).all()
    assert torch.equal(honest, before)


def test_attacks_are_what_their_table_says() -> None:
    honest = vectors(12, 4001)
    mean, deviation = honest.double().mean(dim=0), honest.double().std(dim=0, correction=0)
    assert torch.equal(attack("reverse", honest, num_bad=2), honest[:2] * -10)
    torch.testing.assert_close(attack("fall-of-empires", honest, num_bad=1)[0].double(), -0.1 * mean)
    torch.testing.assert_close(
        attack("little-is-enough", honest, num_bad=3, strength=2.0)[2].double(), mean - 2 * deviation
    )
    torch.testing.assert_close(
        attack("little-is-enough", honest, num_bad=3)[0].double(),
        mean - largest_hidden_shift(15, num_bad=3) * deviation,
    )
    dropped = attack("drop", honest, num_bad=1, strength=0.25)[0]
    is_gone = dropped == 0
    assert abs(is_gone.double().mean().item() - 0.25) < 0.03
    assert torch.equal(dropped[~is_gone], honest[0][~is_gone])
    assert not attack("drop", honest, num_bad=1, strength=1.0).any()
    noise = attack("random", honest, num_bad=2, strength=3.0)
    assert abs((noise[0].norm() / honest[0].norm()).item() - 3) < 0.1
    assert abs(torch.cosine_similarity(noise[0], noise[1], dim=0).item()) < 0.1


def test_the_hidden_shift_is_the_normal_quantile_of_the_honest_that_must_lie_beyond() -> None:
    # by hand: 15 replicas, 3 bad: 5 of 12 honest must lie beyond, and 7/12 of a normal lie below 0.2104
    assert largest_hidden_shift(15, num_bad=3) == pytest.approx(0.21043, abs=1e-5)
    assert largest_hidden_shift(50, num_bad=24) == pytest.approx(1.42608, abs=1e-5)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: attack("boo", vectors(1, 1), num_bad=1), "name must be one of random, .*got 'boo'"),  # type: ignore[arg-type]
        (lambda: attack("drop", vectors(1, 1), num_bad=1, strength=1.5), r"strength must be in \[0, 1\] for drop"),
        (lambda: attack("reverse", vectors(1, 1), num_bad=1, strength=-1.0), r"strength must be in \[0, inf\]"),
        (lambda: attack("reverse", vectors(0, 1), num_bad=1), "honest must hold at least one row"),
        (lambda: attack("reverse", vectors(1, 1), num_bad=-1), "num_bad be at least 0"),
        (lambda: attack("little-is-enough", vectors(1, 1), num_bad=2), "num_bad must be .* at most half"),
        (lambda: attack_script("fall-of-empires", replicas=[0]), r"for a script, got 'fall-of-empires'.*use attack\("),
    ],
)
def test_an_attack_that_makes_no_sense_is_refused(call: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        call()


@pytest.mark.parametrize("codec_name", ["float32", "e3m0"])
@pytest.mark.parametrize("name", LONE_ATTACKS)
def test_a_liar_moves_the_mean_of_all_others_alike_and_only_in_rounds(name: Any, codec_name: str) -> None:
    codec, numel = by_name(codec_name), 257
    tensors = vectors(NUM_REPLICAS, numel)
    script = attack_script(name, replicas=[2], codec=codec, strength=0.5)
    world = LoopbackWorld(NUM_REPLICAS)

    def replica_main(transport: LoopbackTransport) -> tuple[torch.Tensor, torch.Tensor]:
        end = FaultyTransport(transport, script)
        others = [replica for replica in range(NUM_REPLICAS) if replica != transport.replica]
        peers = Peers(me=transport.replica, members=tuple(range(NUM_REPLICAS)))
        assert list(peers.others) == others
        means = []
        for stream in (ROUNDS, BUFFERS):
            context = RoundContext(peers=peers, transport=end, round_id=5, stream=stream)
            steps = AllGather(codec=codec).steps(tensors[transport.replica], context)
            wait = next(steps)
            received = [pending.wait(deadline_s=1) for pending in wait.receives]
            try:
                steps.send([message for message in received if message is not None])
            except StopIteration as stop:
                means.append(stop.value.mean)
        return means[0], means[1]

    results = world.run(replica_main)
    true = torch.stack([codec.decode(codec.encode(row), numel=numel) for row in tensors])
    lie = PayloadAttack(name=name, codec=codec, strength=0.5, seed=0, replica=2)(
        codec.encode(tensors[2]), Envelope(stream=ROUNDS, key=(5,), codec_id=codec.wire_id, numel=numel)
    )
    told = true.clone()
    told[2] = codec.decode(lie, numel=numel)
    assert not torch.equal(told, true)
    for replica, (of_round, of_buffers) in enumerate(results):
        torch.testing.assert_close(of_buffers, true.mean(dim=0))
        torch.testing.assert_close(of_round, (true if replica == 2 else told).mean(dim=0))
        assert torch.equal(of_round, results[0][0]) or replica == 2
