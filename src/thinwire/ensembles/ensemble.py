"""Ensemble of language models: probabilities of each token, weighted by each expert's posterior given the text so far.

    p(x_t | x_<t) = sum_j p(j | x_<t) p_j(x_t | x_<t),    p(j | x_<t) ~ p(j) prod_(s<t) p_j(x_s | x_<s)

Probabilities are averaged, never their logarithms: an average of those is no distribution.

Reference:
    arXiv 2108.05036, section 5, and arXiv 2208.03306, section 2: posterior by Bayes; uniform, updating and cached
    priors with decay 0.3. Unlike there, no expert's prior falls below 1e-6, so that a domain that comes back is found
    again within tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.errors import NonFiniteError

DECAY = 0.3
# 14 nats: a few tokens of a text that suits one expert better make up for it.
_LEAST_PRIOR = 1e-6


class Ensemble(nn.Module):
    """Language models of one tokenizer as one; `thinwire.inference.evaluate` takes it for a model.

    Args:
        models: By name, modules that return logits (batch, seq, vocabulary) of tokens (batch, seq) int64.
        prior: Probability of each model before a sequence begins; their sum is 1.
        is_updating: Whether the prior follows the posteriors at the ends of the sequences so far.
        has_posterior: Whether the text so far moves the weights; without it they stay at the prior.
        decay: Weight of earlier sequences in an updating prior, relative to the last one.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], *, prior: Sequence[float], is_updating: bool = False,
        has_posterior: bool = True, decay: float = DECAY,
    ) -> None:  # fmt: skip
        super().__init__()
        self.names, self.members = tuple(models), nn.ModuleList(models.values())
        self.prior = torch.tensor(prior, dtype=torch.float64).clamp(min=_LEAST_PRIOR)
        self.prior /= self.prior.sum()
        self._is_updating, self._has_posterior, self._decay = is_updating, has_posterior, decay
        self._sum_of_ends, self._num_ends = torch.zeros_like(self.prior), 0

    @property
    def vocab_size(self) -> int:
        return max(int(model.vocab_size) for model in self.members)  # type: ignore[arg-type]

    @property
    def max_seq_len(self) -> int:
        return min(int(model.max_seq_len) for model in self.members)  # type: ignore[arg-type]

    @property
    def mean_posterior(self) -> dict[str, float]:
        """Mean weight of each member at the ends of the sequences so far."""
        return dict(zip(self.names, (self._sum_of_ends / max(1, self._num_ends)).tolist(), strict=True))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of the token after each position.

        Args:
            tokens: (batch, seq) int64.

        Returns:
            (batch, seq, vocab_size) float32; the exponentials of each row have the sum 1.
        """
        each = [F.log_softmax(model(tokens).float(), dim=-1) for model in self.members]
        # an embedding may have more rows than the tokenizer has tokens: those are impossible for the other members
        widest = max(one.shape[-1] for one in each)
        each = [F.pad(one, (0, widest - one.shape[-1]), value=-torch.inf) for one in each]
        weights = self._log_weights(torch.stack([_of_targets(one[:, :-1], tokens[:, 1:]) for one in each], dim=-1))
        total = torch.full_like(each[0], -torch.inf)
        for member, one in enumerate(each):
            total = torch.logaddexp(total, one + weights[..., member, None].float())
        return total

    forward = logits

    @torch.no_grad()
    def loss(self, tokens: Tensor, targets: Tensor, *, is_padded: bool = False) -> tuple[Tensor, Tensor]:
        """Return twice the mean negative log-likelihood in nats, from (batch, seq) int64 each.

        With `is_padded` negative targets count nothing.
        """
        counted = targets >= 0 if is_padded else torch.ones_like(targets, dtype=torch.bool)
        wanted = targets.clamp(min=0)
        found = torch.stack(
            [_of_targets(F.log_softmax(model(tokens).float(), dim=-1), wanted) for model in self.members], dim=-1
        )
        found = torch.where(counted[..., None], found, 0.0)
        each = torch.logsumexp(self._log_weights(found)[:, :-1] + found, dim=-1)
        nll = -each[counted].sum() / counted.sum().clamp(min=1)
        return nll, nll

    def _log_weights(self, found: Tensor) -> Tensor:
        """Return log p(j | x_<t), (batch, seq + 1, members) float64, from log p_j(x_t | x_<t), (batch, seq, members).

        In float64, since a sum of a thousand logarithms decides.
        """
        wrong = [
            name for name, is_nan in zip(self.names, found.isnan().flatten(0, 1).any(0).tolist(), strict=True) if is_nan
        ]
        if wrong:
            raise NonFiniteError(
                f"the probabilities of {', '.join(wrong)} are NaN, and so would be those of all experts; make a set "
                f"without it, or train it again at a lower learning rate"
            )
        before = F.pad(found.double().cumsum(1), (0, 0, 1, 0))
        rows = []
        for sequence in before:  # in order: an updating prior follows from the sequences before
            log_prior = self.prior.to(found.device).log()
            posterior = torch.log_softmax(log_prior + sequence, dim=-1)
            rows.append(posterior if self._has_posterior else log_prior.expand_as(sequence))
            end = rows[-1][-1].exp().cpu()
            self._sum_of_ends, self._num_ends = self._sum_of_ends + end, self._num_ends + 1
            if self._is_updating:
                self.prior = (self._decay * self.prior + (1 - self._decay) * end).clamp(min=_LEAST_PRIOR)
                self.prior /= self.prior.sum()
        return torch.stack(rows)


def _of_targets(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    return log_probabilities.gather(-1, targets[..., None])[..., 0]
