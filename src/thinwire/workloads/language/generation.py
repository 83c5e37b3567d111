"""Text generation with a language model, one token at a time, and samples of it before and after training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import CheckpointError
from thinwire.workloads.language.corpus import Corpus
from thinwire.workloads.language.tokenizers import Tokenizer

# What a byte-level tokenizer returns for the first bytes of a character whose others are still to come.
_INCOMPLETE = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Choice of the next token, and the number of tokens.

    Attributes:
        max_tokens: Tokens to add, at most.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Number of the most likely tokens to draw among; 0 draws among all.
        seed: Of the draws.
    """

    max_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


def generate(model: nn.Module, tokenizer: Tokenizer, prompt: str, *, sampling: Sampling) -> Iterator[str]:
    """Yield the continuation of a prompt in pieces, as its tokens come, from a `LanguageModel` in evaluation mode.

    It ends after `max_tokens`, or where the model ends the text. A text that is longer than the model's sequence is
    continued from its last half, so that a token costs one position and not the whole text.

    Raises:
        ValueError: The prompt is empty.
        CheckpointError: The model's logits are not finite.
    """
    tokens = tokenizer.encode([prompt])[0].tolist()
    if not tokens:
        raise ValueError("the prompt is empty; give at least one character, such as --prompt 'def '")
    new: list[int] = []
    printed = ""
    for token in _continue(model, tokens, num_tokens=tokenizer.vocab_size, sampling=sampling):
        if token == tokenizer.end_of_text:
            break
        new.append(token)
        text = _decode_after(tokenizer, tokens, new)
        if not text.endswith(_INCOMPLETE) and len(text) > len(printed):
            yield text[len(printed) :]
            printed = text
    if new and len(rest := _decode_after(tokenizer, tokens, new)) > len(printed):
        yield rest[len(printed) :]


def _decode_after(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    # with the prompt's last token before it: some tokenizers drop the space at the start of a text
    last = list(prompt[-1:])
    return tokenizer.decode([*last, *new])[len(tokenizer.decode(last)) :]


def _continue(model: Any, tokens: Sequence[int], *, num_tokens: int, sampling: Sampling) -> Iterator[int]:
    """Yield new tokens, each of the tokenizer's `num_tokens`."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    seen, cache = list(tokens)[-model.max_seq_len :], None
    unread = seen
    for _ in range(sampling.max_tokens):
        with torch.no_grad():
            logits, cache = model.decode(torch.tensor([unread], device=device), cache)
        # drawn on the CPU, so that a seed means the same on every device
        token = _choose(logits[0, :num_tokens].float().cpu(), sampling=sampling, generator=generator)
        yield token
        seen.append(token)
        unread = [token] if cache is not None else seen
        if len(seen) > model.max_seq_len:
            seen = seen[-max(1, model.max_seq_len // 2) :]
            unread, cache = seen, None


def _choose(logits: Tensor, *, sampling: Sampling, generator: torch.Generator) -> int:
    if not bool(torch.isfinite(logits).all()):
        raise CheckpointError("the model's logits hold NaN or infinity: training diverged; take an earlier --step")
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        least = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))


_SAMPLE_TOKENS = 24
_NUM_SAMPLES = 2
# A sample ends after so many seconds, so that one of a large model on a CPU does not delay its run.
_SAMPLE_S = 0.25
# Whole lines of so many characters: long enough to be a beginning, short enough for a line of a table.
_PROMPT_LENGTHS = range(15, 41)
_READ_TOKENS = 2000


def find_prompts(corpus: Corpus) -> list[str]:
    """Return lines, or first words of long ones, from several places of the held-out text; fewer where it is short."""
    found: list[str] = []
    for part in range(_NUM_SAMPLES):
        begin = part * len(corpus.held_out) // _NUM_SAMPLES
        text = corpus.tokenizer.decode(corpus.held_out[begin : begin + _READ_TOKENS].tolist())
        # the first line may begin in the middle of a word
        lines = [line.strip() for line in text.splitlines()[1:]]
        prompt = next((line for line in lines if len(line) in _PROMPT_LENGTHS), "")
        longest = max(_PROMPT_LENGTHS)
        prompt = prompt or next((line[:longest].rpartition(" ")[0] for line in lines if len(line) > longest), "")
        if not prompt and not found:
            prompt = text.strip()[: max(_PROMPT_LENGTHS)]
        if prompt and prompt not in found:
            found.append(prompt)
    return found


def continue_briefly(
    model: nn.Module, tokenizer: Tokenizer, prompts: Sequence[str], *, clock: Callable[[], float] = time.monotonic
) -> list[str]:
    """Return a continuation of each prompt: a few tokens, the same for the same model, and fewer where they take long.

    The model's mode and torch's random state stay as they are.
    """
    # not greedy: a model that has seen little repeats its most likely token for ever
    sampling = Sampling(max_tokens=_SAMPLE_TOKENS)
    was_training = model.training
    model.eval()
    try:
        texts = []
        for prompt in prompts:
            until_s, pieces = clock() + _SAMPLE_S, []
            for piece in generate(model, tokenizer, prompt, sampling=sampling):
                pieces.append(piece)
                if clock() > until_s:
                    break
            texts.append("".join(pieces))
        return texts
    finally:
        model.train(was_training)
