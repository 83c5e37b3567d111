"""What every topology and every graph of replicas promises."""

from __future__ import annotations

from collections import Counter
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.directed_graphs import Exponential, OnePeerExponential
from tests.every_case import over
from thinwire.averaging.mixing import (
    Complete,
    Edges,
    Neighbours,
    RandomPairs,
    Ring,
    Torus,
    mixing_row,
)
from thinwire.averaging.topology import AllReplicas

SHIPPED = (Complete(), Ring(), Torus())
GRAPHS = (*SHIPPED, Exponential(), OnePeerExponential())
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 25, 31)

topologies = st.one_of(
    st.just(AllReplicas()),
    st.builds(RandomPairs, seed=st.integers(-5, 2**70), group_size=st.integers(2, 5)),
)
alive_sets = st.sets(st.integers(0, 500), min_size=1, max_size=40)


def exists(graph: object, size: int) -> bool:
    return not (isinstance(graph, Torus) and size > 3 and all(size % divisor for divisor in range(2, size)))


def matrix(graph, size: int, *, round_id: int = 0) -> np.ndarray:
    found = np.zeros((size, size))
    for me in range(size):
        for other, weight in graph.weights(num_replicas=size, me=me, round_id=round_id).items():
            found[me, other] = weight
    return found


def spectral_gap(mixing: np.ndarray) -> float:
    """Return 1 minus the largest singular value on what deviates from the mean: 1 is at once, 0 is never."""
    size = len(mixing)
    return 1 - float(np.linalg.norm(mixing - np.full((size, size), 1 / size), 2))


graphs = over(
    [(graph, size) for graph in GRAPHS for size in SIZES if exists(graph, size)]
    + [(Edges(edges=tuple((0, other) for other in range(1, size))), size) for size in SIZES]
    + [(Edges(edges=((0, 1), (2, 1), (2, 3), (1, 3), (3, 4))), 5)]
)


@given(topology=topologies, alive=alive_sets, round_id=st.integers(0, 2**40))
def test_all_members_of_a_group_see_the_same_members_and_everyone_is_in_one_group(topology, alive, round_id):
    seen = {me: topology.peers(round_id=round_id, me=me, alive=sorted(alive)) for me in alive}
    for me, peers in seen.items():
        assert peers.me == me and me in peers.members
        assert list(peers.members) == sorted(set(peers.members))
        assert all(seen[other].members == peers.members for other in peers.members)
    groups = {peers.members for peers in seen.values()}
    assert sorted(member for group in groups for member in group) == sorted(alive)


@given(alive=alive_sets, round_id=st.integers(0, 1000), place=st.integers(0, 1))
def test_neighbours_hear_each_other_and_are_those_that_have_a_weight(alive, round_id, place):
    topology = Neighbours(graph=(Complete(), Ring())[place])
    seen = {me: topology.peers(round_id=round_id, me=me, alive=sorted(alive)) for me in alive}
    for me, peers in seen.items():
        assert peers.me == me and me in peers.members
        assert list(peers.members) == list(mixing_row(topology.graph, round_id=round_id, me=me, alive=alive))
        assert all(me in seen[other].members for other in peers.others)


@given(topology=topologies, alive=alive_sets, round_id=st.integers(0, 1000), data=st.data())
def test_the_order_in_which_the_alive_are_told_does_not_matter(topology, alive, round_id, data):
    me = min(alive)
    shuffled = data.draw(st.permutations(sorted(alive)))
    assert topology.peers(round_id=round_id, me=me, alive=shuffled) == topology.peers(
        round_id=round_id, me=me, alive=sorted(alive)
    )


