"""Seeds and coins that every replica derives alike, without a word between them. Nothing here imports torch."""

from __future__ import annotations

import hashlib


def derive_seed(base: int, *labels: str | int) -> int:
    """Derive a seed from a base seed and a path of labels.

    The same arguments give the same seed on every machine and in every version of Python. Different paths give
    unrelated seeds: each label is hashed with its type and its length, so `("ab",)`, `("a", "b")`, `(1,)` and `("1",)`
    never meet by being joined.

    Args:
        base: The run's own seed; any integer.
        *labels: What the seed is for, such as `"sampler", epoch`.

    Returns:
        An integer in [0, 2**63), which every generator of random numbers takes as a seed.

    Raises:
        ValueError: A label, or the base, is neither a text nor an integer.

    Example:
        >>> derive_seed(17, "sampler", 0) == derive_seed(17, "sampler", 0)
        True
        >>> derive_seed(17, "sampler", 0) == derive_seed(17, "sampler", 1)
        False
        >>> derive_seed(17)
        8894957502519994771
    """
    digest = hashlib.blake2b(digest_size=8, person=b"thinwire.seed")
    for label in (base, *labels):
        digest.update(_encode(label))
    return int.from_bytes(digest.digest(), "little") >> 1


def toss(probability: float, base: int, *labels: str | int) -> bool:
    """Toss a coin that shows the same side on every replica; `labels` are as for `derive_seed`.

    Example:
        >>> [toss(0.5, 17, "coin", number) for number in range(6)]
        [True, True, True, True, False, True]
    """
    return derive_seed(base, *labels) < probability * 2**63


def _encode(label: str | int) -> bytes:
    # True would pass for the integer 1 and make two labels that look different the same.
    if isinstance(label, bool) or not isinstance(label, str | int):
        raise ValueError(f"a seed is derived from integers and texts, got {label!r}")
    tag = b"s" if isinstance(label, str) else b"i"
    body = str(label).encode("utf-8", "surrogatepass")
    return tag + len(body).to_bytes(8, "little") + body
