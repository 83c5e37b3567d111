"""Replicas that train on equal batches are warned of once; shares, repeated batches and evaluation raise no warning."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import thinwire
from tests.reference.loops import wrap
from thinwire.methods import all_reduce, diloco, noloco, streaming_diloco
from thinwire.sync.equal_batches import EqualBatchesWarning

METHODS = {
    "all-reduce": all_reduce,
    "diloco": lambda: diloco(sync_interval=5),
    "streaming": lambda: streaming_diloco(sync_interval=4, overlap_steps=2, num_fragments=1),
    "noloco": lambda: noloco(sync_interval=5),
}


class TakesNames(nn.Module):
    """Takes its inputs by name and in a mapping, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, *, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layer(batch["points"]).square().mean()


def warned(draw, *, num_replicas=2, method=diloco, num_steps=24):
    """Return the warnings of a run whose replicas train on `draw(step, replica)`."""

    def replica_main(transport):
        torch.manual_seed(0)
        model = TakesNames()
        optimizer = wrap(model, transport, method())
        for step in range(num_steps):
            model.eval()
            with torch.no_grad():
                model(batch={"points": torch.full((1, 4), float(step))})
            model.train()
            model(batch={"points": draw(step, transport.replica)}).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close(final_exchange=True)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        thinwire.run_replicas(num_replicas, replica_main)
    return [one for one in found if issubclass(one.category, EqualBatchesWarning)]


def drawn(seed):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", METHODS)
def test_equal_batches_cause_one_warning_with_the_remedy(method):
    found = warned(lambda step, replica: drawn(step), method=METHODS[method])
    assert len(found) == 1
    assert "replicas 0 and 1 train on equal batches" in str(found[0].message)
    assert "batches[transport.replica :: transport.num_replicas]" in str(found[0].message)
    assert found[0].filename == __file__


def test_the_two_replicas_of_three_that_share_their_batches_are_named():
    found = warned(lambda step, replica: drawn(step + 100 * (replica == 1)), num_replicas=3)
    assert [str(one.message).split(" train")[0] for one in found] == ["replicas 0 and 2"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda step, replica: [drawn(one) for one in range(60)][replica::2][step],  # the remedy of the warning
        lambda step, replica: drawn(step + 5 * replica),  # the same data in another order
        lambda step, replica: drawn(0),  # one batch, over and over
        lambda step, replica: drawn(step if step < 7 else 10 * step + replica),
    ],
    ids=["shares", "another order", "one batch", "equal at first only"],
)
def test_other_data_cause_no_warning(draw):
    assert not warned(draw)


def test_a_model_is_copied_and_saved_with_its_hook_and_loses_it_after_the_first_passes(tmp_path):
    def replica_main(transport):
        model = TakesNames()
        optimizer = wrap(model, transport, diloco(sync_interval=50))
        copied = copy.deepcopy(model)
        torch.save(model, tmp_path / f"{transport.replica}.pt")
        for step in range(9):
            copied(batch={"points": drawn(step)})
            model(batch={"points": drawn(step)}).backward()
            optimizer.step()
        return len(model._forward_pre_hooks), len(copied._forward_pre_hooks)

    assert thinwire.run_replicas(2, replica_main)[0] == (0, 0)


def test_one_replica_alone_has_no_hook():
    model = TakesNames()
    wrap(model, None, diloco())
    assert not model._forward_pre_hooks
