"""Assignment of sequences of unlike lengths to the devices of a replica, so that all finish a step together.

The time of a sequence is linear in its tokens for matrix products and quadratic for attention. So devices that hold
equally many sequences finish apart, and those that hold equally many tokens too. Here every sequence of a step goes to
the device that is free first, longest first (Graham 1969); arXiv 2502.21231, algorithm 2, fills buckets of equal work
instead. A sequence that is too long for one device, or that would hold up all others, is shared by a group of them.
A group grows only while its members compute longer than they exchange keys and values (the zones of arXiv 2509.21841).

With the loss of a step divided by the tokens of the whole step, the gradient does not depend on the assignment.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, prod
from pathlib import Path
from statistics import fmean

from thinwire.errors import DataError, refusal
from thinwire.files import read_json, short
from thinwire.site.cost_model import ATTENTION_BACKWARD

FORMAT, VERSION = "thinwire-lengths", 1
_DRAWN_STEPS = 20
_MOST_LENGTHS, _MOST_TOKENS, _MOST_BYTES = 100_000, 2**31, 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCost:
    """Seconds of training on one sequence: `seconds_per_token * s + seconds_per_pair * s^2`.

    Attributes:
        seconds_per_token: Of matrix products, on one device.
        seconds_per_pair: Of attention, on one device.
        exchange_seconds_per_token: Of the keys and values that a member of a group receives, for a token of the others.
        latency_s: Of a group's step around its ring, once for each other member.
    """

    seconds_per_token: float
    seconds_per_pair: float = 0.0
    exchange_seconds_per_token: float = 0.0
    latency_s: float = 0.0

    def alone_s(self, num_tokens: int) -> float:
        """Return the seconds of a sequence on one device.

        Example:
            >>> SequenceCost(seconds_per_token=1e-3, seconds_per_pair=1e-6).alone_s(1000)
            2.0
        """
        return self.seconds_per_token * num_tokens + self.seconds_per_pair * num_tokens**2

    def shared_s(self, num_tokens: int, *, num_devices: int) -> float:
        """Return the seconds of a sequence on a ring of devices, each with an equal part of it.

        Computing hides the exchange of keys and values where it takes longer.
        """
        computing_s = self.alone_s(num_tokens) / num_devices
        others = num_devices - 1
        exchange_s = self.exchange_seconds_per_token * num_tokens * others / num_devices + self.latency_s * others
        return max(computing_s, exchange_s)


def cost_of(
    *, layers: int, width: int, num_parameters: float, flops_per_s: float, bandwidth_bits_per_s: float = inf,
    latency_s: float = 0.0, attention_flops_per_s: float | None = None,
) -> SequenceCost:  # fmt: skip
    """Return the cost of a decoder's sequences.

    Args:
        layers: Equal blocks.
        width: Of the residual stream.
        num_parameters: Of the whole model.
        flops_per_s: FLOP/s that training reaches on a device.
        bandwidth_bits_per_s: Between neighbours of a group.
        latency_s: One way between them.
        attention_flops_per_s: As `flops_per_s`, of scores and values; by default the same.

    Example:
        >>> cost = cost_of(layers=2, width=8, num_parameters=1792, flops_per_s=1e3)
        >>> round(cost.alone_s(10), 2)  # 6 x 1792 x 10 and 7 x 2 x 8 x 100 operations
        118.72
    """
    # of causal attention half the pairs count: 2 x 2 s^2 h / 2 operations forward and 2.5 times as many backward
    attention = (1 + ATTENTION_BACKWARD) * 2 * layers * width
    # keys and values of a block travel forward and backward, and their gradients backward: 16 bits each
    exchanged = 3 * 2 * 16 * layers * width
    return SequenceCost(
        seconds_per_token=6 * num_parameters / flops_per_s,
        seconds_per_pair=attention / (attention_flops_per_s or flops_per_s),
        exchange_seconds_per_token=exchanged / bandwidth_bits_per_s, latency_s=2 * layers * latency_s,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSequence:
    """A sequence, by its index in the step's list, and the devices that share it: one, or the members of its group."""

    index: int
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LengthAssignment:
    """The sequences of a step on devices, in the order in which they run, groups first; each device's seconds.

    `num_tokens` are those of the whole step: what each device divides its sum of token losses by.
    """

    sequences: tuple[SharedSequence, ...]
    device_s: tuple[float, ...]
    num_tokens: int

    @property
    def step_s(self) -> float:
        """Seconds until the last device has finished."""
        return max(self.device_s)

    @property
    def balance(self) -> float:
        """Mean time of the devices, as a part of the longest; 1 where all finish together."""
        return sum(self.device_s) / len(self.device_s) / self.step_s

    def of_device(self, device: int) -> list[int]:
        """Return the indices of a device's sequences, groups first."""
        return [one.index for one in self.sequences if device in one.devices]


