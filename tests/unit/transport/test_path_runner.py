"""Micro-batches on paths of their own: the gradients of one process that leaves the other stages out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from thinwire.codecs.activation_code import ActivationCode
from thinwire.errors import DeadlineExceeded, NonFiniteError, PayloadError
from thinwire.site.skip_paths import SkipNetwork, orders_of, run_paths
from thinwire.transport.loopback import LoopbackTransport, run_replicas
from thinwire.transport.path_runner import PathRunner, PathStep

WIDTH, NODES = 7, 5
FLOAT32 = ActivationCode("float32", "float32")
CPU = torch.device("cpu")
# One stage each, in any order, also the first one alone; nodes 0 and 1 both hold the first stage.
PATHS = ((0, 2, 3, 4), (0, 3, 2), (1, 4), (0,), (1, 2, 4, 3), (0, 3))
ROWS = (3, 2, 3, 1, 3, 2)
WEIGHTS = tuple(rows / sum(ROWS) for rows in ROWS)


def parts() -> list[nn.Sequential]:
    torch.manual_seed(3)
    found = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NODES)]
    found[1].load_state_dict(found[0].state_dict())
    return found


def batch() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return tuple([torch.randn(rows, WIDTH, generator=generator) for rows in ROWS] for _ in range(2))  # type: ignore[return-value]


def step_of(paths: Any = PATHS, *, number: int = 1, weights: Any = WEIGHTS) -> PathStep:
    network = SkipNetwork(stages=((0, 1), (2,), (3,), (4,)), forward_s=(1.0,) * NODES,
                          delay_s=((1.0,) * NODES,) * NODES, memory=len(paths))  # fmt: skip
    passes = run_paths(network, paths, [0.0] * len(paths))
    return PathStep(number=number, paths=tuple(paths), orders=orders_of(passes), weights=weights)


def node(transport: LoopbackTransport, *, step: PathStep, code: ActivationCode = FLOAT32,
         spoil: Any = None) -> tuple[list[torch.Tensor | None], dict[int, float]]:  # fmt: skip
    part, (rows, wanted) = parts()[transport.replica], batch()
    if spoil is not None:
        spoil(transport, part)
    runner = PathRunner(part, part.parameters(), transport=transport, code=code, device=CPU,
                        loss=lambda found, number: (found - wanted[number]).square().mean())  # fmt: skip
    shapes = [one.shape for one in rows]
    losses = runner.run(step, shapes=shapes, inputs=rows)
    return [one.grad for one in part.parameters()], {number: float(loss) for number, loss in losses.items()}


def in_one_process(paths: Any = PATHS, weights: Any = WEIGHTS) -> tuple[list[list[torch.Tensor]], list[float]]:
    """Return the gradients of each node, divided by the weight of its visitors, and the losses."""
    stages, (rows, wanted) = parts(), batch()
    losses = []
    for number, path in enumerate(paths):
        found = rows[number]
        for place in path:
            found = stages[place](found)
        loss = (found - wanted[number]).square().mean()
        (loss * weights[number]).backward()
        losses.append(loss.item())
    share = [
        sum(weight for path, weight in zip(paths, weights, strict=True) if place in path) for place in range(NODES)
    ]
    return [[one.grad / share[place] for one in stage.parameters() if one.grad is not None]
            for place, stage in enumerate(stages)], losses  # fmt: skip


def assert_alike(found: Any, expected: list[list[torch.Tensor]]) -> None:
    for (own, _), wanted in zip(found, expected, strict=True):
        own = [one for one in own if one is not None]
        assert len(own) == len(wanted)
        for one, other in zip(own, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_gradients_are_those_of_one_process_without_the_skipped_stages() -> None:
    found = run_replicas(NODES, lambda transport: node(transport, step=step_of()))
    expected, losses = in_one_process()
    assert_alike(found, expected)
    assert {**found[0][1], **found[1][1]} == pytest.approx(dict(enumerate(losses)))
    assert sorted(found[0][1]) == [0, 1, 3, 5] and not found[2][1]


def test_a_stage_is_divided_by_the_micro_batches_that_visited_it() -> None:
    # two of six equal micro-batches visit node 4: their mean, three times their part of the mean over all
    paths, weights = ((0, 4), (0,), (0,), (0, 4), (0,), (0,)), (1 / 6,) * 6
    found = run_replicas(NODES, lambda transport: node(transport, step=step_of(paths, weights=weights)))
    stages, (rows, wanted) = parts(), batch()
    for number in (0, 3):
        loss = (stages[4](stages[0](rows[number])) - wanted[number]).square().mean()
        (loss / 2).backward()
    for own, one in zip(found[4][0], stages[4].parameters(), strict=True):
        assert own is not None
        torch.testing.assert_close(own, one.grad, rtol=1e-6, atol=1e-7)
    assert found[2][0] == [None, None]  # visited by none


def test_a_stage_that_padding_alone_visited_has_no_gradient() -> None:
    paths, weights = ((0, 4), (0,), (0,), (0, 4), (0,), (0,)), (0.0, 0.25, 0.25, 0.0, 0.25, 0.25)
    found = run_replicas(NODES, lambda transport: node(transport, step=step_of(paths, weights=weights)))
    assert all(one is not None and not one.any() for one in found[4][0])  # NaN would be something
    assert all(one is not None and bool(one.isfinite().all()) for one in found[0][0])


def test_a_node_may_be_left_out_for_a_step_and_take_part_again() -> None:
    without = ((0, 2, 3), (0, 3, 2), (1,), (0,), (1, 2, 3), (0, 3))
    steps = [step_of(number=1), step_of(without, number=2), step_of(number=3)]

    def three(transport: LoopbackTransport) -> Any:
        return [node(transport, step=step) for step in steps if transport.replica in step.orders]

    found = run_replicas(NODES, three)
    assert [len(one) for one in found] == [3, 3, 3, 3, 2]
    whole, part = in_one_process()[0], in_one_process(without)[0]
    assert_alike([one[0] for one in found], whole)
    assert_alike([*(one[1] for one in found[:4]), ([], {})], part)
    assert_alike([one[-1] for one in found], whole)


def test_a_code_changes_messages_alone() -> None:
    exact, coded = (
        run_replicas(NODES, lambda transport, code=code: node(transport, step=step_of(), code=code))
        for code in (FLOAT32, ActivationCode("block-int8", "block-int8"))
    )
    for (own, _), (other, _) in zip(exact, coded, strict=True):
        for one, two in zip(own, other, strict=True):
            assert one is not None and two is not None
            error = (one - two).norm() / one.norm()
            assert 0 < error < 0.05
    assert exact[0][1][3] == coded[0][1][3]  # a path of one node has no messages


def test_what_other_nodes_send_is_checked() -> None:
    def other_code(transport: LoopbackTransport) -> Any:
        # the same size, and other values
        return node(
            transport,
            step=step_of(),
            code=ActivationCode("bfloat16" if transport.replica == 3 else "float16", "float32"),
        )

    with pytest.raises(PayloadError, match="micro-batch 1: it has another activation code than bfloat16/float32"):
        run_replicas(NODES, other_code)

    def break_weight(transport: LoopbackTransport, part: nn.Sequential) -> None:
        if transport.replica == 2:
            part[0].weight.data.fill_(torch.nan)

    with pytest.raises(NonFiniteError, match=r"node 2, micro-batch \d: activations hold NaN"):
        run_replicas(NODES, lambda transport: node(transport, step=step_of(), spoil=break_weight))

    def lose(transport: LoopbackTransport, part: nn.Sequential) -> None:
        if transport.replica == 3:
            transport.tamper = lambda message: None

    with pytest.raises(DeadlineExceeded, match="replica 3"):
        run_replicas(NODES, lambda transport: node(transport, step=step_of(), spoil=lose))


def test_steps_that_cannot_run_are_refused() -> None:
    good = step_of()
    for change, text in (
        ({"weights": (1.0,)}, "6 and 1; allowed 1 to 4096 of each"),
        ({"paths": ((0, 2, 0), *PATHS[1:])}, r"got \(0, 2, 0\)"),
        ({"paths": ((), *PATHS[1:])}, r"got \(\)"),
        ({"orders": {**good.orders, 3: good.orders[3][1:]}}, "got 37 passes; allowed the 38 passes"),
        ({"orders": {**good.orders, 3: good.orders[4]}}, "orders of the nodes must hold each pass once"),
    ):
        about = {"number": 1, "paths": good.paths, "orders": good.orders, "weights": good.weights, **change}
        with pytest.raises(ValueError, match=text):
            PathStep(**about)
