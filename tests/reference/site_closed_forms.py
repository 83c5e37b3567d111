"""Closed forms of the papers, with which the cost model of a site is compared."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.errors import refusal

# Elements that each rank sends in a step, as a multiple of the parameters (arXiv 1910.02054, section 7): a reduce-
# scatter and an all-gather, and in stage 3 a second all-gather, which the backward pass needs.
_ZERO_VOLUMES = (2.0, 2.0, 2.0, 3.0)


def bubble_fraction(*, num_stages: int, num_micro_batches: int, interleave: int = 1) -> float:
    """Return the idle share of a pipeline over its computing time, on links that cost nothing.

    Reference:
        arXiv 2104.04473, section 2.2: (p - 1) / (v m).

    Example:
        >>> bubble_fraction(num_stages=4, num_micro_batches=8, interleave=2)
        0.1875
    """
    return (num_stages - 1) / (interleave * num_micro_batches)


def amp_s(*, forward_s: float, backward_s: float, links_s: Sequence[float], num_micro_batches: int) -> float:
    """Return the step time of a pipeline after AMP and Varuna: compute in full, each link once a direction.

    Args:
        forward_s: Of one micro-batch in one stage.
        backward_s: Of one micro-batch in one stage.
        links_s: Link time between neighbouring stages, one entry a pair.
        num_micro_batches: Of one step.

    Reference:
        Formula as arXiv 2405.18093 quotes it for the earlier work.

    Example:
        >>> amp_s(forward_s=1, backward_s=2, links_s=[2, 2, 2], num_micro_batches=32)
        117
    """
    return (num_micro_batches + len(links_s)) * (forward_s + backward_s) + 2 * sum(links_s)


def training_time_s(*, tokens: float, num_parameters: float, num_devices: int, flops_per_s: float) -> float:
    """Return the time of a training of T tokens on n devices of X FLOP/s, with recomputed activations: 8 T P / (n X).

    Reference:
        arXiv 2104.04473, equation 4.

    Example:
        >>> days = training_time_s(tokens=300e9, num_parameters=175e9, num_devices=1024, flops_per_s=140e12) / 86400
        >>> round(days, 1)
        33.9
    """
    return 8 * tokens * num_parameters / (num_devices * flops_per_s)


def zero_volume(stage: int) -> float:
    """Return the elements that a rank sends in a step under ZeRO, as a multiple of the parameters.

    Args:
        stage: 0 (plain data parallel) to 3.

    Raises:
        ValueError: There is no such stage.
    """
    if stage not in range(len(_ZERO_VOLUMES)):
        raise refusal("there is no such ZeRO stage", got=stage, allowed="0 to 3", remedy="3")
    return _ZERO_VOLUMES[stage]


def zero_plus_plus_volume(
    *, quantised_weights: bool = True, secondary_partition: bool = True, quantised_gradients: bool = True
) -> float:
    """Return the elements that leave a node in a step under ZeRO++, in units of the 16-bit parameters.

    Args:
        quantised_weights: 8-bit weights in the all-gather before the forward pass (qwZ).
        secondary_partition: A second partition inside the node, for the backward pass (hpZ).
        quantised_gradients: 4-bit gradients in place of the reduce-scatter (qgZ).

    Reference:
        arXiv 2306.10209. Scales of the quantised blocks are not counted.

    Example:
        >>> zero_plus_plus_volume()
        0.75
    """
    weights = 0.5 if quantised_weights else 1.0
    again = 0.0 if secondary_partition else 1.0
    gradients = 0.25 if quantised_gradients else 1.0
    return weights + again + gradients


def skeletal_bytes(*, tokens: int, width: int, num_layers: int) -> float:
    """Return the 16-bit activations that MEMO keeps, moves or recomputes: 16 values a layer, token and unit of width.

    Reference:
        arXiv 2407.12117.

    Example:
        >>> skeletal_bytes(tokens=2**20, width=4096, num_layers=32) / 2**30  # 7B, a million tokens
        4096.0
    """
    return 2.0 * 16 * tokens * width * num_layers


def memo_swapped_share(
    *, always_bytes: float, other_bytes: float, layer_s: float, link_bytes_per_s: float, layers: int,
    host_bytes: float,
) -> float:  # fmt: skip
    """Return MEMO's alpha: the share of a layer's other activations that is moved to the host; the rest is recomputed.

    The moved bytes hide behind the forward pass of a layer, and those of all layers but two lie in the host's memory.

    Args:
        always_bytes: Of a layer: its input and the output of attention, which are always moved.
        other_bytes: Of a layer: the other activations that it keeps.
        layer_s: Seconds of a forward pass of a layer.
        link_bytes_per_s: From the device to the host.
        layers: Of the device.
        host_bytes: Memory of the host for this device.

    Returns:
        In [0, 1]; 0 also where not even what is always moved can be hidden.

    Example:
        >>> memo_swapped_share(always_bytes=2e9, other_bytes=14e9, layer_s=0.5, link_bytes_per_s=18e9, layers=32,
        ...                    host_bytes=1e12)
        0.5

    Reference:
        arXiv 2407.12117.
    """
    hidden = layer_s * link_bytes_per_s
    stored = host_bytes / (layers - 2) if layers > 2 else float("inf")
    return min(1.0, max(0.0, (min(hidden, stored) - always_bytes) / other_bytes))
