"""Random bits as a pure function of a key and a counter, the same on CPU and GPU."""

from __future__ import annotations

import torch

from thinwire.shared_random import derive_seed

# Each step's shift, and what it multiplies by: odd, with bits set without pattern. Chosen for this file; tests
# hold what comes out of them.
_STEPS = ((15, 0x6C8E9CF5), (13, 0x3C6EF36B), (16, 0x2545F491))


def counter_keys(seed: int, *, start: int, device: torch.device) -> torch.Tensor:
    """Return the keys of the stream `seed` from counter `start` on.

    Args:
        seed: Selects the stream; any integer.
        start: The first counter.
        device: Where the random bits will be computed.

    Returns:
        int32, `(3,)`: two keys and the low 32 bits of `start`; its high bits are part of the keys.
    """
    word = derive_seed(seed, "counter", start >> 32)
    values = [_as_int32(word), _as_int32(word >> 32), _as_int32(start)]
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_bits(keys: torch.Tensor, *, count: int) -> torch.Tensor:
    """Return 23 random bits for each of `count` counters in a row.

    Three rounds of xor, shift and multiply. The second key enters between them: without it, two streams would be the
    same numbers in another order. Good enough for rounding, no cryptography. All arithmetic is on 32-bit words and
    wraps, so every device computes the same bits.

    Args:
        keys: From `counter_keys`.
        count: How many, below 2**31.

    Returns:
        int32, `(count,)`, each in [0, 2**23).
    """
    word = torch.arange(count, dtype=torch.int32, device=keys.device)
    word = word.add_(keys[2]).bitwise_xor_(keys[0])
    for step, (shift, multiplier) in enumerate(_STEPS):
        if step == 1:
            word = word.bitwise_xor_(keys[1])
        word = word.bitwise_xor_(_shift_right(word, shift)).mul_(multiplier)
    word = word.bitwise_xor_(_shift_right(word, 16))
    return _shift_right(word, 9)


def _shift_right(word: torch.Tensor, bits: int) -> torch.Tensor:
    # int32 shifts copy the sign into the top; the mask makes the shift a logical one
    return word.bitwise_right_shift(bits).bitwise_and_((1 << (32 - bits)) - 1)


def _as_int32(value: int) -> int:
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)
