"""The settings of two papers' simulators, and how their tables are read: which bandwidth reaches which utilisation.

Sources: arXiv 2501.18512 (Streaming DiLoCo), table 4; arXiv 2503.09799 (scaling laws of DiLoCo), table 6. What the
papers leave open, and how it was found out, is told in `docs/simulate.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from thinwire.simulate.layered_step import LayeredMethod, LayeredModel, StepOrder, compute_utilisation

UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)

STREAMING_MODELS = {
    "1B": LayeredModel(num_layers=24, num_parameters=1e9, step_s=0.1),
    "10B": LayeredModel(num_layers=48, num_parameters=1e10, step_s=0.8),
    "100B": LayeredModel(num_layers=108, num_parameters=1e11, step_s=4.9),
}
STREAMING_METHODS = {
    "data-parallel": LayeredMethod(sync_interval=1),
    "DiLoCo": LayeredMethod(sync_interval=100),
    "streaming": LayeredMethod(sync_interval=100, layers_per_fragment=3),
    "streaming, overlap": LayeredMethod(sync_interval=100, layers_per_fragment=3, overlap_steps=1),
    "streaming, overlap, FP4": LayeredMethod(
        sync_interval=100, layers_per_fragment=3, overlap_steps=1, bits_per_parameter=4.0
    ),
}
# The step times of the two large ones are those of the other paper, which gives them with a digit more. Of the first
# one the table tells only its parameters by its step time, fitted here: printed are 10B and 0.8 s.
SCALING_MODELS = {
    "10B": LayeredModel(num_layers=48, num_parameters=9.3e9, step_s=0.833),
    "Llama3 405B": LayeredModel(num_layers=126, num_parameters=4.05e11, step_s=26.9),
    "DeepSeek-V3 671B": LayeredModel(num_layers=61, num_parameters=6.71e11, step_s=20.1),
}
# The numbers are those of one exchange in H + 10 steps: found by trying, the paper does not say it.
SCALING_METHODS = {
    "data-parallel": LayeredMethod(sync_interval=1),
    "DiLoCo, H 50": LayeredMethod(sync_interval=60),
    "DiLoCo, H 100": LayeredMethod(sync_interval=110),
    "DiLoCo, H 300": LayeredMethod(sync_interval=310),
}


def bandwidth_grid() -> tuple[float, ...]:
    """Return the bandwidths that both papers tried, in bits a second: 50 from 0.1 to 1000 Gbit/s in equal ratios.

    Example:
        >>> [grid_label(rate) for rate in bandwidth_grid()[36:40]]
        ['86.8', '104.8', '126.5', '152.6']
    """
    return tuple(10 ** (8 + 4 * number / 49) for number in range(50))


def grid_label(bandwidth_bits_per_s: float) -> str:
    """Return a bandwidth as the papers print it: in Gbit/s, rounded to two decimals and then to one.

    So 0.954 is written 0.9, and 86.851 is 86.8; 0.450 and 0.543 are both 0.5.
    """
    return f"{round(bandwidth_bits_per_s / 1e9, 2):.1f}"


def reaching(
    model: LayeredModel, method: LayeredMethod, *, utilisations: Sequence[float] = UTILISATIONS,
    order: StepOrder | None = None,
) -> list[int]:  # fmt: skip
    """Return for each utilisation the first place in the grid that reaches it, or the grid's length.

    It is searched by halving, which takes for granted that the utilisation grows with the bandwidth.
    """
    grid = bandwidth_grid()
    known: dict[int, float] = {len(grid): inf}
    places = []
    for wanted in utilisations:
        low, high = 0, len(grid)
        while low < high:
            middle = (low + high) // 2
            if middle not in known:
                rate = grid[middle]
                known[middle] = compute_utilisation(model, method, bandwidth_bits_per_s=rate, order=order)
            low, high = (low, middle) if known[middle] >= wanted else (middle + 1, high)
        places.append(low)
    return places


def printed_deviations(places: Sequence[int], printed: Sequence[str]) -> list[int]:
    """Return by how many places of the grid the bandwidths before those that reach differ from a printed row.

    The papers print the last bandwidth that does not reach the utilisation; where two places have one label, the nearer
    one counts. `1000.0+` is the last place.

    Example:
        >>> printed_deviations([37, 40], ["86.8", "126.5"])
        [0, 1]
    """
    labels = [grid_label(rate) for rate in bandwidth_grid()]
    deviations = []
    for place, text in zip(places, printed, strict=True):
        wanted = text.removesuffix("+")
        found = [number for number, label in enumerate(labels) if label == wanted]
        if not found:
            raise ValueError(f"printed must be bandwidths of the grid, got {text}")
        differences = [place - 1 - number for number in found]
        deviations.append(min(differences, key=abs))
    return deviations