def assign_sequences(
    lengths: Sequence[int], *, num_devices: int, cost: SequenceCost, max_tokens: int, may_share: bool = True
) -> LengthAssignment:
    """Assign the sequences of a step to devices.

    A sequence of more than `max_tokens` is shared by as few devices as hold it. One that alone takes longer than all
    devices would take together is shared by more of them, while that is faster. All others go, longest first, to the
    device that is free first. This last part is at most 4/3 of the best possible time (Graham 1969).

    Raises:
        ValueError: There is nothing to assign, or a sequence is too long; names the length, the limit and the remedy.

    Example:
        >>> cost = SequenceCost(seconds_per_token=1.0)
        >>> found = assign_sequences([5, 3, 3, 4], num_devices=2, cost=cost, max_tokens=8)
        >>> found.of_device(0), found.of_device(1), found.step_s
        ([0, 2], [3, 1], 8.0)
    """
    if not lengths or min(lengths) < 1:
        raise refusal(
            "a step needs sequences of at least one token", got=f"{len(lengths)} sequences",
            allowed="one or more, none of them empty", remedy="the list without empty documents",
        )  # fmt: skip
    most = max_tokens * num_devices if may_share else max_tokens
    if max(lengths) > most:
        raise refusal(
            "a sequence is too long for the devices", got=f"{max(lengths):,} tokens",
            allowed=f"at most {most:,}: {max_tokens:,} on each of {num_devices if may_share else 1} devices",
            remedy="shorter pieces of it, more devices or more recomputed layers",
        )  # fmt: skip
    fair_s = sum(map(cost.alone_s, lengths)) / num_devices
    free_s = [0.0] * num_devices
    found = []
    for index in _longest_first(lengths):
        fewest = ceil(lengths[index] / max_tokens)
        size = fewest if not may_share else _group_size(lengths[index], fewest, num_devices, cost, fair_s)
        devices = sorted(sorted(range(num_devices), key=lambda device: (free_s[device], device))[:size])
        end_s = max(free_s[device] for device in devices)
        end_s += cost.alone_s(lengths[index]) if size == 1 else cost.shared_s(lengths[index], num_devices=size)
        for device in devices:  # the members of a group begin together
            free_s[device] = end_s
        found.append(SharedSequence(index=index, devices=tuple(devices)))
    return LengthAssignment(sequences=tuple(found), device_s=tuple(free_s), num_tokens=sum(lengths))


def _group_size(length: int, fewest: int, num_devices: int, cost: SequenceCost, fair_s: float) -> int:
    size = fewest
    while size < num_devices and cost.shared_s(length, num_devices=size) > fair_s:
        if cost.shared_s(length, num_devices=size + 1) >= cost.shared_s(length, num_devices=size):
            break  # one more device would wait for keys and values
        size += 1
    return size


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))


