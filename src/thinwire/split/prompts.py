"""Federated fine-tuning by soft prompts around a frozen body, and the choice of the samples that are worth their bytes.

A client trains a prompt and its tail. Of its samples it keeps those on which the model errs most, since each kept
sample crosses the wire four times. Clients average prompt and tail as replicas do: `diloco` with an outer learning
rate of 1 and no momentum is federated averaging.

Reference:
    SFPrompt, arXiv 2407.17533; the score is EL2N, arXiv 2107.07075.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codecs.activation_code import ActivationCode
from thinwire.errors import refusal

_DEVIATION = 0.02
_IGNORED = -100


class SoftPrompt(nn.Module):
    """Trained vectors before the embeddings of each text.

    Args:
        length: Number of vectors, at least 1.
        width: Width of the model's hidden states.
        seed: Their first values follow from it.

    Raises:
        ValueError: The length or the width is below 1.
    """

    def __init__(self, length: int, width: int, *, seed: int = 0) -> None:
        super().__init__()
        for name, value in (("length", length), ("width", width)):
            if value < 1:
                raise refusal(f"{name} of a soft prompt is too small", got=value, allowed="1 or more",
                              remedy=f"{name}=5")  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.vectors = nn.Parameter(_DEVIATION * torch.randn(length, width, generator=generator))

    def loss(self, model: Any, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the loss of a transformers model on texts behind the prompt.

        Args:
            model: Whole, or cut by `around`.
            ids: (batch, seq) int64.
            labels: (batch, seq) int64; -100 counts nothing.
            mask: (batch, seq), 0 for padding; None where there is none.
        """
        batch, length = ids.shape[0], self.vectors.shape[0]
        embedded = model.get_input_embeddings()(ids)
        prompt = self.vectors.to(embedded.dtype).expand(batch, -1, -1)
        ignored = labels.new_full((batch, length), _IGNORED)
        more = {} if mask is None else {"attention_mask": torch.cat([mask.new_ones(batch, length), mask], 1)}
        found: Tensor = model(
            inputs_embeds=torch.cat([prompt, embedded], 1), labels=torch.cat([ignored, labels], 1), **more
        ).loss
        return found


def el2n_scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the distance of each sample's predictions from its labels: the mean of ||softmax - onehot||_2.

    Args:
        logits: (batch, seq, classes), or (batch, classes).
        labels: (batch, seq) or (batch,) int64; -100 counts nothing. No shift: position n of both belongs together.

    Returns:
        (batch,) float32; 0 for a sample without labels.

    Example:
        >>> sure, wrong = torch.tensor([100.0, 0.0]), torch.tensor([0.0, 100.0])
        >>> el2n_scores(torch.stack([sure, wrong]), torch.tensor([0, 0]))
        tensor([0.0000, 1.4142])
    """
    if labels.ndim == 1:
        logits, labels = logits[:, None], labels[:, None]
    counted = labels != _IGNORED
    errors = logits.float().softmax(-1)
    hit = labels.clamp_min(0)[..., None]
    errors = errors.scatter_add(-1, hit, torch.full_like(hit, -1, dtype=errors.dtype))
    lengths = torch.linalg.vector_norm(errors, dim=-1) * counted
    found: Tensor = lengths.sum(1) / counted.sum(1).clamp_min(1)
    return found


def hardest(scores: Tensor, share: float) -> Tensor:
    """Return the numbers of the samples with the highest scores, in ascending order.

    Args:
        scores: (samples,).
        share: Part to keep, above 0 and at most 1; at least one sample is kept.

    Raises:
        ValueError: The share is out of its range, there is no sample, or a score is NaN.
    """
    if not 0 < share <= 1:
        raise refusal("the share of kept samples is out of its range", got=share, allowed="above 0, at most 1",
                      remedy="share=0.5")  # fmt: skip
    if not len(scores) or bool(scores.isnan().any()):
        raise refusal("samples cannot be ranked", got="no score" if not len(scores) else "NaN among the scores",
                      allowed="one finite score a sample", remedy="a lower learning rate")  # fmt: skip
    kept: Tensor = scores.topk(math.ceil(share * len(scores))).indices.sort().values
    return kept


def split_round_bytes(*, samples: int, positions: int, width: int, code: ActivationCode) -> int:
    """Return the payload bytes of one pass over some samples, forward and backward, one sample at a time.

    Args:
        samples: Kept samples of a client.
        positions: Of one sample, the prompt's included.
        width: Width of the hidden states.
        code: What crosses the wire.

    Example:
        >>> split_round_bytes(samples=2, positions=8, width=16, code=ActivationCode("float32", "float32"))
        4096
    """
    numel = positions * width
    return 2 * samples * (code.payload_bytes(numel) + code.payload_bytes(numel, is_forward=False))
