"""A workload of your own: two spirals that a small network tells apart, trained by thinwire train.

cd examples && thinwire train --workload own_workload:SPIRALS --method diloco --sync-interval 10 --steps 200
"""

import math
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

from thinwire.runlog.measures import Measures, Metric
from thinwire.workloads.cards import WorkloadCard
from thinwire.workloads.items import leased_items, own_items, spread_items
from thinwire.workloads.workload import NoCompanion, Workload, rows_at_once


# --8<-- [start:data]
@dataclass(frozen=True)
class Points:
    """Points of two spirals."""

    inputs: torch.Tensor  # (points, 2)
    targets: torch.Tensor  # (points,): which spiral
    sha256: str = "spirals-1"  # hosts and resumed runs must have the same


def points(numbers: torch.Tensor) -> Points:
    """Return points by their numbers, from the middle outwards; even ones are of one spiral."""
    angle, arm = numbers * 0.01, numbers % 2
    at = angle + math.pi * arm
    return Points(torch.stack([angle * at.cos(), angle * at.sin()], dim=1) / 3, arm)


NUMBERS = torch.arange(350)
HELD_OUT = points(NUMBERS[::7])
# --8<-- [end:data]


# --8<-- [start:model]
def make_model(options, sizes, device):
    """Build the network; its weights follow from the seed."""
    torch.manual_seed(options.run.seed)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)


def saved_model(options, sizes, folder):
    """Read the network that a run has saved."""
    model = make_model(options, sizes, "cpu")
    model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    return model


def loss(options, model):
    """Return the loss function of the network."""

    def compute(inputs, targets):
        logits = model(inputs)
        found = functional.cross_entropy(logits, targets)
        # what is shown: a loss, then the metric of the card
        return found, torch.stack([found.detach(), (logits.argmax(1) == targets).float().mean()])

    return compute


# --8<-- [end:model]

# --8<-- [start:workload]
SPIRALS = Workload(
    card=WorkloadCard(
        name="spirals", source="own_workload:SPIRALS", model="spirals-mlp", data="spirals",
        measures=Measures(samples="points", metric=Metric(name="accuracy", unit="%")),
        batch_size=16, lr=1e-2,
    ),
    open_data=lambda options: points(NUMBERS[NUMBERS % 7 > 0]),
    batches=lambda options, data, replica: own_items(options, data.inputs, data.targets, replica),
    leased_batches=lambda options, data, leases: leased_items(options, data.inputs, data.targets, leases),
    held_out=lambda options, data, num_batches: spread_items(
        HELD_OUT.inputs, HELD_OUT.targets, batch_size=options.data.batch_size, max_batches=num_batches
    ),
    make_model=make_model, saved_model=saved_model, sketch=lambda options: make_model(options, {}, "meta"),
    loss=loss, parts=rows_at_once, num_samples=len, window_samples=lambda options: 1,
    activation_bytes=lambda options, model, rows: 4.0 * 100 * rows,
    # nothing lies beside the weights, such as a tokenizer, and no size follows from it
    companion=lambda data: NoCompanion(), saved_companion=lambda folder: NoCompanion(), sizes=lambda companion: {},
)  # fmt: skip
# --8<-- [end:workload]
