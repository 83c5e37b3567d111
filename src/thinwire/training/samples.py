"""Samples that a run keeps: continuations of a few prompts from before and after training."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import nn

from thinwire.data import Corpus, Tokenizer
from thinwire.files import write_whole
from thinwire.models.generation import Sampling, generate

SAMPLES = "samples.json"
_NUM_SAMPLES = 2
_SAMPLE_TOKENS = 24
# A sample ends after so many seconds, so that one of a large model on a CPU does not delay its run.
_SAMPLE_S = 0.25
# Whole lines of so many characters: long enough to be a beginning, short enough for a line of a table.
_PROMPT_LENGTHS = range(15, 41)
_READ_TOKENS = 2000


def begin_samples(run_dir: Path, model: nn.Module, corpus: Corpus, *, warn: Callable[[str], None]) -> None:
    """Write `samples.json`: prompts from the held-out text, and what the untrained model makes of them.

    Each has the keys `prompt`, `before` and `after`; the last one is empty until `finish_samples`. A file that is
    there stays, so that a resumed run keeps what its model wrote before training.

    Args:
        run_dir: The run's folder.
        model: With its first weights.
        corpus: The run's.
        warn: Receives a problem; a run goes on without samples.
    """
    path = run_dir / SAMPLES
    if path.exists():
        return
    with _not_essential(warn):
        prompts = find_prompts(corpus)
        texts = continue_briefly(model, corpus.tokenizer, prompts)
        samples = [{"prompt": prompt, "before": text, "after": ""} for prompt, text in zip(prompts, texts, strict=True)]
        write_whole(path, json.dumps(samples, indent=2) + "\n")


def finish_samples(run_dir: Path, model: nn.Module, tokenizer: Tokenizer, *, warn: Callable[[str], None]) -> None:
    """Add what the trained model makes of the prompts to `samples.json`, if the run has one.

    Args:
        run_dir: The run's folder.
        model: With the global parameters in place.
        tokenizer: The run's.
        warn: Receives a problem.
    """
    path = run_dir / SAMPLES
    if not path.exists():
        return
    with _not_essential(warn):
        samples = json.loads(path.read_text(encoding="utf-8"))
        texts = continue_briefly(model, tokenizer, [sample["prompt"] for sample in samples])
        for sample, text in zip(samples, texts, strict=True):
            sample["after"] = text
        write_whole(path, json.dumps(samples, indent=2) + "\n")


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


@contextlib.contextmanager
def _not_essential(warn: Callable[[str], None]) -> Iterator[None]:
    """Turn a failure into a warning: a run is worth more than its samples, and models of transformers vary."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warn(f"no samples of the model's text: {reason}; --no-samples leaves them out")
