"""Passes of a pipeline whose micro-batches skip stages: `thinwire train --skip`.

The first stage has both ends of the model, so a tied head needs no copy, and hidden states come back to it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.activation_code import ActivationCode
from thinwire.shared_random import derive_seed
from thinwire.site.pipeline import chunk_layers
from thinwire.site.skip_paths import SkipNetwork, orders_of, run_paths
from thinwire.training.config import TrainConfig
from thinwire.transport.path_runner import PathRunner, PathStep
from thinwire.transport.replica_mesh import ReplicaMesh
from thinwire.workloads.language.presets import TransformerConfig
from thinwire.workloads.language.transformer import TransformerStage, next_token_loss


def deal_paths(*, num_stages: int, length: int, count: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Return paths of so many stages each, the first one always, on which all others come equally often.

    Example:
        >>> deal_paths(num_stages=4, length=3, count=3, seed=1)
        ((0, 1, 3), (0, 1, 2), (0, 2, 3))
    """
    chance, deck = random.Random(seed), list[int]()
    paths = []
    for _ in range(count):
        path = {0}
        while len(path) < length:
            if path.issuperset(deck):
                deck += chance.sample(range(1, num_stages), num_stages - 1)
            path.add(deck.pop(next(place for place, stage in enumerate(deck) if stage not in path)))
        paths.append(tuple(sorted(path)))
    return tuple(paths)


class SkippingPipeline:
    """Passes of one stage; micro-batches take other paths at every step, the same ones where a run is resumed.

    Args:
        config: Resolved options.
        stage: This rank's layers.
        mesh: The replica's ranks.
        shape: Of the whole model.
    """

    def __init__(
        self, config: TrainConfig, stage: TransformerStage, mesh: ReplicaMesh, *, shape: TransformerConfig
    ) -> None:  # fmt: skip
        self._config, self._stage, self._mesh, self._shape = config, stage, mesh, shape
        self._num_steps = 0
        pp = config.parallel.pp
        self._network = SkipNetwork(
            stages=tuple((number,) for number in range(pp)), delay_s=((0.0,) * pp,) * pp, memory=pp,
            forward_s=tuple(map(float, chunk_layers(shape.layers, pp))),
        )  # fmt: skip
        self._targets: list[Tensor] = []
        self._nll: dict[int, Tensor] = {}
        self._runner = PathRunner(
            stage.hidden, stage.parameters(), transport=mesh.peers, device=mesh.device, loss=self._loss,
            code=ActivationCode.parse(config.parallel.activation_code or "float32"),
        )  # fmt: skip

    def backward(self, passes: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
        """Add the gradients of a step; return loss and nll, (2,), zero but at the first stage."""
        self._num_steps += 1
        self._targets = [targets for _, targets, _ in passes]
        seed = derive_seed(self._config.run.seed, "skip", *(int(tokens.sum()) for tokens, _, _ in passes))
        own = self._config.parallel
        paths = deal_paths(num_stages=own.pp, length=own.path_length, count=len(passes), seed=seed)
        order = run_paths(self._network, paths, [0.0] * len(paths))
        step = PathStep(number=self._num_steps, paths=paths, orders=orders_of(order),
                        weights=tuple(share for _, _, share in passes))  # fmt: skip
        inputs = [tokens for tokens, _, _ in passes]
        shapes = [(*tokens.shape, self._shape.dim) for tokens in inputs]
        losses = self._runner.run(step, shapes=shapes, dtype=self._dtype, inputs=inputs)
        sums = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        for number, loss in losses.items():
            sums += step.weights[number] * torch.stack([loss, self._nll[number]])
        return sums

    def nll(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean nll of rows under all stages at the first one, zero at the others."""
        pp, own = self._config.parallel.pp, self._mesh.stage
        like = torch.empty(*tokens.shape, self._shape.dim, dtype=self._dtype, device=self._mesh.device)
        values = self._mesh.receive_from_stage(like, own - 1) if own else tokens
        self._mesh.send_to_stage(self._stage.hidden(values), (own + 1) % pp)
        if own:
            return torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        logits = self._stage.logits(self._mesh.receive_from_stage(like, pp - 1))
        return next_token_loss(logits, targets, z_loss=0.0)[1].double()

    def _loss(self, hidden: Tensor, number: int) -> Tensor:
        is_padded = self._config.data.sequences == "documents"
        loss, nll = next_token_loss(
            self._stage.logits(hidden), self._targets[number], z_loss=self._shape.z_loss, is_padded=is_padded
        )  # fmt: skip
        self._nll[number] = nll.detach()
        return loss

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._stage.parameters()).dtype
