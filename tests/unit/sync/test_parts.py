"""Parts fit together or are refused; outer optimizers are torch's, bit for bit."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import thinwire
from tests.reference.loops import steps, values, wrap
from tests.reference.small_models import build
from thinwire.errors import CheckpointError, DesyncError
from thinwire.methods import all_reduce, diloco, local_sgd, recipe, streaming_diloco
from thinwire.sync import views
from thinwire.sync.consistency_check import check_hashes
from thinwire.sync.outer_optimizer import HeavyBall, Nesterov, PlainSGD
from thinwire.sync.schedule import Round
from thinwire.sync.updates import InnerStep, OuterStep
from thinwire.sync.views import GlobalParameters

OPTIMIZERS = [
    (PlainSGD(lr=0.7), {"lr": 0.7}),
    (HeavyBall(lr=0.7, momentum=0.9), {"lr": 0.7, "momentum": 0.9}),
    (Nesterov(lr=0.4, momentum=0.9), {"lr": 0.4, "momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("ours", "theirs"), OPTIMIZERS, ids=lambda value: type(value).__name__)
def test_an_outer_step_is_torchs_sgd_bit_for_bit(ours, theirs):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(1009, generator=generator)
    reference = nn.Parameter(value.clone())
    optimizer = torch.optim.SGD([reference], **theirs)
    momentum = torch.zeros_like(value) if ours.has_momentum else None
    for _ in range(5):
        gradient = torch.randn(1009, generator=generator)
        reference.grad = gradient.clone()
        optimizer.step()
        ours.step(value, gradient, momentum)
        assert torch.equal(value, reference.detach())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Nesterov(lr=0.0), r"outer lr must be in \(0, 10\], got 0.0"),
        (lambda: Nesterov(lr=11.0), "got 11.0"),
        (lambda: HeavyBall(lr=0.5, momentum=1.0), r"outer momentum must be in \[0, 1\), got 1.0"),
        (lambda: OuterStep(optimizer=PlainSGD(), blend=1.0), r"blend must be in \[0, 1\), got 1.0"),
        (lambda: streaming_diloco(blend=-0.1), "blend must be"),
        (lambda: streaming_diloco(exchange="ring"), "exchange must be one of auto, all-gather, two-phase, got 'ring'"),
        (lambda: streaming_diloco(outer_lr=-1), "outer lr"),
        (lambda: diloco(outer_momentum=1.5), "outer momentum"),
        (lambda: recipe("streaming-dilco"), "try streaming-diloco"),
        (lambda: recipe("zzz"), "allowed all-reduce, co2, diloco, "),
    ],
)
def test_a_bad_argument_is_refused_with_its_value(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_parts_that_do_not_go_together_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match="use Gradient"):
        wrap(build("linear"), None, replace(diloco(), update=lambda replicas: InnerStep()))
    outer = OuterStep(optimizer=PlainSGD())
    with pytest.raises(ValueError, match="use PseudoGradient"):
        wrap(build("linear"), None, replace(all_reduce(), update=lambda replicas: outer))


def test_a_checkpoint_with_momenta_does_not_fit_a_method_without():
    model = build("linear")
    state = wrap(model, None, diloco()).state_dict()
    optimizer = wrap(model, None, all_reduce())
    foreign = copy.deepcopy(optimizer.state_dict())
    foreign["sync"]["update"] = state["sync"]["update"]
    with pytest.raises(CheckpointError, match="keeps momentum here, this run nothing"):
        optimizer.load_state_dict(foreign)


def test_heavy_ball_trains_and_a_method_describes_its_parts():
    method = diloco(sync_interval=2, outer_optimizer=HeavyBall(lr=0.5))
    assert "HeavyBall(lr=0.5, momentum=0.9)" in method.describe(num_replicas=2)
    model = build("linear")
    before = values(model)
    optimizer = wrap(model, None, method)
    steps(model, optimizer, 4)
    with optimizer.global_parameters():
        assert not all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))


@pytest.mark.parametrize(
    ("hashes", "words"),
    [
        ({0: 1, 1: 1, 2: 5}, "replica 2 disagrees with the others"),
        ({0: 1, 1: 2}, "replicas 0, 1 disagree"),
        ({0: 1, 1: 1, 2: 1, 3: 4, 4: 6}, "replicas 3, 4 disagree"),
        ({0: 1, 1: 1, 2: 3, 3: 3}, "replicas 0, 1, 2, 3 disagree"),
    ],
)
def test_the_minority_is_named_and_all_where_there_is_no_majority(hashes, words):
    with pytest.raises(DesyncError, match=words):
        check_hashes(hashes, round=Round(id=3, fragment=1, launch_step=5, apply_step=6))


def test_public_names_load_when_they_are_used_and_others_do_not_exist():
    for name in thinwire.__all__:
        assert getattr(thinwire, name) is not None
    with pytest.raises(AttributeError, match=r"no attribute 'streeming'; did you mean streaming_diloco\?"):
        thinwire.methods.streeming  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'conect'; did you mean connect\?"):
        thinwire.conect  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'DiLoCo'"):
        thinwire.DiLoCo  # noqa: B018
    assert local_sgd().name == "local-sgd"


def test_a_checksum_that_a_thread_computed_holds_until_somebody_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "_LARGE", 1)
    parameters = GlobalParameters(torch.nn.Linear(3, 2), [["weight", "bias"]])
    computed: list[int] = []
    whole = views.checksum
    monkeypatch.setattr(views, "checksum", lambda vector: computed.append(1) or whole(vector))
    parameters.begin_checksum(0)
    assert parameters.reference_hash(0) == parameters.reference_hash(0) == whole(parameters.values[0])
    assert len(computed) == 1
    parameters.values[0].add_(1.0)
    assert parameters.reference_hash(0) == whole(parameters.values[0])
    parameters.values[0] = parameters.values[0].clone()
    assert parameters.reference_hash(0) == whole(parameters.values[0])
    assert len(computed) == 3
