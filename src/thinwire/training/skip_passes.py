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

    A stage that is lost is on no path until it is back. A step in which it is lost is computed again without it.

    Args:
        config: Resolved options.
        stage: This rank's layers.
        mesh: The replica's ranks.
        shape: Of the whole model.
        step: Steps that this stage has done.
    """

    def __init__(
        self, config: TrainConfig, stage: TransformerStage, mesh: ReplicaMesh, *, shape: TransformerConfig, step: int
    ) -> None:  # fmt: skip
        assert mesh.stages is not None, "stages on paths come and go"
        self._config, self._stage, self._mesh, self._shape = config, stage, mesh, shape
        self._stages = mesh.stages
        self._stages.begin_after(step)
        pp = config.parallel.pp
        self._network = SkipNetwork(
            stages=tuple((number,) for number in range(pp)), delay_s=((0.0,) * pp,) * pp, memory=pp,
            forward_s=tuple(map(float, chunk_layers(shape.layers, pp))),
        )  # fmt: skip
        self._targets: list[Tensor] = []
        self._nll: dict[int, Tensor] = {}
        # of the latest batch that this stage took part in; it is shown where it did not
        self._shown, self._held_out = torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        self._runner = PathRunner(
            stage.hidden, stage.parameters(), transport=mesh.stages, device=mesh.device, loss=self._loss,
            code=ActivationCode.parse(config.parallel.activation_code or "float32"),
        )  # fmt: skip

    def backward(self, passes: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
        """Add the gradients of a step, none where the others did it without this stage; return loss and nll, (2,)."""
        found = self._stages.together(lambda: self._step(passes), undo=self._forget, is_step=True)
        self._shown = self._shown if found is None else found
        return self._shown

    def held_out(self, passes: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
        """Return the mean nll of rows under all stages that are present, (1,)."""
        found = self._stages.together(lambda: self._nll_of(passes))
        self._held_out = self._held_out if found is None else found
        return self._held_out

    def _step(self, passes: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
        self._targets = [targets for _, targets, _ in passes]
        seed = derive_seed(self._config.run.seed, "skip", *(int(tokens.sum()) for tokens, _, _ in passes))
        present = self._stages.present
        length = min(self._config.parallel.path_length, len(present))
        dealt = deal_paths(num_stages=len(present), length=length, count=len(passes), seed=seed)
        paths = tuple(tuple(present[place] for place in path) for path in dealt)
        order = run_paths(self._network, paths, [0.0] * len(paths))
        step = PathStep(number=self._stages.step, paths=paths, orders=orders_of(order),
                        weights=tuple(share for _, _, share in passes))  # fmt: skip
        inputs = [tokens for tokens, _, _ in passes]
        shapes = [(*tokens.shape, self._shape.dim) for tokens in inputs]
        losses = self._runner.run(step, shapes=shapes, dtype=self._dtype, inputs=inputs)
        sums = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        for number, loss in losses.items():
            sums += step.weights[number] * torch.stack([loss, self._nll[number]])
        return sums

    def _forget(self) -> None:
        """Drop the gradients of a step that is computed again."""
        for parameter in self._stage.parameters():
            parameter.grad = None

    def _nll_of(self, passes: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
        """Return this stage's part of the mean nll: all of it at the first one, which the last one sends back to."""
        present, own = self._stages.present, self._stages.replica
        place, total = present.index(own), torch.zeros(1, dtype=torch.float64)
        for tokens, targets, share in passes:
            like = torch.empty(*tokens.shape, self._shape.dim, dtype=self._dtype, device=self._mesh.device)
            values = self._mesh.receive_from_stage(like, present[place - 1]) if own else tokens
            values = self._stage.hidden(values)
            if len(present) > 1:
                self._mesh.send_to_stage(values, present[(place + 1) % len(present)])
            if own == 0:
                values = self._mesh.receive_from_stage(like, present[-1]) if len(present) > 1 else values
                total += share * next_token_loss(self._stage.logits(values), targets, z_loss=0.0)[1].double().cpu()
        return total

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
