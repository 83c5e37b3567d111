"""Continuations of a few held-out texts, before and after training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import nn

from thinwire.workloads.language import Corpus, Tokenizer
from thinwire.workloads.language.generation import Sampling, generate

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
        prompt = prompt or next((_opening(line) for line in lines if len(line) > max(_PROMPT_LENGTHS)), "")
        if not prompt and not found:
            prompt = text.strip()[: max(_PROMPT_LENGTHS)]
        if prompt and prompt not in found:
            found.append(prompt)
    return found


def _opening(line: str) -> str:
    return line[: max(_PROMPT_LENGTHS)].rpartition(" ")[0]


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
