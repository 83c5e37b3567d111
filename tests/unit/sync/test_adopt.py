"""A run goes on with another number of replicas: what still holds stays, the rest begins anew and is named."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.small_models import build
from thinwire.codecs import block_int8, float32
from thinwire.errors import CheckpointError
from thinwire.methods import co2, default_outer_lr, diloco, noloco, recipe, streaming_diloco
from thinwire.sync.outer_optimizer import PlainSGD
from thinwire.transport.loopback import LoopbackTransport, single

State = tuple[dict[str, Any], dict[str, Any]]
# those whose update does more than take gradients or pseudo-gradients, at steps where something is remembered
METHODS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "diloco": {"sync_interval": 4},
    "streaming-diloco": {"sync_interval": 5, "overlap_steps": 3, "layers_per_fragment": 2},
    "co2": {"sync_interval": 4},
    "slowmo": {"sync_interval": 4},
    "iso-loco": {"sync_interval": 4},
    "muloco": {"sync_interval": 4},
    "sparse-loco": {"sync_interval": 4, "k": 4, "chunk": 32},
    "streaming-sparse-loco": {"sync_interval": 5, "overlap_steps": 3, "k": 4, "chunk": 32},
    "power-sgd": {"rank": 2},
    "ef21": {},
    "one-bit-adam": {"warmup_steps": 3},
    "zero-one-adam": {"variance_steps": 4, "variance_updates": 2, "local_doubling_steps": 2, "max_local_steps": 4},
}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


@functools.cache
def begin(name: str, *, replicas: int, count: int) -> list[State]:
    """Train so many replicas; callers share what is returned and copy what they change."""

    def replica_main(transport: LoopbackTransport) -> State:
        model = build("transformer")
        optimizer = wrap(model, transport, recipe(name)(**METHODS[name]), adamw(model))
        steps(model, optimizer, count, replica=transport.replica)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    return list(thinwire.run_replicas(replicas, replica_main))


def go_on(
    name: str, states: list[State], *, replicas: int, count: int, start: int, before: int = 0, **options: Any
) -> list[dict[str, Any]]:
    """Go on for `count` steps in new objects; `before` that, the optimizer has done so many steps of its own."""

    def replica_main(transport: LoopbackTransport) -> dict[str, Any]:
        model = build("transformer", seed=9)
        optimizer = wrap(model, transport, recipe(name)(**METHODS[name] | options), adamw(model))
        weights, state = copy.deepcopy(states[transport.replica % len(states)])
        steps(model, optimizer, before, replica=transport.replica, start=50)
        model.load_state_dict(weights)
        anew = optimizer.adopt_state_dict(state)
        sync = copy.deepcopy(optimizer.state_dict()["sync"])
        locals_ = values(model)
        steps(model, optimizer, count, replica=transport.replica, start=start)
        optimizer.close(final_exchange=True)
        with optimizer.global_parameters():
            return {
                "values": values(model),
                "anew": anew,
                "exchanges": sync["exchanges"],
                "sync": sync,
                "locals": locals_,
            }

    return list(thinwire.run_replicas(replicas, replica_main))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("replicas", [1, 5])
def test_fewer_and_more_replicas_go_on_and_agree(name: str, replicas: int) -> None:
    states = begin(name, replicas=3, count=7)
    found = go_on(name, states, replicas=replicas, count=9, start=7)
    assert all(same(found[0]["values"], other["values"]) for other in found)
    assert all(torch.isfinite(value).all() for value in found[0]["values"])


def test_what_a_replica_has_not_sent_stays_with_it_alone_and_a_new_one_says_what_begins_anew() -> None:
    states = begin("sparse-loco", replicas=2, count=8)
    found = go_on("sparse-loco", states, replicas=3, count=1, start=8)
    kept = [state["sync"]["exchanges"]["0"]["0"]["out"] for _, state in states]
    for replica in (0, 1):
        mine = found[replica]["exchanges"]["0"]["0"]["out"]
        assert all(torch.equal(mine[key], kept[replica][key]) for key in mine) and found[replica]["anew"] == ()
    assert all(not vector.any() for vector in found[2]["exchanges"]["0"]["0"]["out"].values())
    assert found[2]["anew"] == (
        "local parameters: what replica 0 has trained since its last exchange",
        "channel 0, fragment 0: what was not sent yet",
    )


def test_a_memory_that_begins_anew_holds_nothing_of_what_the_optimizer_did_before() -> None:
    states = begin("ef21", replicas=2, count=3)
    for one in go_on("ef21", states, replicas=3, count=1, start=3, before=2):
        hop = one["exchanges"]["0"]["0"]["out"]
        assert set(hop) == {"own", "shared", "velocity", "has_started"} and not any(
            vector.any() for vector in hop.values()
        )


def test_a_state_that_comes_before_its_model_is_refused_with_a_remedy_that_works() -> None:
    """Whose local parameters come after it would count work twice; those of a saved global model are welcome."""
    states = begin("diloco", replicas=2, count=7)
    for number in (0, 1):
        model = build("transformer", seed=9)
        optimizer = wrap(model, single(), recipe("diloco")(sync_interval=4), adamw(model))
        weights, state = copy.deepcopy(states[number])
        with pytest.raises(CheckpointError, match=rf"what replica {number} had trained .*; load its model first, with"):
            optimizer.adopt_state_dict(copy.deepcopy(state))
        model.load_state_dict(weights)
        optimizer.adopt_state_dict(copy.deepcopy(state))
        with optimizer.global_parameters():
            of_all = copy.deepcopy(model.state_dict())
        model.load_state_dict(of_all)
        optimizer.adopt_state_dict(state)


def trained(weights: dict[str, Any]) -> list[torch.Tensor]:
    model = build("transformer")
    model.load_state_dict(weights)
    return values(model)


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]).sort().values


@pytest.mark.parametrize("name", ["diloco", "streaming-diloco", "co2", "zero-one-adam"])
def test_what_another_replica_has_trained_since_its_last_exchange_is_not_counted_twice(name: str) -> None:
    states = begin(name, replicas=2, count=11)
    found = go_on(name, states, replicas=3, count=1, start=11)
    kept = [trained(weights) for weights, _ in states]
    assert all(same(found[number]["locals"], kept[number]) for number in (0, 1)), "a replica keeps its own work"
    # fragments have an order of their own
    expected = torch.cat([*states[0][1]["sync"]["global"].values()]).sort().values
    assert not torch.equal(flat(kept[0]), expected), "there was work that could be counted twice"
    assert torch.equal(flat(found[2]["locals"]), expected), "a new one begins from the global value"
    assert found[2]["anew"][0].startswith("local parameters: what replica 0 has trained")


@pytest.mark.parametrize("number", [None, 0, "2"])
def test_a_damaged_number_of_replicas_is_named(number: object) -> None:
    model = build("transformer")
    optimizer = wrap(model, single(), diloco(sync_interval=4), adamw(model))
    state = optimizer.state_dict()
    state["sync"]["num_replicas"] = number
    with pytest.raises(CheckpointError, match=r"num_replicas must be at least 1, got .* damaged"):
        optimizer.adopt_state_dict(state)


def test_twins_begin_anew_on_all_so_that_both_ends_agree() -> None:
    found = go_on("ef21", begin("ef21", replicas=2, count=3), replicas=2, count=4, start=3)
    assert all("what was not sent yet" in " ".join(one["anew"]) for one in found)


def test_a_round_in_flight_is_applied_when_it_is_due_as_the_old_replicas_made_it() -> None:
    """Everything had arrived; the value after it is the one that the old run came to."""

    def whole(transport: LoopbackTransport) -> list[torch.Tensor]:
        model = build("transformer")
        optimizer = wrap(model, transport, diloco(sync_interval=4), adamw(model))
        steps(model, optimizer, 4, replica=transport.replica)
        with optimizer.global_parameters():
            return values(model)

    late = streaming_diloco(
        sync_interval=4, overlap_steps=3, num_fragments=1, blend=0, codec=float32(), outer_lr=default_outer_lr(2)
    )

    def saved(transport: LoopbackTransport) -> State:
        model = build("transformer")
        optimizer = wrap(model, transport, late, adamw(model))
        steps(model, optimizer, 5, replica=transport.replica)
        assert optimizer.rounds_in_flight
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def adopted(transport: LoopbackTransport) -> list[torch.Tensor]:
        model = build("transformer", seed=4)
        optimizer = wrap(model, transport, late, adamw(model))
        model.load_state_dict(states[transport.replica][0])
        optimizer.adopt_state_dict(copy.deepcopy(states[transport.replica][1]))
        assert optimizer.rounds_in_flight
        steps(model, optimizer, 2, start=5)
        assert not optimizer.rounds_in_flight
        with optimizer.global_parameters():
            return values(model)

    expected = thinwire.run_replicas(2, whole)[0]
    states = list(thinwire.run_replicas(2, saved))
    (found,) = thinwire.run_replicas(1, adopted)
    assert same(found, expected)


def test_replicas_with_models_of_their_own_are_refused_with_what_to_do() -> None:
    def replica_main(transport: LoopbackTransport) -> None:
        model = build("transformer")
        optimizer = wrap(model, transport, noloco(sync_interval=4), adamw(model))
        with pytest.raises(CheckpointError, match=r"noloco keeps a model of its own .* final exchange"):
            optimizer.adopt_state_dict(optimizer.state_dict())

    thinwire.run_replicas(2, replica_main)


def test_another_method_is_refused() -> None:
    def replica_main(transport: LoopbackTransport) -> None:
        model = build("transformer")
        twin = build("transformer")
        other = wrap(twin, transport, diloco(sync_interval=4), adamw(twin))
        optimizer = wrap(model, transport, co2(sync_interval=4), adamw(model))
        with pytest.raises(CheckpointError, match=r"the checkpoint's method is .*diloco.*this run's is .*co2"):
            optimizer.adopt_state_dict(other.state_dict())

    thinwire.run_replicas(2, replica_main)


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("diloco", {"sync_interval": 7}),
    ("diloco", {"outer_lr": 0.3}),
    ("diloco", {"codec": block_int8()}),
    ("streaming-diloco", {"sync_interval": 8}),
    ("streaming-diloco", {"sync_interval": 3, "overlap_steps": 1}),
    ("streaming-diloco", {"overlap_steps": 4}),
    ("streaming-diloco", {"codec": float32(), "outer_lr": 0.9, "blend": 0.0}),
    ("iso-loco", {"sync_interval": 6}),
    ("muloco", {"sync_interval": 6}),
    ("slowmo", {"sync_interval": 6}),
    ("sparse-loco", {"sync_interval": 6, "k": 2}),
    ("streaming-sparse-loco", {"sync_interval": 6, "overlap_steps": 2}),
]


@pytest.mark.parametrize(("name", "options"), CHANGES)
def test_another_interval_overlap_codec_or_outer_rate_keeps_global_values_and_outer_state(
    name: str, options: dict[str, Any]
) -> None:
    states = begin(name, replicas=2, count=8)
    found = go_on(name, states, replicas=2, count=15, start=8, **options)
    for number, one in enumerate(found):
        saved = states[number][1]["sync"]
        for part in ("global", "update"):
            assert equal(one["sync"][part], saved[part]), part
        assert equal(one["sync"]["exchanges"], saved["exchanges"])
        is_same_schedule = not {"sync_interval", "overlap_steps"} & set(options)
        dropped = [flight["id"] for flight in saved["in_flight"]] if not is_same_schedule else []
        assert one["anew"] == (
            (f"the rounds in flight (number {', '.join(map(str, dropped))}): what they hold goes into the next ones",)
            if dropped else ()
        )  # fmt: skip
    assert same(found[0]["values"], found[1]["values"])
    assert not same(found[0]["values"], [*trained(states[0][0])])
    assert all(torch.isfinite(value).all() for value in found[0]["values"])


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_what_does_not_fit_the_new_options_is_named() -> None:
    states = begin("diloco", replicas=2, count=8)
    (one, _) = go_on("diloco", states, replicas=2, count=4, start=8, outer_optimizer=PlainSGD(lr=0.5))
    assert one["anew"] == (
        "outer state: the checkpoint holds 1 times what is called outer momentum, this run 0 times; resume with its "
        "method and model, and its layers_per_fragment",
    )
    states = begin("power-sgd", replicas=2, count=3)
    (one, _) = go_on("power-sgd", states, replicas=2, count=4, start=3, rank=1)
    (line,) = one["anew"]
    assert line.startswith(
        "channel 0: the checkpoint's thin matrix, as wide as the method's rank, number 0 has the shape"
    )


def test_other_options_are_refused_by_a_plain_load_which_names_the_way() -> None:
    weights, state = begin("diloco", replicas=2, count=8)[0]
    model = build("transformer")
    optimizer = wrap(model, single(), diloco(sync_interval=9), adamw(model))
    with pytest.raises(CheckpointError, match=r"sync_interval=4.*sync_interval=9.*; adopt_state_dict\(\) goes on"):
        optimizer.load_state_dict(copy.deepcopy(state))
    model.load_state_dict(weights)
    assert optimizer.adopt_state_dict(copy.deepcopy(state)) == ()
    assert optimizer.steps_done == 8


def test_another_schedule_is_refused_where_several_things_that_belong_together_are_under_way() -> None:
    model = build("transformer")

    def two_channels(sync_interval):
        plain = streaming_diloco(sync_interval=sync_interval, overlap_steps=3)
        return replace(plain, exchange=lambda num_replicas: plain.exchanges(num_replicas) * 2)

    optimizer = wrap(model, single(), two_channels(5), adamw(model))
    steps(model, optimizer, 12)
    assert optimizer.rounds_in_flight
    state = copy.deepcopy(optimizer.state_dict())
    other = wrap(model, single(), two_channels(8), adamw(model))
    with pytest.raises(CheckpointError, match="sends several things that belong together"):
        other.adopt_state_dict(state)
