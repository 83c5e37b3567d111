"""DIMAT against plain loops, local SGD, and models whose hidden units were permuted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import thinwire
from benchmarks.methods.images import Digits, accuracy, convnet, load_digits, train
from benchmarks.methods.images import batches as labelled
from tests.directed_graphs import Exponential, OnePeerExponential
from tests.reference.loops import same, steps, values, wrap
from tests.reference.small_models import build
from thinwire.averaging.mixing import Edges, Neighbours, Ring
from thinwire.errors import NonFiniteError
from thinwire.methods import dimat, local_sgd
from thinwire.methods.dimat import MatchedMerge, Parameters
from thinwire.methods.dimat.matching import permute
from thinwire.methods.dimat.permutation_graph import find_permutations
from thinwire.sync.method import Method
from thinwire.sync.updates import InnerStep
from thinwire.sync.views import PseudoGradient
from thinwire.transport.loopback import LoopbackTransport
from thinwire.transport.recording import RecordingTransport

STAR = Edges(edges=((0, 1), (0, 2), (0, 3)))


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits()


def still(model: nn.Module) -> torch.optim.Optimizer:
    """Return an inner optimizer that does not move the model."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def calibration(digits: Digits, *, replica: int = 0) -> list[torch.Tensor]:
    """Return images of a replica's own, in batches."""
    return list(digits.train_images[replica::4].split(64)[:5])


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_in_a_complete_graph_without_matching_it_is_local_sgd(replicas: int) -> None:
    def trained(method: Method) -> list[list[torch.Tensor]]:
        def replica_main(transport: LoopbackTransport) -> list[torch.Tensor]:
            model = build("transformer")
            optimizer = wrap(model, transport, method)
            steps(model, optimizer, 13, replica=transport.replica)
            optimizer.close()
            return values(model)

        return list(thinwire.run_replicas(replicas, replica_main))

    # one averages values, the other differences: the same but for rounding
    found, wanted = (trained(m) for m in (dimat(sync_interval=4, graph="complete"), local_sgd(sync_interval=4)))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


THIRD = 1 / 3
ROWS: dict[Any, list[list[float]]] = {
    "ring": [[THIRD, THIRD, 0, THIRD], [THIRD, THIRD, THIRD, 0], [0, THIRD, THIRD, THIRD], [THIRD, 0, THIRD, THIRD]],
    "torus": [[THIRD, THIRD, THIRD, 0], [THIRD, THIRD, 0, THIRD], [THIRD, 0, THIRD, THIRD], [0, THIRD, THIRD, THIRD]],
    STAR: [[1 / 4] * 4, [1 / 4, 3 / 4, 0, 0], [1 / 4, 0, 3 / 4, 0], [1 / 4, 0, 0, 3 / 4]],
}


