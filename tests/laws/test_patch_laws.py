"""Patches through their promises: bits come back, chains do not drift, and what was never sent is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.strangers import memory_is_bounded
from thinwire.errors import PayloadError, ThinwireError
from thinwire.publish.patch import Words, decode_fragment, encode_fragment, max_payload_bytes

# +0, -0, the smallest and largest denormals, infinities, NaN with payload bits of either sign, the largest number
ODD = np.array([0, 0x8000, 1, 0x8001, 0x7F, 0x807F, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0x7F7F], dtype=np.uint16)
SIZES = [0, 1, 2, 12, 257, 4093]


def any_words(size: int, *, seed: int) -> Words:
    """Return bits of which a third are odd values."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 16, size).astype(np.uint16)
    odd = rng.random(size) < 1 / 3
    words[odd] = rng.choice(ODD, int(odd.sum()))
    return words


def moved(words: Words, *, share: float, seed: int) -> Words:
    """Return words of which a share has other bits, from one step to any."""
    rng = np.random.default_rng(seed)
    changed = words.copy()
    at = rng.random(len(words)) < share
    near = rng.choice(np.array([1, 0xFFFF, 2, 0x8000], dtype=np.uint16), len(words))
    changed[at] += near[at]
    far = at & (rng.random(len(words)) < 0.3)
    changed[far] = any_words(len(words), seed=seed + 1)[far]
    return changed


@pytest.mark.parametrize("size", SIZES)
def test_all_bits_come_back_within_the_dense_size(size: int) -> None:
    """With and without the words before, however many of them change; nothing is written into them."""
    old = any_words(size, seed=size)
    before = old.copy()
    old.flags.writeable = False
    for share in (0.0, 0.01, 0.3, 1.0):
        words = moved(old, share=share, seed=3)
        for base in (old, None):
            payload, held = encode_fragment(words, old=base)
            assert len(payload) <= max_payload_bytes(size)
            assert np.array_equal(decode_fragment(payload, count=size, old=base), words)
            assert np.array_equal(held, words)
    assert np.array_equal(old, before)
    assert encode_fragment(old, old=old)[0] == b"\x00"


def test_every_bit_pattern_can_become_its_neighbour_or_its_opposite() -> None:
    """All 65,536 of them, among which steps cross zero and wrap around."""
    old = np.arange(1 << 16, dtype=np.uint16)
    for words in (old + np.uint16(1), old - np.uint16(1), old ^ np.uint16(0x8000), ~old):
        payload, _ = encode_fragment(words, old=old)
        assert np.array_equal(decode_fragment(payload, count=len(old), old=old), words)


def test_a_chain_of_patches_gives_the_bits_of_one_patch() -> None:
    """No drift: differences are of bits, so that two ways to a version are equal."""
    first = held = any_words(1000, seed=5)
    for seed in range(20):
        words = moved(held, share=0.2, seed=seed)
        held = decode_fragment(encode_fragment(words, old=held)[0], count=1000, old=held)
    assert np.array_equal(decode_fragment(encode_fragment(held, old=first)[0], count=1000, old=first), held)


def test_small_updates_take_few_bits() -> None:
    """Of weights that are alike those of a network: one in a hundred changes by one step, at a tenth of a bit each."""
    weights = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * 0.02
    old, words = (w.to(torch.bfloat16).view(torch.uint16).numpy() for w in (weights, weights + 5e-7))
    changed = int((old != words).sum())
    assert 300 < changed < 6000
    assert len(encode_fragment(words, old=old)[0]) < changed * 1.1


def test_a_closed_loop_of_lossy_patches_follows_the_weights() -> None:
    """Errors of E3M0 do not add up, both ends hold equal bits, and what is not finite is sent as it is."""
    rng = torch.Generator().manual_seed(0)
    weights = torch.randn(4096, generator=rng)
    shadow = held = weights.to(torch.bfloat16).view(torch.uint16).numpy()
    sizes = []
    for _ in range(12):
        weights = weights + 0.3 * torch.randn(4096, generator=rng)
        words = weights.to(torch.bfloat16).view(torch.uint16).numpy()
        payload, shadow = encode_fragment(words, old=shadow, is_lossy=True)
        held = decode_fragment(payload, count=4096, old=held)
        assert np.array_equal(held, shadow)
        sizes.append(len(payload))
    error = torch.from_numpy(held).view(torch.bfloat16).float() - weights
    assert max(sizes) == 1 + 4096 // 64 * 33
    assert float(error.square().mean().sqrt()) < 0.1  # of one step's 0.3; without feedback it would be 0.35
    weights[7] = torch.nan
    words = weights.to(torch.bfloat16).view(torch.uint16).numpy()
    payload, shadow = encode_fragment(words, old=shadow, is_lossy=True)
    assert np.array_equal(shadow, words)
    assert np.array_equal(decode_fragment(payload, count=4096, old=held), words)


def test_a_patch_needs_the_words_before() -> None:
    """The error names the remedy."""
    old = any_words(100, seed=1)
    for words in (old, moved(old, share=0.05, seed=2)):
        with pytest.raises(PayloadError, match="fetch the anchor first"):
            decode_fragment(encode_fragment(words, old=old)[0], count=100, old=None)


def test_damaged_payloads_are_refused_or_give_as_many_words() -> None:
    """Cut, longer, with other bits, of another size: a named error, within bounded memory."""
    rng = np.random.default_rng(0)
    old = any_words(2000, seed=4)
    weights = torch.randn(2000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    smooth = weights.view(torch.uint16).numpy()
    valid = [
        encode_fragment(moved(old, share=0.02, seed=1), old=old)[0],
        encode_fragment(rng.integers(0, 1 << 16, 2000).astype(np.uint16), old=None)[0],
        encode_fragment(smooth, old=None)[0],
        encode_fragment(old, old=old)[0],
        encode_fragment(smooth, old=np.roll(smooth, 1), is_lossy=True)[0],
    ]
    assert sorted(payload[0] for payload in valid) == [0, 1, 2, 3, 4]
    refused = 0
    with memory_is_bounded():
        for payload in valid:
            for _ in range(150):
                data = bytearray(payload)
                for _ in range(int(rng.integers(1, 4))):
                    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
                length = int(rng.integers(0, len(data) + 1)) if rng.random() < 0.3 else len(data)
                mutated = bytes(data[:length]) + bytes(int(rng.integers(0, 3)) if rng.random() < 0.2 else 0)
                try:
                    assert decode_fragment(mutated, count=2000, old=old).shape == (2000,)
                except ThinwireError:
                    refused += 1
        with pytest.raises(PayloadError, match="bytes for 10 words"):
            decode_fragment(bytes([3]) + bytes(1 << 16), count=10, old=None)
    assert refused > 200
