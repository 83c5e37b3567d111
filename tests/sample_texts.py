"""Small texts that tests make corpora of."""

from __future__ import annotations

import numpy as np

from thinwire.workloads.language import Corpus

TEXTS = [f"document {number}: to be or not to be, that is question {number * number}\n" for number in range(60)]


def decoded(corpus: Corpus) -> tuple[list[str], list[str]]:
    """Return the documents of both parts, as the tokens say."""
    sides = []
    for tokens in (corpus.train, corpus.held_out):
        ends = np.flatnonzero(tokens == corpus.tokenizer.end_of_text)
        assert len(tokens) == 0 or ends[-1] == len(tokens) - 1
        sides.append([corpus.tokenizer.decode(part.tolist()) for part in np.split(tokens, ends + 1)[:-1]])
    return sides[0], sides[1]