@given(
    alive=alive_sets, round_id=st.integers(0, 1000), group_size=st.integers(2, 5), seed=st.integers(0, 2**63 - 1)
)  # fmt: skip
def test_nobody_is_left_alone_who_is_not_alone_in_the_world(alive, round_id, group_size, seed):
    groups = RandomPairs(seed=seed, group_size=group_size).groups(round_id=round_id, alive=alive)
    sizes = [len(group) for group in groups]
    assert sum(sizes) == len(alive)
    assert sizes == [1] or min(sizes) >= 2
    assert max(sizes) <= group_size + 1
    assert sum(size != group_size for size in sizes) <= 1  # only the rest differs


def test_random_pairs_differ_between_rounds_and_between_seeds_and_stay_the_same_otherwise() -> None:
    def rounds(seed: int) -> list[tuple[tuple[int, ...], ...]]:
        return [RandomPairs(seed=seed).groups(round_id=round_id, alive=range(16)) for round_id in range(20)]

    assert rounds(1) == rounds(1)
    assert len(set(rounds(1))) == 20
    assert not set(rounds(1)) & set(rounds(2))


@pytest.mark.parametrize(("size", "group_size"), [(6, 2), (7, 2), (9, 3), (8, 3)])
def test_every_pair_of_replicas_meets_equally_often(size: int, group_size: int) -> None:
    num_rounds, met = 4000, Counter()
    topology = RandomPairs(seed=5, group_size=group_size)
    for round_id in range(num_rounds):
        for group in topology.groups(round_id=round_id, alive=range(size)):
            met.update((a, b) for a in group for b in group if a < b)
    per_round = sum(comb(len(group), 2) for group in topology.groups(round_id=0, alive=range(size)))
    probability = per_round / comb(size, 2)
    assert len(met) == comb(size, 2)
    spread = (num_rounds * probability * (1 - probability)) ** 0.5
    assert all(abs(count - num_rounds * probability) < 5 * spread for count in met.values())
    # the whole of them, not only each: the mean square in units of the spread is near 1
    chi_square = sum((count - num_rounds * probability) ** 2 for count in met.values()) / spread**2 / len(met)
    assert 0.3 < chi_square < 2.2


def test_a_replica_that_leaves_moves_at_most_the_groups_after_it() -> None:
    everyone = RandomPairs(seed=3).groups(round_id=8, alive=range(100))
    gone = everyone[30]
    rest = RandomPairs(seed=3).groups(round_id=8, alive=set(range(100)) - set(gone))
    assert rest == everyone[:30] + everyone[31:]


def test_a_replica_that_is_not_alive_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of the replicas that are alive, \[1, 4\], got 2"):
        RandomPairs(seed=0).peers(round_id=0, me=2, alive=[4, 1])
    with pytest.raises(ValueError, match=r"one of the replicas that are alive, \[1, 4\], got 2"):
        mixing_row(Ring(), round_id=0, me=2, alive=[4, 1])
    with pytest.raises(ValueError, match="group_size must be at least 2, got 1"):
        RandomPairs(seed=0, group_size=1)


@graphs
def test_the_weights_are_a_doubly_stochastic_matrix_in_every_round(graph, size: int) -> None:
    for round_id in range(6):
        mixing = matrix(graph, size, round_id=round_id)
        assert (mixing >= 0).all() and (np.diag(mixing) > 0).all()
        assert np.abs(mixing.sum(axis=0) - 1).max() < 1e-12
        assert np.abs(mixing.sum(axis=1) - 1).max() < 1e-12


@graphs
def test_neighbours_receivers_and_weights_tell_the_same_graph(graph, size: int) -> None:
    for round_id in (0, 1, 7):
        near = {me: graph.neighbours(num_replicas=size, me=me, round_id=round_id) for me in range(size)}
        for me in range(size):
            assert list(near[me]) == sorted(set(near[me]) - {me})
            heard_by = tuple(other for other in range(size) if me in near[other])
            assert graph.receivers(num_replicas=size, me=me, round_id=round_id) == heard_by
            row = graph.weights(num_replicas=size, me=me, round_id=round_id)
            assert list(row) == sorted({me, *near[me]})


