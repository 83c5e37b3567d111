"""Soft prompts around a frozen body: gradients, the choice of samples, bytes, and averages over clients."""

from __future__ import annotations

import pytest
import torch
from split_servers import LAYERS, VOCABULARY, WIDTH, connected, cut, llama, served

import thinwire
from thinwire.codecs.activation_code import ActivationCode
from thinwire.split import SoftPrompt, el2n_scores, hardest, split_round_bytes

TEXTS = torch.randint(VOCABULARY, (12, 7), generator=torch.Generator().manual_seed(2))
PROMPT = 3


def test_a_prompt_trains_as_around_the_whole_model_and_padding_changes_nothing() -> None:
    whole = llama()
    with served(whole, range(1, 4)) as server, connected(server) as body:
        model, found, expected = cut(whole, body), SoftPrompt(PROMPT, WIDTH), SoftPrompt(PROMPT, WIDTH)
        found.loss(model, TEXTS[:2], TEXTS[:2]).backward()
        expected.loss(whole, TEXTS[:2], TEXTS[:2]).backward()
        assert torch.equal(found.vectors.grad, expected.vectors.grad)
        padded = torch.cat([TEXTS[:2], TEXTS[:2, :4]], 1)
        labels = torch.where(torch.arange(11) < 7, padded, -100)
        mask = (torch.arange(11) < 7).long().expand(2, -1)
        torch.testing.assert_close(
            found.loss(model, padded, labels, mask), found.loss(model, TEXTS[:2], TEXTS[:2]), rtol=1e-6, atol=0
        )


def test_scores_are_the_distances_of_predictions_from_labels() -> None:
    logits = torch.randn(4, 5, 6, dtype=torch.float64)
    labels = torch.randint(6, (4, 5))
    labels[1, 2:] = -100
    labels[3] = -100
    expected = []
    for sample in range(4):
        rows = [
            torch.linalg.vector_norm(logits[sample, place].float().softmax(0) - torch.eye(6)[labels[sample, place]])
            for place in range(5) if labels[sample, place] >= 0
        ]  # fmt: skip
        expected.append(torch.stack(rows).mean() if rows else torch.tensor(0.0))
    torch.testing.assert_close(el2n_scores(logits, labels), torch.stack(expected))
    assert hardest(torch.tensor([0.3, 0.9, 0.1, 0.5, 0.2]), 0.5).tolist() == [0, 1, 3]
    assert hardest(torch.tensor([0.3]), 1e-9).tolist() == [0]


def test_wrong_arguments_are_refused() -> None:
    for share in (0.0, 1.5, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"out of its range.*try share=0\.5"):
            hardest(torch.ones(3), share)
    for scores in (torch.empty(0), torch.tensor([1.0, torch.nan])):
        with pytest.raises(ValueError, match="samples cannot be ranked"):
            hardest(scores, 0.5)
    with pytest.raises(ValueError, match="length of a soft prompt is too small; got 0"):
        SoftPrompt(0, 8)


def test_clients_train_prompt_and_tail_by_a_byte_law_and_end_alike() -> None:
    """One round of SFPrompt: three clients, each with four samples of which it keeps two."""
    code, whole, share = ActivationCode(), llama(), 0.5
    with served(whole, range(1, 4)) as server:

        def client(transport: thinwire.LoopbackTransport) -> tuple[dict[str, torch.Tensor], dict[str, int], int, float]:
            with connected(server, code=code) as body:
                model, prompt = cut(whole, body), SoftPrompt(PROMPT, WIDTH)
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(name.startswith(("model.layers.2", "model.norm", "lm_head")))
                own = TEXTS[transport.replica :: transport.num_replicas]
                with torch.no_grad():
                    scores = el2n_scores(model(input_ids=own).logits[:, :-1], own[:, 1:])
                for_scores = sum(body.sent_bytes.values())
                kept = own[hardest(scores, share)]
                trained = torch.nn.ModuleList([prompt, model])
                optimizer = thinwire.DistributedOptimizer(
                    trained, torch.optim.AdamW([one for one in trained.parameters() if one.requires_grad], lr=1e-2),
                    method=thinwire.methods.diloco(sync_interval=len(kept), outer_lr=1.0, outer_momentum=0.0),
                    transport=transport,
                )  # fmt: skip
                losses = []
                for _ in range(6):
                    for text in kept:
                        loss = prompt.loss(model, text[None], text[None])
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        losses.append(loss.item())
                optimizer.close(final_exchange=True)
                found = {name: one.detach().clone() for name, one in trained.named_parameters() if one.requires_grad}
                return found, {**body.sent_bytes, **body.received_bytes}, for_scores, losses[-1] - losses[0]

        outcomes = thinwire.run_replicas(3, client)
    for found, counted, for_scores, gain in outcomes:
        assert all(torch.equal(found[name], value) for name, value in outcomes[0][0].items()) and gain < 0
        law = 6 * split_round_bytes(samples=2, positions=7 + PROMPT, width=WIDTH, code=code)
        assert sum(counted.values()) == law + 2 * for_scores
    assert len(outcomes[0][0]) == 12 and LAYERS == 5


def test_both_published_shares_of_federated_fine_tuning_follow_from_one_number_of_samples() -> None:
    """0.47 (ViT-B) and 0.19 (ViT-L) of arXiv 2407.17533, which does not state how many samples a client keeps.

    With 108 samples, float32, 197 patches and 5 prompts, and one block as tail, the law gives both.
    """
    code = ActivationCode("float32", "float32")
    for width, blocks, published in ((768, 12, 0.47), (1024, 24, 0.19)):
        block = 12 * width**2 + 13 * width
        whole = blocks * block + 16 * 16 * 3 * width + width + 198 * width + 2 * width + 1000 * (width + 1)
        passes = split_round_bytes(samples=108, positions=197 + 5, width=width, code=code)
        share = (passes + 2 * 4 * (block + 5 * width)) / (2 * 4 * whole)
        assert round(share, 2) == published