def pack(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Pack sequences into as few passes as first-fit decreasing finds, each of at most so many tokens.

    Returns:
        Places in `lengths` of each pass.

    Example:
        >>> pack([3, 5, 4, 2], max_tokens=7)
        [[1, 3], [2, 0]]
    """
    passes: list[list[int]] = []
    room: list[int] = []
    for place in _longest_first(lengths):
        number = next((n for n, left in enumerate(room) if left >= lengths[place]), len(room))
        if number == len(room):
            passes.append([])
            room.append(max_tokens)
        passes[number].append(place)
        room[number] -= lengths[place]
    return passes


def padded_groups(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Group sequences of like lengths, so that each group, padded to its longest, has at most so many tokens.

    A sequence that is longer than that is a group of its own.

    Returns:
        Places in `lengths` of each group, the longest sequences first.

    Example:
        >>> padded_groups([3, 8, 4, 2], max_tokens=8)
        [[1], [2, 0], [3]]
    """
    groups: list[list[int]] = []
    for place in _longest_first(lengths):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= max_tokens:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsOutlook:
    """Mean step of sequences drawn from a histogram, by the way in which devices share them.

    Attributes:
        pieces: Of a step, where each sequence is cut into pieces of at most `piece_tokens`.
        mean_tokens: Of a sequence; `longest` is the longest one's.
        step_s: Seconds where every sequence goes to the device that is free first; see `assign_sequences`.
        in_turn_s: Seconds where each device takes as many sequences.
        padded_s: Seconds where each device takes as many sequences, all padded to the longest of the step.
        shared_percent: Of the sequences, how many a group of devices shares.
        largest_group: Devices of the largest group.
    """

    sequences: int
    pieces: int
    mean_tokens: float
    longest: int
    step_s: float
    in_turn_s: float
    padded_s: float
    shared_percent: float
    largest_group: int


def length_outlook(
    counts: Mapping[int, int], *, num_devices: int, cost: SequenceCost, max_tokens: int, step_tokens: int,
    piece_tokens: int,
) -> LengthsOutlook:  # fmt: skip
    """Draw steps of about `step_tokens` tokens from a histogram of lengths, and time them; see `assign_sequences`.

    Raises:
        ValueError: The longest sequence does not fit all devices together.
    """
    draw = random.Random(0)
    lengths, weights = list(counts), list(counts.values())
    mean = sum(map(prod, counts.items())) / sum(weights)
    size = max(num_devices, round(step_tokens / mean))
    assign_sequences(
        [max(lengths)], num_devices=num_devices, cost=cost, max_tokens=max_tokens
    )  # refused here if too long
    steps = [draw.choices(lengths, weights, k=size) for _ in range(_DRAWN_STEPS)]
    found = [assign_sequences(step, num_devices=num_devices, cost=cost, max_tokens=max_tokens) for step in steps]
    groups = [len(one.devices) for step in found for one in step.sequences]
    each = -(-size // num_devices)
    num_pieces = sum(count * ceil(length / piece_tokens) for length, count in counts.items()) / sum(weights)
    return LengthsOutlook(
        sequences=size, pieces=round(size * num_pieces), mean_tokens=mean, longest=max(lengths),
        step_s=fmean(one.step_s for one in found),
        in_turn_s=fmean(
            max(sum(map(cost.alone_s, step[device::num_devices])) for device in range(num_devices)) for step in steps
        ),
        padded_s=fmean(each * cost.alone_s(max(step)) for step in steps),
        shared_percent=100 * sum(count > 1 for count in groups) / len(groups), largest_group=max(groups),
    )  # fmt: skip


def load_lengths(path: Path) -> Mapping[int, int]:
    """Read a histogram of lengths: `{"format": "thinwire-lengths", "version": 1, "counts": {"512": 40, "8192": 3}}`.

    Returns:
        How many sequences have each length, shortest first.

    Raises:
        DataError: There is no such file, or it is no histogram; names the place, the value and the limit.
    """
    content = read_json(path, most_bytes=_MOST_BYTES, command="thinwire plan --inside site.json --lengths")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f'{path}: this is no histogram: it must be an object with "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise DataError(f"{path}: version {short(content.get('version'))}; this thinwire reads {VERSION}")
    counts = content.get("counts")
    if not isinstance(counts, dict) or not 0 < len(counts) <= _MOST_LENGTHS:
        raise DataError(f'{path}: "counts" must be an object of 1 to {_MOST_LENGTHS:,} lengths, got {short(counts)}')
    found = {}
    for length, count in counts.items():
        if not (length.isascii() and length.isdigit() and len(length) <= 10 and 1 <= int(length) <= _MOST_TOKENS):
            raise DataError(f"{path}: counts has the length {short(length)}, which is not from 1 to {_MOST_TOKENS}")
        if type(count) is not int or not 0 < count <= _MOST_TOKENS:
            raise DataError(f"{path}: counts.{length} must be from 1 to {_MOST_TOKENS}, got {short(count)}")
        found[int(length)] = count
    return dict(sorted(found.items()))
