"""Ensembles against sums that are written out, with experts whose next token depends on the last one alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.ensembles.ensemble import Ensemble
from thinwire.errors import NonFiniteError


class Bigrams(nn.Module):
    def __init__(self, seed: int, *, vocab_size: int = 5) -> None:
        super().__init__()
        self.vocab_size, self.max_seq_len, self.num_calls = vocab_size, 16, 0
        table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed))
        self.table = nn.Parameter(3 * table, requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_calls += 1
        return self.table[tokens]


def probability(model: nn.Module, before: int, after: int) -> float:
    return math.exp(F.log_softmax(model.table[before].double(), dim=-1)[after])


def by_hand(models: list[Bigrams], prior: list[float], text: list[int], token: int, *, learns: bool = True) -> float:
    """p(token | text) with the posterior of Bayes, as the formula stands."""
    joint = list(prior)
    if learns:
        for before, after in itertools.pairwise(text):
            joint = [weight * probability(model, before, after) for weight, model in zip(joint, models, strict=True)]
    return sum(
        weight / sum(joint) * probability(model, text[-1], token) for weight, model in zip(joint, models, strict=True)
    )


TOKENS = torch.randint(5, (3, 9), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("learns", [True, False])
def test_probabilities_are_those_of_the_formula_and_have_the_sum_1(learns: bool) -> None:
    models, prior = [Bigrams(1), Bigrams(2)], [0.3, 0.7]
    ensemble = Ensemble({"a": models[0], "b": models[1]}, prior=prior, has_posterior=learns)
    found = ensemble.logits(TOKENS).double().exp()
    assert found.shape == (3, 9, 5)
    assert (found.sum(-1) - 1).abs().max() < 1e-6
    for row, text in enumerate(TOKENS.tolist()):
        for place in range(9):
            wanted = [by_hand(models, prior, text[: place + 1], token, learns=learns) for token in range(5)]
            assert found[row, place].tolist() == pytest.approx(wanted, abs=1e-6)
    loss, nll = ensemble.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    exact = [-math.log(by_hand(models, prior, text[: place + 1], text[place + 1], learns=learns))
             for text in TOKENS.tolist() for place in range(8)]  # fmt: skip
    assert loss == nll and float(nll) == pytest.approx(sum(exact) / len(exact), abs=1e-6)


def test_an_ensemble_of_one_is_its_member_and_of_two_alike_too() -> None:
    model = Bigrams(1)
    wanted = F.log_softmax(model(TOKENS), dim=-1)
    torch.testing.assert_close(Ensemble({"a": model}, prior=[1.0]).logits(TOKENS), wanted)
    torch.testing.assert_close(Ensemble({"a": model, "b": model}, prior=[0.9, 0.1]).logits(TOKENS), wanted)


def test_tokens_that_one_member_does_not_have_are_impossible_for_it_alone() -> None:
    models = {"a": Bigrams(1), "b": Bigrams(2, vocab_size=7)}
    ensemble = Ensemble(models, prior=[0.5, 0.5])
    found = ensemble.logits(TOKENS).exp()
    assert ensemble.vocab_size == 7 and (found.sum(-1) - 1).abs().max() < 1e-6
    wanted = 0.5 * F.softmax(models["b"](TOKENS), dim=-1)[:, 0, 5:]
    torch.testing.assert_close(found[:, 0, 5:], wanted)


def test_a_long_text_that_suits_one_member_alone_stays_finite() -> None:
    certain = [Bigrams(1), Bigrams(2)]
    for number, model in enumerate(certain):
        model.table.fill_(-200).fill_diagonal_(200 if number else -200)
    ensemble = Ensemble({"a": certain[0], "b": certain[1]}, prior=[1.0, 0.0])
    tokens = torch.zeros(1, 2000, dtype=torch.int64)
    loss = ensemble.loss(tokens, tokens)[0]
    # the member that fits is found in spite of a prior of 1e-6, after a few tokens
    assert 0 <= float(loss) < 20 / 2000 and ensemble.mean_posterior == {"a": 0.0, "b": 1.0}


def test_padding_counts_nothing_and_changes_no_posterior() -> None:
    models = {"a": Bigrams(1), "b": Bigrams(2)}
    targets = TOKENS[:, 1:].clone()
    targets[:, 5:] = -1
    padded, whole = (Ensemble(models, prior=[0.5, 0.5]) for _ in range(2))
    found = padded.loss(TOKENS[:, :-1], targets, is_padded=True)[1]
    torch.testing.assert_close(found, whole.loss(TOKENS[:, :5], TOKENS[:, 1:6])[1])
    assert padded.mean_posterior == pytest.approx(whole.mean_posterior)


def test_an_updating_prior_is_the_decayed_mean_of_the_posteriors_so_far() -> None:
    models = [Bigrams(1), Bigrams(2)]
    ensemble = Ensemble(dict(zip("ab", models, strict=True)), prior=[0.5, 0.5], is_updating=True)
    ensemble.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    prior = [0.5, 0.5]
    for text in TOKENS.tolist():
        joint = list(prior)
        for before, after in itertools.pairwise(text):
            joint = [weight * probability(model, before, after) for weight, model in zip(joint, models, strict=True)]
        prior = [0.3 * old + 0.7 * new / sum(joint) for old, new in zip(prior, joint, strict=True)]
    assert ensemble.prior.tolist() == pytest.approx(prior, abs=2e-6)


@pytest.mark.parametrize("prior", [{}, {"is_updating": True}, {"has_posterior": False}])
def test_a_member_of_nan_is_named_and_spoils_no_number(prior: dict[str, bool]) -> None:
    class Flat(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*tokens.shape, 4)

    class Broken(Flat):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * torch.nan

    both = Ensemble({"good": Flat(), "bad": Broken()}, prior=[0.5, 0.5], **prior)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    for use in (lambda: both.loss(tokens, tokens), lambda: both.logits(tokens)):
        with pytest.raises(NonFiniteError, match=r"the probabilities of bad are NaN.*make a set without it"):
            use()
    assert both.mean_posterior == {"good": 0.0, "bad": 0.0}
    loss, _ = Ensemble({"good": Flat()}, prior=[1.0], **prior).loss(tokens, tokens)
    assert float(loss) == pytest.approx(1.3862944)
