"""What every schedule and every partition promises, for random models and settings."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.methods import streaming_diloco
from thinwire.sync.fragments import BlockParameters, Pattern
from thinwire.sync.schedule import EveryStep, Prefetched, RandomRefresh, Staggered


@st.composite
def staggered(draw, *, most=40):
    interval = draw(st.integers(1, most))
    return Staggered(
        sync_interval=interval,
        overlap_steps=draw(st.integers(0, interval)),
        is_staggered=draw(st.booleans()),
    )


@st.composite
def prefetched(draw):
    interval = draw(st.integers(1, 40))
    return Prefetched(sync_interval=interval, overlap_steps=draw(st.integers(0, interval - 1)))


schedules = st.one_of(staggered(), st.just(EveryStep()))


@given(schedule=staggered(), num_fragments=st.integers(1, 50), step=st.integers(-5, 200))
def test_a_fragment_is_launched_where_its_offset_says(schedule, num_fragments, step):
    expected = []
    for fragment in range(num_fragments):
        interval, rest = divmod(step - schedule.offset(fragment, num_fragments=num_fragments), schedule.sync_interval)
        if rest == 0 and interval >= 1:
            expected.append(((interval - 1) * num_fragments + fragment, fragment))
    assert [(r.id, r.fragment) for r in schedule.launches(step, num_fragments=num_fragments)] == expected


@given(schedule=schedules, num_fragments=st.integers(1, 12), start=st.integers(0, 100))
def test_every_fragment_is_launched_exactly_once_in_any_window_of_one_interval(schedule, num_fragments, start):
    first = 2 * schedule.sync_interval + start  # all fragments have had their first launch
    window = range(first, first + schedule.sync_interval)
    launched = [r.fragment for step in window for r in schedule.launches(step, num_fragments=num_fragments)]
    assert Counter(launched) == Counter(range(num_fragments))


@given(schedule=schedules, num_fragments=st.integers(1, 12))
def test_rounds_are_numbered_in_the_order_of_launch_and_each_is_applied_once(schedule, num_fragments):
    steps = range(1, 5 * schedule.sync_interval + 1)
    launched = [r for step in steps for r in schedule.launches(step, num_fragments=num_fragments)]
    applied = [r for step in steps for r in schedule.applies(step, num_fragments=num_fragments)]
    assert [r.id for r in launched] == list(range(len(launched)))
    assert applied == launched[: len(applied)]
    assert all(r.apply_step <= steps[-1] for r in applied)
    assert all(r.apply_step > steps[-1] for r in launched[len(applied) :])


@given(schedule=staggered(), num_fragments=st.integers(1, 12))
def test_no_fragment_is_exchanged_before_it_has_run_a_full_interval(schedule, num_fragments):
    last = dict.fromkeys(range(num_fragments), 0)
    for step in range(1, 4 * schedule.sync_interval + 1):
        for round in schedule.launches(step, num_fragments=num_fragments):
            assert step - last[round.fragment] >= schedule.sync_interval
            last[round.fragment] = step


@given(schedule=staggered(), num_fragments=st.integers(1, 12))
def test_a_fragment_has_at_most_one_round_in_flight_between_steps(schedule, num_fragments):
    in_flight = Counter()
    is_whole_interval = schedule.overlap_steps == schedule.sync_interval
    for step in range(1, 4 * schedule.sync_interval + 1):
        for round in schedule.launches(step, num_fragments=num_fragments):
            # over a whole interval, a launch comes right before the apply of the last one
            assert in_flight[round.fragment] == 0 or is_whole_interval
            in_flight[round.fragment] += 1
        for round in schedule.applies(step, num_fragments=num_fragments):
            in_flight[round.fragment] -= 1
        assert set(in_flight.values()) <= {0, 1}


@given(schedule=prefetched())
def test_what_is_sent_ahead_leaves_after_the_last_outer_step_and_comes_in_before_the_next(schedule):
    steps = range(1, 5 * schedule.sync_interval + 1)
    launched = [r for step in steps for r in schedule.launches(step, num_fragments=1)]
    applied = [(step, r) for step in steps for r in schedule.applies(step, num_fragments=1)]
    assert [r.id for r in launched] == list(range(len(launched)))
    assert [r.channel for r in launched] == [r.id % 2 for r in launched]
    assert [r for _, r in applied] == launched[: len(applied)]
    assert all(step == r.apply_step >= r.launch_step for step, r in applied)
    for ahead, made in zip(launched[::2], launched[1::2], strict=False):
        assert (ahead.apply_step, made.launch_step % schedule.sync_interval) == (made.apply_step, 0)
        last_outer_step = ahead.apply_step - schedule.sync_interval
        assert ahead.launch_step == last_outer_step + 1, "as soon as it is known, and not while it may still change"


@given(interval=st.integers(2, 200), num_fragments=st.integers(1, 50))
def test_launches_are_spread_as_evenly_as_steps_allow(interval, num_fragments):
    schedule = Staggered(sync_interval=interval)
    per_step = [len(schedule.launches(step, num_fragments=num_fragments)) for step in range(2 * interval, 3 * interval)]
    assert max(per_step) - min(per_step) <= 1


def test_the_papers_example_of_two_fragments_at_interval_100():
    schedule = Staggered(sync_interval=100, overlap_steps=1)
    launches = [(r.fragment, t) for t in range(1, 301) for r in schedule.launches(t, num_fragments=2)]
    assert launches == [(0, 100), (1, 150), (0, 200), (1, 250), (0, 300)]
    applies = [(r.fragment, t) for t in range(1, 301) for r in schedule.applies(t, num_fragments=2)]
    assert applies == [(0, 101), (1, 151), (0, 201), (1, 251)]


@pytest.mark.parametrize(("interval", "tau"), [(0, 0), (-1, 0), (5, 6), (5, -1), (1, 2), (4, (1, 5)), (4, (1, 4))])
def test_impossible_intervals_and_overlaps_are_refused(interval, tau):
    with pytest.raises(ValueError, match=r"sync_interval|overlap_steps"):
        Staggered(sync_interval=interval, overlap_steps=tau)


@pytest.mark.parametrize(("interval", "tau"), [(5, 5), (1, 1), (4, (4, 4)), (4, (1, 7))])
def test_streaming_diloco_takes_no_whole_interval_as_overlap(interval, tau):
    with pytest.raises(ValueError, match="below sync_interval"):
        streaming_diloco(sync_interval=interval, overlap_steps=tau)


@pytest.mark.parametrize(("interval", "tau"), [(0, 0), (5, 5), (5, -1), (5, (1, 2))])
def test_impossible_intervals_and_overlaps_of_what_is_sent_ahead_are_refused(interval, tau):
    with pytest.raises(ValueError, match=r"sync_interval|overlap_steps"):
        Prefetched(sync_interval=interval, overlap_steps=tau)


def test_what_is_sent_ahead_is_the_whole_model():
    with pytest.raises(ValueError, match="num_fragments must be 1"):
        Prefetched(sync_interval=4).check(num_fragments=2, num_replicas=2)


def test_a_list_of_overlaps_must_name_every_replica():
    schedule = Staggered(sync_interval=5, overlap_steps=(1, 2))
    with pytest.raises(ValueError, match="names 2 replicas, but 3 take part"):
        schedule.check(num_fragments=1, num_replicas=3)


@st.composite
def models(draw):
    names = iter(range(10_000))
    blocks = tuple(
        tuple(f"p{next(names)}" for _ in range(draw(st.integers(0, 3)))) for _ in range(draw(st.integers(0, 20)))
    )
    rest = tuple(f"p{next(names)}" for _ in range(draw(st.integers(0, 3))))
    return BlockParameters(blocks=blocks, rest=rest)


@given(
    parameters=models(),
    order=st.sampled_from(["strided", "sequential"]),
    layers=st.integers(1, 25),
    fragments=st.one_of(st.none(), st.integers(1, 25)),
)
def test_every_parameter_is_in_exactly_one_fragment(parameters, order, layers, fragments):
    everything = [name for block in parameters.blocks for name in block] + list(parameters.rest)
    pattern = Pattern(order=order, layers_per_fragment=layers, num_fragments=fragments)
    limit = max(1, sum(1 for block in parameters.blocks if block) + bool(parameters.rest))
    if not everything or (fragments is not None and fragments > limit):
        with pytest.raises(ValueError, match=r"trainable|num_fragments must be at most"):
            pattern.partition(parameters)
        return
    parts = pattern.partition(parameters)
    assert sorted(name for part in parts for name in part) == sorted(everything)
    assert all(parts)
    if fragments is not None:
        # a model whose only parameters are in the rest is one fragment, whatever is asked for
        assert len(parts) == fragments
    elif any(parameters.blocks):
        blocks = sum(1 for block in parameters.blocks if block)
        assert len(parts) == -(-blocks // layers) + bool(parameters.rest)


@pytest.mark.parametrize(("layers", "expected"), [(24, 9), (48, 17), (108, 37)])
def test_three_layers_a_fragment_give_the_papers_number_of_fragments(layers, expected):
    parameters = BlockParameters(blocks=tuple((f"block.{i}",) for i in range(layers)), rest=("embed",))
    assert len(Pattern(layers_per_fragment=3).partition(parameters)) == expected


def test_strided_fragments_interleave_and_sequential_ones_do_not():
    parameters = BlockParameters(blocks=tuple((f"{i}",) for i in range(6)), rest=("embed",))
    assert Pattern(order="strided").partition(parameters) == (("0", "2", "4"), ("1", "3", "5"), ("embed",))
    assert Pattern(order="sequential").partition(parameters) == (("0", "1", "2"), ("3", "4", "5"), ("embed",))


@given(probability=st.floats(0.01, 1), seed=st.integers(0, 1000))
def test_a_random_refresh_comes_first_at_the_first_step_and_rounds_ascend(probability, seed):
    schedule = RandomRefresh(probability=probability, seed=seed)
    by_step = [schedule.launches(step, num_fragments=1, replica=step % 3) for step in range(1, 40)]
    assert [round.channel for round in by_step[0]] == [1, 0]
    ids = [round.id for rounds in by_step for round in rounds]
    assert ids == sorted(set(ids))
    for step, rounds in enumerate(by_step, start=1):
        assert [round.channel for round in rounds] in ([0], [1, 0])
        assert rounds == schedule.applies(step, num_fragments=1)
        assert {(round.launch_step, round.apply_step) for round in rounds} == {(step, step)}


def test_random_refreshes_come_as_often_as_they_should_and_refuse_what_they_cannot_do():
    schedule = RandomRefresh(probability=0.2)
    assert abs(sum(len(schedule.launches(t, num_fragments=1)) - 1 for t in range(1, 3001)) / 3000 - 0.2) < 0.03
    with pytest.raises(ValueError, match="one fragment, got 2"):
        schedule.check(num_fragments=2, num_replicas=3)
    for bad in (0.0, 1.1):
        with pytest.raises(ValueError, match=r"probability must be in \(0, 1\]"):
            RandomRefresh(probability=bad)