@pytest.mark.parametrize("graph", ROWS, ids=["ring", "torus", "star"])
def test_four_replicas_are_a_plain_loop_in_float64(graph: Any) -> None:
    row = ROWS[graph]

    def gradient(step: int, replica: int) -> torch.Tensor:
        return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + replica), dtype=torch.float64)

    def replica_main(loopback: LoopbackTransport) -> tuple[torch.Tensor, torch.Tensor]:
        transport, model = RecordingTransport(loopback), nn.Linear(3, 2, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = wrap(
            model, transport, dimat(sync_interval=3, graph=graph), torch.optim.SGD(model.parameters(), 0.1)
        )
        for step in range(1, 11):
            model.weight.grad = gradient(step, transport.replica).float()
            optimizer.step()
        sent = sum(transfer.payload_bytes for transfer in transport.log if transfer.kind == "round")
        assert sent == 2 * 3 * 4 * 6 * (sum(weight > 0 for weight in row[transport.replica]) - 1)  # in and out
        own = model.weight.detach().clone()
        with optimizer.global_parameters():
            assert torch.equal(model.weight, own)  # no value is common to all: a replica's own is what it shows
        optimizer.close(final_exchange=True)
        return own, model.weight.detach()

    weights = [torch.zeros(2, 3, dtype=torch.float64)] * 4
    for step in range(1, 11):
        weights = [weight - 0.1 * gradient(step, replica) for replica, weight in enumerate(weights)]
        if step % 3 == 0:
            weights = [sum(w * x for w, x in zip(mine, weights, strict=True)) for mine in row]
    found = thinwire.run_replicas(4, replica_main)
    for (own, last), wanted in zip(found, weights, strict=True):
        torch.testing.assert_close(own.double(), wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(last.double(), sum(weights) / 4, rtol=1e-5, atol=1e-6)
        assert torch.equal(last, found[0][1])  # the last word is the same bits everywhere


def merged_once(
    start: Callable[[int], dict[str, torch.Tensor]],
    replicas: int,
    method: Callable[[int], Method],
    *,
    last: bool = False,
) -> list[nn.Module]:
    """Give every replica a model of its own, merge once, and return the models."""

    def replica_main(transport: LoopbackTransport) -> nn.Module:
        model = convnet()
        optimizer = wrap(model, transport, method(transport.replica), still(model))
        model.load_state_dict(start(transport.replica))  # after wrapping, which gives all the same start
        optimizer.step()
        optimizer.close(final_exchange=last)
        return model

    return list(thinwire.run_replicas(replicas, replica_main))


@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_merging_permuted_copies_gives_every_replica_its_own_model_back(digits: Digits, graph: Any) -> None:
    trained = convnet()
    train(trained, digits.train_images, digits.train_labels, steps=60)
    groups = find_permutations(trained, sample=digits.train_images[:2]).groups

    def start(replica: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(replica)
        orders = [torch.randperm(group.num_units, generator=generator) for group in groups]
        return permute(trained.state_dict(), groups, orders)

    test = digits.test_images, digits.test_labels
    for matching in ("activations", "none"):
        found = merged_once(
            start, 4, lambda r, m=matching: dimat(sync_interval=1, graph=graph, batches=calibration(digits), matching=m)
        )  # fmt: skip
        for replica, model in enumerate(found):
            wanted = dict(start(replica))
            names = [name for name, _ in model.named_parameters()]
            near = [torch.allclose(model.state_dict()[name], wanted[name], rtol=1e-4, atol=1e-6) for name in names]
            assert all(near) if matching == "activations" else not all(near)
            gap = accuracy(trained, *test) - accuracy(model, *test)
            assert abs(gap) < 0.02 if matching == "activations" else gap > 0.3


@pytest.fixture(scope="module")
def apart(digits: Digits) -> list[dict[str, torch.Tensor]]:
    """Models that started from different values, each trained on a quarter of the images."""
    found = []
    for replica in range(4):
        model, part = convnet(seed=replica + 1), slice(replica, None, 4)
        train(model, digits.train_images[part], digits.train_labels[part], steps=60, seed=replica)
        found.append(model.state_dict())
    return found


@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_matching_saves_models_that_started_apart_from_their_first_average(
    digits: Digits, apart: list[dict[str, torch.Tensor]], graph: Any
) -> None:
    def after(matching: Any) -> list[float]:
        found = merged_once(
            lambda r: apart[r], 4,
            lambda r: dimat(sync_interval=1, graph=graph, batches=calibration(digits, replica=r), matching=matching),
        )  # fmt: skip
        return [accuracy(model, digits.test_images, digits.test_labels) for model in found]

    by_activations, by_weights, plain = after("activations"), after("weights"), after("none")
    print(by_activations, by_weights, plain)
    assert min(by_activations) > 0.8 and min(by_weights) > 0.7
    assert max(plain) < min(*by_activations, *by_weights) - 0.2


def train_on_digits(
    transport: LoopbackTransport, digits: Digits, *, method: Method, stop: int | None = None, begin: Any = None
) -> nn.Module:
    """Train 12 steps on a quarter of the images; with `stop`, go on in new objects from the state after that step."""
    model = convnet(width=8)
    optimizer = wrap(model, transport, method, torch.optim.AdamW(model.parameters(), lr=3e-3))
    if begin is not None:
        model.load_state_dict(begin)
    part = slice(transport.replica, None, 4)
    source = labelled(digits.train_images[part], digits.train_labels[part], batch_size=32)
    for step in range(1, 13):
        inputs, targets = next(source)
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == stop:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = convnet(width=8, seed=9)
            optimizer = wrap(model, transport, method, torch.optim.AdamW(model.parameters(), lr=3e-3))
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    optimizer.close()
    return model


@pytest.mark.parametrize("stop", [3, 4, 10])
def test_a_run_with_matching_goes_on_from_its_state_bit_for_bit(digits: Digits, stop: int) -> None:
    def run(stop: int | None) -> list[nn.Module]:
        def replica_main(transport: LoopbackTransport) -> nn.Module:
            begin = convnet(width=8, seed=transport.replica).state_dict()
            held = calibration(digits, replica=transport.replica)
            return train_on_digits(
                transport, digits, method=dimat(sync_interval=4, batches=lambda: iter(held)), stop=stop, begin=begin
            )

        return list(thinwire.run_replicas(3, replica_main))

    for one, other in zip(run(None), run(stop), strict=True):
        assert same(one.state_dict().values(), other.state_dict().values())


class Odd(nn.Module):
    """Tied and frozen tensors, a mask of infinities, a cache, statistics, and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
        self.two.weight = self.one.weight
        self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.full((5,), 0.1), requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))


def test_everything_that_was_trained_or_measured_is_averaged_and_nothing_else() -> None:
    def replica_main(transport: LoopbackTransport) -> Odd:
        model = Odd()
        optimizer = wrap(model, transport, dimat(sync_interval=1, graph="complete"), still(model))
        with torch.no_grad():
            for tensor in (model.one.weight, model.narrow, model.norm.running_mean, model.cache, model.count):
                tensor.fill_(2 + 4 * transport.replica)
        optimizer.step()
        optimizer.close()
        return model

    for replica, model in enumerate(thinwire.run_replicas(3, replica_main)):
        assert model.two.weight is model.one.weight
        for mean in (model.one.weight, model.narrow, model.norm.running_mean):
            assert torch.allclose(mean.detach().float(), torch.tensor(6.0))
        assert torch.equal(model.frozen, torch.full((5,), 0.1)) and model.mask[1] == -torch.inf
        assert (model.cache == 2 + 4 * replica).all() and (model.count == 2 + 4 * replica).all()


def test_a_neighbours_state_has_its_values_under_all_names_and_the_own_constants() -> None:
    model, other = Odd(), Odd()
    nn.init.normal_(other.one.weight, generator=torch.Generator().manual_seed(1))
    other.narrow.data.fill_(3)
    view = Parameters().bind(model)
    state = view.state_of(Parameters().bind(other).read_last(0))
    assert set(state) == set(model.state_dict()) and state["narrow"].dtype == torch.bfloat16
    assert torch.equal(state["one.weight"], other.one.weight) and torch.equal(state["two.weight"], other.one.weight)
    assert torch.equal(state["narrow"], other.narrow) and torch.equal(state["mask"], model.mask)


IMAGES = [torch.zeros(2, 1, 8, 8)]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: dimat(sync_interval=0), "sync_interval must be at least 1, got 0"),
        (lambda: dimat(graph="star"), "graph must be one of ring, torus, complete, .* got 'star'"),
        (lambda: dimat(matching="fate"), "matching must be one of activations, weights, none, got 'fate'"),
        (lambda: dimat(matching="weights"), r"batches is None; give some .* or merge without matching \('none'\)"),
        (lambda: dimat(batches=iter(IMAGES)), "batches is an iterator, .* give a list, or a function"),
        (lambda: dimat(graph="torus").exchanges(5), r"prime above 3, got 5: .*take Ring\(\)"),
        (lambda: dimat(graph=Exponential()).exchanges(4), r"must be undirected, got Exponential\(\) for 4 .*take Ring"),
        (lambda: MatchedMerge(matching="none").init(PseudoGradient().bind(convnet())), "only Parameters\\(\\) reads"),
        (lambda: InnerStep().init(Parameters().bind(convnet())), "use Gradient\\(\\) as the view"),
    ],
)
def test_what_does_not_go_together_is_refused_before_training(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


@pytest.mark.parametrize(
    ("kind", "batches", "problem"),
    [
        ("transformer", [torch.zeros(2, 7, dtype=torch.int64)], r"without matching \('none'\)"),
        ("unused", [torch.zeros(2, 3)], r"frozen is frozen, .* merge without matching \('none'\)"),
        ("linear", [], "must hold tensors of inputs, got none"),
        ("linear", [(torch.zeros(2, 3), torch.zeros(2))], "got a tuple; leave out the labels"),
    ],
)
def test_a_model_that_cannot_be_matched_is_refused_before_training(kind: str, batches: Any, problem: str) -> None:
    model = build(kind)
    before = values(model)
    with pytest.raises(ValueError, match=problem):
        wrap(model, None, dimat(batches=batches))
    assert same(values(model), before) and model.training


def test_only_rounds_in_which_everyone_hears_whom_it_tells_are_taken() -> None:
    topology = Neighbours(graph=OnePeerExponential())
    assert topology.peers(round_id=1, me=5, alive=[1, 3, 5, 9]).members == (1, 5)  # half the way round: both ways
    with pytest.raises(ValueError, match=r"must be undirected, got OnePeerExponential\(\) for 4 replicas"):
        topology.peers(round_id=0, me=5, alive=[1, 3, 5, 9])
    with pytest.raises(ValueError, match="one of the replicas that are alive"):
        topology.peers(round_id=1, me=2, alive=[1, 3])


def test_infinity_in_a_neighbour_names_it() -> None:
    def replica_main(transport: LoopbackTransport) -> None:
        model = nn.Linear(3, 1)
        optimizer = wrap(model, transport, dimat(sync_interval=1, batches=[torch.ones(2, 3)]), still(model))
        if transport.replica == 1:
            nn.init.constant_(model.bias, torch.inf)
        optimizer.step()

    with pytest.raises(NonFiniteError, match="replica 1 sent NaN or infinity"):
        thinwire.run_replicas(3, replica_main)


def test_the_replicas_own_batches_are_no_part_of_what_they_agree_on() -> None:
    one, other = (dimat(batches=[torch.full((2, 3), value)]) for value in (0.0, 1.0))
    assert one.describe(num_replicas=2) == other.describe(num_replicas=2)
    assert dimat().describe(num_replicas=2) != one.describe(num_replicas=2)
    assert dimat(graph=STAR).describe(num_replicas=4) != dimat(graph=Ring()).describe(num_replicas=4)
