"""Sequences shared by their lengths among real processes: the gradient is that of one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from processes import run, values
from torch import nn

from thinwire.integrations.data import LengthBalancedSampler
from thinwire.workloads.language.lengths import SequenceCost

pytestmark = pytest.mark.multiprocess

LENGTHS = [1, 40, 3, 3, 17, 2, 9, 25, 1, 1, 6, 31, 5, 2, 8, 13]
COST = SequenceCost(seconds_per_token=1.0, seconds_per_pair=0.1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()


def token_losses(net: nn.Module, sequences: list[int]) -> torch.Tensor:
    """Return the losses of a padded batch, (sequences, longest), zero at padding."""
    longest = max(LENGTHS[index] for index in sequences)
    tokens = torch.full((len(sequences), longest), -1)
    for row, index in enumerate(sequences):
        generator = torch.Generator().manual_seed(index)
        tokens[row, : LENGTHS[index]] = torch.randint(11, (LENGTHS[index],), generator=generator)
    scores = net(tokens.clamp(min=0)).transpose(1, 2)
    return nn.functional.cross_entropy(scores, tokens, ignore_index=-1, reduction="none")


def sampler(rank: int, num_ranks: int) -> LengthBalancedSampler:
    return LengthBalancedSampler(
        LENGTHS, rank=rank, num_ranks=num_ranks, sequences_per_step=8, max_tokens=40, cost=COST, seed=1
    )


def difference_from_one_process() -> list[float]:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    every = [iter(sampler(other, num_ranks)) for other in range(num_ranks)]
    found = []
    for share in itertools.islice(sampler(rank, num_ranks), 2):
        net, alone = model(), model()
        for sequences in share.passes:
            share.loss(token_losses(net, list(sequences))).backward()
        shares = [next(other) for other in every]
        whole = sorted(index for one in shares for sequences in one.passes for index in sequences)
        assert len(set(whole)) == len(whole) == 8 and shares[rank] == share
        (token_losses(alone, whole).sum() / sum(LENGTHS[index] for index in whole)).backward()
        for own, reference in zip(net.parameters(), alone.parameters(), strict=True):
            assert own.grad is not None and reference.grad is not None
            dist.all_reduce(own.grad)
            found.append(float((own.grad / num_ranks - reference.grad).abs().max() / reference.grad.abs().max()))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_gradient_is_that_of_one_process(num_ranks: int) -> None:
    for found in values(run(difference_from_one_process, num_ranks=num_ranks)):
        assert len(found) == 6 and max(found) < 1e-12
