"""What goes wrong between replicas ends in an error that names the culprit, never in a hang."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire
from tests.reference.loops import same, steps, values, wrap
from tests.reference.small_models import build, loss_of
from thinwire.codecs import e3m0, float32
from thinwire.errors import DeadlineExceeded, DesyncError, NonFiniteError, PayloadError
from thinwire.methods import all_reduce, diloco, streaming_diloco
from thinwire.transport.recording import RecordingTransport


def test_replicas_that_start_apart_get_the_first_ones_parameters_and_buffers():
    def replica_main(transport):
        model = build("conv", seed=transport.replica)
        with torch.no_grad():
            model.stages[1].running_mean.fill_(transport.replica)
        wrap(model, transport, diloco())
        return values(model) + [b.clone() for b in model.buffers()]

    one, other, third = thinwire.run_replicas(3, replica_main)
    assert same(one, other)
    assert same(one, third)
    assert same(one[:3], values(build("conv", seed=0))[:3])


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        (lambda replica: {"kind": "linear" if replica else "lstm"}, "runs another model"),
        (lambda replica: {"interval": 5 + replica}, r"runs another method .*sync_interval=5.*sync_interval=6"),
    ],
)
def test_replicas_with_different_set_ups_are_told_apart_at_the_start(difference, expected):
    def replica_main(transport):
        setting = {"kind": "linear", "interval": 5} | difference(transport.replica)
        wrap(build(setting["kind"]), transport, diloco(sync_interval=setting["interval"]))

    with pytest.raises(DesyncError, match=expected):
        thinwire.run_replicas(2, replica_main)


def half_frozen(*, frozen_seed: int, trained_seed: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 400), nn.Linear(400, 20), nn.Linear(20, 20))
    # replicas are threads here, and torch's own generator is one for all of them
    for layer, seed in zip(model, (frozen_seed, frozen_seed, trained_seed), strict=True):
        generator = torch.Generator().manual_seed(seed)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, generator=generator)
    model[:2].requires_grad_(False)
    return model


def test_frozen_parameters_are_never_sent_also_where_trained_ones_differ_at_the_start():
    def replica_main(transport):
        model = half_frozen(frozen_seed=50, trained_seed=transport.replica)
        recording = RecordingTransport(transport)
        wrap(model, recording, diloco())
        return values(model), recording.log.totals("sent").payload_bytes

    (one, sent_bytes), (other, _) = thinwire.run_replicas(2, replica_main)
    assert same(one, other)
    trained_bytes, frozen_bytes = 4 * (20 * 20 + 20), 4 * (2 * 400 * 20 + 420)
    # beside the values only the comparison of both sides is sent
    assert trained_bytes <= sent_bytes <= trained_bytes + 4096 < frozen_bytes


class WithAdapter(nn.Module):
    """A frozen base with a cache, a trained head that is the same on all replicas, and adapters that are not."""

    def __init__(self, replica: int):
        super().__init__()
        self.base = build("linear", seed=3)
        for parameter in self.base.parameters():
            parameter.requires_grad_(False)
        self.register_buffer("cache", torch.arange(200_000, dtype=torch.float32), persistent=False)
        self.head = nn.Parameter(torch.ones(100_000))
        random = torch.Generator().manual_seed(replica)
        self.low = nn.Parameter(torch.randn((8, 5000), generator=random))
        self.high = nn.Parameter(torch.zeros((5000, 8)))


def test_only_tensors_that_differ_are_sent_at_the_start_and_only_to_replicas_that_need_them():
    def replica_main(transport):
        model = WithAdapter(7 if transport.replica == 2 else 0)
        recording = RecordingTransport(transport)
        wrap(model, recording, diloco())
        return values(model), [recording.log.totals(way).wire_bytes for way in ("sent", "received")]

    found = thinwire.run_replicas(3, replica_main)
    adapter_bytes = 4 * 8 * 5000
    assert all(same(found[0][0], other) for other, _ in found[1:])
    assert adapter_bytes < found[0][1][0] < 1.1 * adapter_bytes  # to replica 2, with all comparisons
    for way in found[1][1]:
        assert way < 0.1 * adapter_bytes
    assert adapter_bytes < found[2][1][1] < 1.1 * adapter_bytes


@pytest.mark.parametrize(("places", "named"), [([2], r"1\.weight;"), ([0, 3], r"0\.weight and 1 more;")])
def test_frozen_parameters_that_differ_are_refused_at_the_start_by_name(places, named):
    def replica_main(transport):
        model = half_frozen(frozen_seed=50, trained_seed=0)
        if transport.replica == 1:
            with torch.no_grad():
                for place in places:
                    list(model.parameters())[place].mul_(2)
        wrap(model, transport, diloco())

    match = rf"replica \d has other values than replica \d in the frozen parameter {named} .*load the same weights"
    with pytest.raises(DesyncError, match=match):
        thinwire.run_replicas(3, replica_main)


@pytest.mark.parametrize(
    ("change", "there", "here"),
    [
        (lambda model: setattr(model, "3", nn.Linear(8, 2)), r"3.weight of shape \[2, 8\] in float32",
         r"3.weight of shape \[4, 8\] in float32"),
        (lambda model: model[2].half(), r"2.weight of shape \[8\] in float16", r"2.weight of shape \[8\] in float32"),
        (lambda model: model[0].bias.requires_grad_(False), "0.bias .* not trained", r"0.bias .* in float32;"),
        (lambda model: model.append(nn.Linear(4, 4)), r"4.weight of shape \[4, 4\]", "no such tensor, 8 in all"),
    ],
)  # fmt: skip
def test_replicas_with_different_models_name_the_first_tensor_that_differs(change, there, here):
    def replica_main(transport):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        if transport.replica == 2:
            change(model)
        wrap(model, transport, diloco())

    expected = (
        rf"replica 2 runs another model; the first tensor that differs is number \d: {there}.*replica 1\): {here}"
    )
    with pytest.raises(DesyncError, match=expected):
        thinwire.run_replicas(3, replica_main)


def test_a_desync_is_found_and_names_the_replica():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, diloco(sync_interval=2, codec=float32()))
        steps(model, optimizer, 3, replica=transport.replica)
        if transport.replica == 2:  # a bit flips in the global value
            optimizer._engine.view.parameters.values[0][1] += 1e-3
        steps(model, optimizer, 3, replica=transport.replica, start=3)

    with pytest.raises(
        DesyncError, match="replica 2 disagrees with the others about the global parameters of fragment 0"
    ):
        thinwire.run_replicas(4, replica_main)


def test_a_desync_of_every_step_averaging_is_found_too():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, all_reduce())
        with torch.no_grad():
            model.bias += transport.replica
        steps(model, optimizer, 60, replica=transport.replica)

    with pytest.raises(DesyncError, match="replicas 0, 1 disagree"):
        thinwire.run_replicas(2, replica_main)


@pytest.mark.parametrize("codec", [float32(), e3m0()], ids=lambda codec: codec.name)
def test_a_replica_that_diverged_is_named_by_all(codec):
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, streaming_diloco(sync_interval=2, overlap_steps=0, codec=codec))
        with torch.no_grad():
            model.bias[0] = torch.nan if transport.replica == 1 else 0
        with pytest.raises(NonFiniteError, match="replica 1 sent NaN or infinity"):
            steps(model, optimizer, 4, replica=transport.replica)
        return True

    assert thinwire.run_replicas(2, replica_main) == [True, True]


def test_a_lost_message_ends_in_a_named_error_not_in_a_hang():
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, diloco(sync_interval=2))
        if transport.replica == 0:
            transport.tamper = lambda message: None
        steps(model, optimizer, 4, replica=transport.replica)

    with pytest.raises(DeadlineExceeded, match=r"round 0 \(fragment 0\) from replica 0 never came"):
        thinwire.run_replicas(2, replica_main)


@pytest.mark.parametrize("position", [5, 20, 45, 60, -1])
def test_a_damaged_message_is_refused_wherever_the_damage_is(position):
    def replica_main(transport):
        model = build("linear")
        optimizer = wrap(model, transport, diloco(sync_interval=2))

        def flip(message):
            message[position] ^= 0x10
            return message

        if transport.replica == 0:
            transport.tamper = flip
        steps(model, optimizer, 4, replica=transport.replica)

    with pytest.raises(PayloadError, match=r"from replica 0"):
        thinwire.run_replicas(2, replica_main)


def test_buffers_stay_local_until_they_are_averaged_on_request():
    def replica_main(transport):
        model = build("conv")
        optimizer = wrap(model, transport, diloco(sync_interval=2))
        steps(model, optimizer, 4, replica=transport.replica)
        before = model.stages[1].running_mean.clone()
        counts = model.stages[1].num_batches_tracked.clone()
        optimizer.average_buffers()
        assert torch.equal(model.stages[1].num_batches_tracked, counts)
        return before, model.stages[1].running_mean.clone()

    (one, mean), (other, same_mean) = thinwire.run_replicas(2, replica_main)
    assert not torch.equal(one, other)
    assert torch.equal(mean, same_mean)
    torch.testing.assert_close(mean, (one + other) / 2)


def test_caches_among_the_buffers_are_left_alone():
    def replica_main(transport):
        model = build("linear")
        model.register_buffer("cache", torch.zeros(1), persistent=False)
        model.register_buffer("statistic", torch.zeros(1))
        optimizer = wrap(model, transport, diloco())  # makes them equal
        model.cache.fill_(transport.replica)
        model.statistic.fill_(transport.replica)
        optimizer.average_buffers()
        return float(model.cache), float(model.statistic)

    assert thinwire.run_replicas(2, replica_main) == [(0.0, 0.5), (1.0, 0.5)]


def test_a_parameter_without_gradient_on_any_replica_keeps_none():
    def replica_main(transport):
        model = build("unused")
        optimizer = wrap(model, transport, all_reduce())
        loss_of(model, step=1, replica=transport.replica).backward()
        optimizer.step()
        assert model.never.weight.grad is None
        assert model.used.weight.grad is not None

    thinwire.run_replicas(2, replica_main)


def test_a_parameter_with_a_gradient_on_one_replica_only_gets_the_mean_on_all():
    def replica_main(transport):
        model = build("unused")
        optimizer = wrap(model, transport, all_reduce())
        if transport.replica == 1:
            model.never(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model.never.bias.grad.clone()

    for gradient in thinwire.run_replicas(2, replica_main):
        assert torch.equal(gradient, torch.full((3,), 0.5))