@graphs
def test_repeated_mixing_brings_every_replica_to_the_mean(graph, size: int) -> None:
    values = np.random.default_rng(0).normal(size=size)
    mean = values.mean()
    product = np.eye(size)
    for round_id in range(60):  # 60 is a multiple of every period here (1 to 5)
        product = matrix(graph, size, round_id=round_id) @ product
    mixed = np.linalg.matrix_power(product, 100) @ values
    assert np.abs(mixed - mean).max() < 1e-9


@given(alive=alive_sets, round_id=st.integers(0, 50), place=st.integers(0, 3))
def test_a_graph_closes_over_those_who_are_missing(alive, round_id, place):
    graph = (Complete(), Ring(), Exponential(), OnePeerExponential())[place]
    rows = {me: mixing_row(graph, round_id=round_id, me=me, alive=alive) for me in alive}
    assert all(set(row) <= alive and me in row for me, row in rows.items())
    for other in alive:
        assert sum(row.get(other, 0) for row in rows.values()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
def test_one_peer_exponential_reaches_the_mean_of_a_power_of_two_exactly_from_any_round(size: int) -> None:
    num_rounds = size.bit_length() - 1
    for start in range(3):
        product = np.eye(size)
        for round_id in range(start, start + num_rounds):
            product = matrix(OnePeerExponential(), size, round_id=round_id) @ product
        assert (product == 1 / size).all()  # halves of halves are exact


def test_the_spectral_gap_grows_from_ring_to_torus_to_exponential_to_complete() -> None:
    gaps = [spectral_gap(matrix(graph, 36)) for graph in (Ring(), Torus(), Exponential(), Complete())]
    assert gaps == sorted(gaps)
    assert gaps[0] == pytest.approx(2 / 3 * (1 - np.cos(2 * np.pi / 36)))  # the ring's is known in closed form
    assert gaps[-1] == pytest.approx(1)


@pytest.mark.parametrize("size", [4, 6, 10, 16, 30])
def test_the_static_exponential_graph_has_the_gap_of_its_paper(size: int) -> None:
    # arXiv 2110.13363: 2 / (1 + ceil(log2 n)) for an even number of replicas
    assert spectral_gap(matrix(Exponential(), size)) == pytest.approx(2 / (1 + (size - 1).bit_length()))


@pytest.mark.parametrize(
    ("size", "shape"), [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2)), (6, (2, 3)), (12, (3, 4)), (36, (6, 6))]
)
def test_a_torus_is_as_near_to_a_square_as_it_can_be(size: int, shape: tuple[int, int]) -> None:
    assert Torus.shape(size) == shape


@pytest.mark.parametrize("size", [5, 7, 13, 31])
def test_a_torus_of_one_row_is_refused_with_the_remedy(size: int) -> None:
    with pytest.raises(ValueError, match=rf"prime above 3, got {size}: .*take Ring\(\), or {size - 1} or {size + 1}"):
        Torus().weights(num_replicas=size, me=0)


def test_what_is_no_graph_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"must join two different replicas, got \(2, 2\); leave it out"):
        Edges(edges=((0, 1), (2, 2)))
    with pytest.raises(ValueError, match=r"must join replicas 0 to 2, got \(1, 3\); remove or renumber"):
        Edges(edges=((0, 1), (1, 3))).neighbours(num_replicas=3, me=0)
    with pytest.raises(ValueError, match=r"\[2, 3\] cannot be reached from 0; add an edge"):
        Edges(edges=((0, 1), (2, 3))).neighbours(num_replicas=4, me=0)


@over((graph, size, me) for graph in SHIPPED for size, me in ((4, 4), (4, -1), (0, 0)))
def test_a_replica_outside_of_the_graph_is_refused(graph, size: int, me: int) -> None:
    with pytest.raises(ValueError, match=f"got {me if size else size}"):
        graph.weights(num_replicas=size, me=me)
