"""Sign masks, masked adapters, orthogonal tasks, and prompt and tail, as clients of a wrapped strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from in_process_grid import InProcessGrid, walking_app
from torch import nn

from thinwire.errors import PayloadError
from thinwire.integrations import flower as thin
from thinwire.integrations.flower.orthogonal import sketches_of
from thinwire.integrations.flower.updates import ArrayLayout
from thinwire.split import SoftPrompt

Arrays = dict[str, Any]


def record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: torch.as_tensor(array) for name, array in arrays.items()})


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 33), nn.ReLU(), nn.Linear(33, 5))


def rounds_of(strategy: Any, grid: InProcessGrid, arrays: ArrayRecord, count: int) -> Iterator[ArrayRecord]:
    """Yield the arrays after each round."""
    for round in range(1, count + 1):
        messages = strategy.configure_train(round, arrays, ConfigRecord({}), grid)
        arrays, _ = strategy.aggregate_train(round, grid.send_and_receive(messages))
        yield arrays


def test_sign_masks_travel_as_one_bit_a_kept_weight_and_rebuild_the_model() -> None:
    model, other = network(), network(1)
    tag = thin.sign_mask(model, keep=0.5, seed=3)
    assert tag == thin.sign_mask(other, keep=0.5, seed=3)  # seed and bits are all that a model is
    state = thin.mask_state(model)
    kept = sum(one.numel() for one in state.values())
    assert kept == (9 * 33 + 33 * 5) // 2
    signs = {name: torch.where(torch.rand(one.shape) < 0.3, -0.01, 0.01) for name, one in state.items()}
    thin.load_subset(model, signs)
    thin.load_subset(other, signs)
    inputs = torch.randn(4, 9)
    assert torch.equal(model(inputs), other(inputs))

    def step(node: int, round: int, arrays: Arrays) -> Arrays:
        rng = np.random.default_rng([node, round])
        return {
            name: (array + 0.015 * rng.normal(size=array.shape)).astype(np.float32) for name, array in arrays.items()
        }

    up, down = thin.Uplink("sign", sends="signs", tag=tag), thin.Downlink("sign", sends="values")
    grid = InProcessGrid(walking_app([thin.client_mod(up)], step), 3)
    strategy = thin.wrap(FedAvg(fraction_evaluate=0.0), up, down=down, rules=[thin.MajoritySigns()])
    held = {name: one.numpy() for name, one in signs.items()}
    for round, found in enumerate(rounds_of(strategy, grid, record(signs), 3), 1):
        total = {name: np.zeros(one.shape) for name, one in held.items()}
        for node in range(3):  # a naive reference: node n has n + 1 examples
            for name, one in step(node, round, held).items():
                total[name] += (node + 1) * np.where(one < 0, -1.0, 1.0)
        expected = {
            name: np.where(one == 0, held[name], np.where(one < 0, -0.01, 0.01)).astype(np.float32)
            for name, one in total.items()
        }  # fmt: skip
        assert all(np.array_equal(found[name].numpy(), expected[name]) for name in expected)
        held = expected
    assert strategy.rounds[-1].num_rejected == 0 and strategy.rounds[-1].clients == 3
    for message in grid.received[3:]:
        # a header, two bytes of types, a scale, and a bit a kept weight
        assert message.content["arrays"]["thinwire"].numpy().size == 56 + 2 + 4 + math.ceil(kept / 8)


def test_signs_for_another_mask_are_refused_by_the_hash() -> None:
    model, other = network(), network()
    up = thin.Uplink("sign", sends="signs", tag=thin.sign_mask(model, seed=3))
    lost = thin.Uplink("sign", sends="signs", tag=thin.sign_mask(other, seed=4))
    assert up.tag != lost.tag

    def forge(text: str) -> Any:
        def mod(message: Message, context: Context, call_next: Any) -> Message:
            message.content["thinwire"]["up"] = text  # as a client whose user changed what is compared
            return thin.client_mod(lost)(message, context, call_next)

        return mod

    grid = InProcessGrid(walking_app([forge(lost.text())], lambda node, round, arrays: arrays), 2)
    strategy = thin.wrap(FedAvg(fraction_evaluate=0.0), up)
    next(rounds_of(strategy, grid, record(thin.mask_state(model)), 1))
    assert strategy.rounds[0].clients == 0
    assert all("names, shapes or tag" in reason for reason in strategy.rounds[0].rejected.values())


def naive_top(vector: np.ndarray, density: float) -> np.ndarray:
    count = math.ceil(round(density * vector.size, 6))
    kept = np.argsort(-np.abs(vector), kind="stable")[:count]
    masked = np.zeros_like(vector)
    masked[kept] = vector[kept]
    return masked


def test_masks_of_adapters_up_and_down_are_those_of_a_naive_reference_and_the_base_never_travels() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"base": nn.Linear(99, 99), "lora_A": nn.Linear(99, 40), "lora_B": nn.Linear(40, 99)})
    start = {name: one.numpy().copy() for name, one in thin.subset_state(model, "lora").items()}
    assert len(start) == 4 and not any(name.startswith("base") for name in start)
    layout, got, densities = ArrayLayout.of(start), dict[int, np.ndarray](), {0: 1 / 16, 1: 1 / 4, 2: 1.0}
    tiers = {"phone": 1 / 16, "pc": 1.0}
    up = thin.Uplink("top-k", density=1 / 4, values="float32", error_feedback=False, tiers=tiers)
    down = thin.Downlink("top-k", density=1 / 4, values="float32", sends="values", tiers=tiers)

    def step(node: int, round: int, arrays: Arrays) -> Arrays:
        got[node] = layout.flat(arrays).numpy()
        rng = np.random.default_rng([node, round])
        return {name: (array + rng.normal(size=array.shape)).astype(np.float32) for name, array in arrays.items()}

    names = {0: {"tier": "phone"}, 1: {}, 2: {"tier": "pc"}}
    grid = InProcessGrid(walking_app([thin.client_mod(up)], step), 3, names.__getitem__)
    strategy = thin.wrap(FedAdam(fraction_evaluate=0.0, eta=0.005), up, down=down)
    reference = FedAdam(fraction_evaluate=0.0, eta=0.005)
    arrays = record(start)
    for round, found in enumerate(rounds_of(strategy, grid, arrays, 3), 1):
        before = layout.flat({name: one.numpy() for name, one in arrays.items()}).numpy()
        replies = []
        for node in range(3):
            # until its first reply names the tier, a node gets the smallest density
            masked = naive_top(before.astype(np.float32), densities[node if round > 1 else 0])
            assert np.array_equal(got[node].astype(np.float32), masked)
            trained = layout.flat(step(node, round, _named(layout, got[node].astype(np.float32)))).numpy()
            sent = naive_top((trained - masked).astype(np.float32), densities[node])
            replies.append(_reply(_named(layout, (before + sent).astype(np.float32)), node))
        reference.current_arrays = {name: one.numpy() for name, one in arrays.items()}
        expected, _ = reference.aggregate_train(round, replies)
        for name in start:
            assert np.allclose(found[name].numpy(), expected[name].numpy(), atol=1e-6)
        arrays = found
    for message in grid.received[3:]:
        density = densities[message.metadata.dst_node_id - 1000]
        # the law: a header, 2 bytes of types, and for each value 4 bytes and its gap's entropy, but a bit at least
        gap = -math.log2(density) - (1 - density) / density * math.log2(1 - density) if density < 1 else 1.0
        law = 56 + 2 + math.ceil(density * layout.numel) * (4 + gap / 8)
        size = message.content["arrays"]["thinwire"].numpy().size
        assert abs(size - law) <= 0.01 * law, (density, size, law)


def _named(layout: ArrayLayout, flat: np.ndarray) -> Arrays:
    parts = np.split(flat, np.cumsum(layout.sizes)[:-1])
    return {name: part.reshape(shape) for name, part, shape in zip(layout.names, parts, layout.shapes, strict=True)}


def _reply(arrays: Arrays, node: int) -> Message:
    asked = Message(RecordDict(), dst_node_id=node, message_type="train")
    metrics = MetricRecord({"num-examples": node + 1})
    return Message(RecordDict({"arrays": record(arrays), "metrics": metrics}), reply_to=asked)


def test_sfprompts_third_phase_sends_prompt_and_tail_once_each_way_and_the_first_sends_nothing() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(64, 64), "prompt": SoftPrompt(5, 64), "tail": nn.Linear(64, 2011)})
    model["body"].requires_grad_(False)
    state = thin.subset_state(model)
    assert list(state) == ["prompt.vectors", "tail.weight", "tail.bias"]
    assert list(state) == list(thin.subset_state(model, ["prompt.*", "tail.*"]))
    numel = sum(one.numel() for one in state.values())
    up, down = thin.Uplink("bfloat16"), thin.Downlink("bfloat16")
    grid = InProcessGrid(walking_app([thin.client_mod(up)], lambda node, round, arrays: arrays), 2)
    strategy = thin.wrap(FedAvg(fraction_evaluate=0.0), up, down=down)
    [*_, last] = rounds_of(strategy, grid, record(state), 3)
    # both phases before this one are the client's own, and the split session's: no message of Flower
    sizes = [message.content["arrays"] for message in grid.received]
    assert len(sizes) == 3 * 2
    law = 2 * numel * 16 // 8
    row = strategy.rounds[-1]
    assert [one["thinwire"].numpy().size for one in sizes[4:]] == [56 + 2 + numel * 2] * 2
    assert law < (row.up_bytes + row.down_bytes) / 2 <= 1.01 * law  # of a client and round, as Flower serialises it
    thin.load_subset(model, last.to_torch_state_dict())
    with pytest.raises(ValueError, match="no such parameter"):
        thin.load_subset(model, {"body.other": torch.zeros(1)})
    with pytest.raises(ValueError, match="no parameter belongs"):
        thin.subset_state(model, "lora")


def test_bases_and_projected_steps_are_those_of_float64() -> None:
    rng = np.random.default_rng(0)
    model = nn.Linear(20, 7, bias=False)
    data = [rng.normal(size=(40, 6)) @ rng.normal(size=(6, 20)) + 0.01 * rng.normal(size=(40, 20)) for _ in range(3)]
    rule = thin.OrthogonalTasks(eps=0.96)
    weights = {"weight": (7, 20)}
    for task in range(2):
        own = [torch.from_numpy(one[:, :: 1 if task else -1].copy()).float() for one in data]
        sketches = [
            sketches_of(nn.Sequential(model), [one[:17], one[17:]], bases=_renamed(rule.settings()), seed=node)
            for node, one in enumerate(own)
        ]
        before = rule.bases.get("weight", np.zeros((20, 0)))
        sketches = [({key.replace("0.", ""): one for key, one in found.items()}, count) for found, count in sketches]
        for found, _ in sketches:
            rule.check(found, weights)
        rank = rule.extend(sketches)["weight"]
        # reference, as the paper writes it
        rest = [one.double().numpy() - one.double().numpy() @ before @ before.T for one in own]
        ratio = np.mean([np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(rest, own, strict=True)])
        wanted = (ratio - 0.04) / ratio
        left, singular, _ = np.linalg.svd(
            sum(found["weight.sketch"].astype(np.float64) * found["weight.ratio"][1] for found, _ in sketches)
        )
        energy = np.cumsum(singular**2) / np.sum(singular**2)
        new = int((energy <= wanted).sum()) + 1
        assert rank == before.shape[1] + new
        expected, _ = np.linalg.qr(np.concatenate([before, left[:, :new]], axis=1))
        assert np.allclose(rule.bases["weight"] @ rule.bases["weight"].T, expected @ expected.T, atol=1e-9)
    old, after = rng.normal(size=(7, 20)).astype(np.float32), rng.normal(size=(7, 20)).astype(np.float32)
    basis = rule.bases["weight"]
    found = rule.project({"weight": old, "b": old[0]}, {"weight": after, "b": after[0]})
    step = old.astype(np.float64) - after
    assert np.allclose(found["weight"], old - (step - step @ basis @ basis.T), atol=1e-6)
    assert np.array_equal(found["b"], after[0])
    assert np.abs((old - found["weight"].astype(np.float64)) @ basis).max() < 1e-5  # old inputs see no change


def _renamed(bases: Arrays) -> Arrays:
    return {f"0.{name}": one for name, one in bases.items()}


def test_a_task_ends_by_a_coded_query_whose_bad_answers_are_refused() -> None:
    model, torn, up = network(), network(), thin.Uplink("e3m0")
    app = ClientApp(mods=[thin.client_mod(up)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content = RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    @app.query("sketch")
    def sketch(message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        torch.manual_seed(node)
        reply = thin.sketch_reply(message, context, torn, [torch.randn(30, 9)])
        found = {name: one.numpy() for name, one in reply.content["sketch"].items()}
        if node == 0:
            reply.content["sketch"] = record({"0.weight.sketch": np.zeros((4, 4), np.float32)})
        if node == 1:
            reply.content["sketch"] = record({name: np.full_like(one, np.nan) for name, one in found.items()})
        if node == 2:
            reply.content["metrics"] = MetricRecord({"other": 1})
        if node == 5:
            reply.content["metrics"] = MetricRecord({"num-examples": math.inf})
        if node == 6:
            reply.content["sketch"] = MetricRecord({"0.weight.sketch": 1})
        if node == 7:
            reply.content["sketch"] = record({name: one * np.float32(-1) for name, one in found.items()})
        return reply

    rule, grid = thin.OrthogonalTasks(eps=0.9), InProcessGrid(app, 8)
    strategy = thin.wrap(FedAvg(fraction_evaluate=0.0), up, down=thin.Downlink("e3m0"), rules=[rule])
    [*_, arrays] = rounds_of(strategy, grid, ArrayRecord(model.state_dict()), 1)
    del grid.contexts[1003].state["thinwire.held"]
    grid.received.clear()
    ranks = strategy.end_task(grid, arrays)
    row = strategy.rounds[-1]
    assert (row.clients, row.num_rejected, row.num_stale) == (2, 6, 1)
    assert set(row.rejected) == {1000, 1001, 1002, 1005, 1006, 1007}
    # differences to all, and the whole model to the one that lost its version
    assert [list(one.content["arrays"]) == ["thinwire"] for one in grid.received] == [True] * 8 + [False]
    [held] = strategy._broadcast.held
    assert all(np.array_equal(one.numpy(), held[name]) for name, one in torn.state_dict().items())
    assert ranks.keys() == {"0.weight", "2.weight"} and all(0 < rank <= 33 for rank in ranks.values())
    with pytest.raises(ValueError, match="learns no basis"):
        thin.wrap(FedAvg(), up).end_task(None, None)
    with pytest.raises(PayloadError, match="no matrix of the model"):
        rule.check({"x.sketch": np.zeros((1, 1), np.float32)}, {"w": (1, 1)})
