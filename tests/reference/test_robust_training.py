"""Training through the optimizer where replicas lie on the wire: robust rules hold, the mean does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire
from tests.attacks import attack_script
from tests.reference.loops import same, steps, values, wrap
from tests.reference.small_models import build
from thinwire.methods import all_reduce, robust
from thinwire.transport.faulty import FaultyTransport
from thinwire.transport.loopback import LoopbackTransport

REPLICAS, BAD = 7, (5,)
TRUE = torch.tensor([[1.0, -2.0, 0.5]])


def distance(method: thinwire.Method, *, lies: bool) -> float:
    """Fit a noisy line on 7 replicas, one of which sends its gradients reversed and long; how far off it ends."""

    def replica_main(loopback: LoopbackTransport) -> list[torch.Tensor]:
        transport = (
            FaultyTransport(loopback, attack_script("reverse", replicas=BAD, strength=100.0)) if lies else loopback
        )
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = wrap(model, transport, method, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(60):
            generator = torch.Generator().manual_seed(100 * step + loopback.replica)
            x = torch.randn(16, 3, generator=generator)
            noise = 0.5 * torch.randn(16, 1, generator=generator)
            (model(x) - x @ TRUE.T - noise).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    honest = [
        found for replica, found in enumerate(thinwire.run_replicas(REPLICAS, replica_main)) if replica not in BAD
    ]
    assert all(same(honest[0], other) for other in honest), "the honest replicas stay together"
    return float((honest[0][0] - TRUE).norm())


@pytest.mark.parametrize("rule", ["flag", "median", "trimmed-mean", "krum", "multi-krum"])
def test_a_robust_rule_finds_the_line_in_spite_of_a_liar(rule: str) -> None:
    assert distance(robust(rule=rule, num_bad=1), lies=True) < 0.2  # type: ignore[arg-type]


def test_the_mean_is_led_astray_by_the_same_liar() -> None:
    assert distance(robust(rule="mean"), lies=True) > 1.0
    assert distance(robust(rule="mean"), lies=False) < 0.2


def test_with_the_mean_as_its_rule_it_is_an_all_reduce() -> None:
    def trained(method: thinwire.Method) -> list[torch.Tensor]:
        def replica_main(transport: LoopbackTransport) -> list[torch.Tensor]:
            model = build("transformer")
            optimizer = wrap(model, transport, method)
            steps(model, optimizer, 5, replica=transport.replica)
            return values(model)

        return thinwire.run_replicas(2, replica_main)[0]

    for one, other in zip(trained(robust(rule="mean")), trained(all_reduce()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_too_few_replicas_for_a_rule_are_refused_before_training() -> None:
    def replica_main(transport: LoopbackTransport) -> None:
        wrap(build("linear"), transport, robust(rule="krum", num_bad=1))

    with pytest.raises(ValueError, match="krum"):
        thinwire.run_replicas(3, replica_main)
