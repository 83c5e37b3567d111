"""Training step as a graph over the model's layers, with the compute utilisation that a bandwidth allows.

This is the kind of simulator that arXiv 2501.18512 (Streaming DiLoCo, section 3.1 and table 4) describes: every layer
has a forward node, a backward node for its activations, one for its weights, and, where it is exchanged, one for its
reduction: `4 L - 1` nodes, since the first layer needs no gradient of its input. One processor computes the nodes in
their order; reductions take turns on one wire, beside the rest of the backward pass, and the next forward pass waits
for a layer only where it comes to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from thinwire.simulate.fluid_network import FluidFlow, SimLink
from thinwire.simulate.task_graph import ComputeTask, Task, TransferTask, run_tasks

WIRE = "wire"
REPLICA = "replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredModel:
    """A model of equal layers.

    Raises:
        ValueError: A number is not above 0.
    """

    num_layers: int  # L
    num_parameters: float  # of all layers together
    # seconds of `3 L` nodes: a layer's forward, backward for activations and backward for weights take `step_s / (3 L)`
    # each, and a step has one node less
    step_s: float

    def __post_init__(self) -> None:
        if not (self.num_layers >= 1 and self.num_parameters > 0 and self.step_s > 0):
            raise ValueError(f"a model's numbers must be above 0, got {self}")

    @property
    def node_s(self) -> float:
        """Seconds of one node."""
        return self.step_s / (3 * self.num_layers)

    @property
    def compute_s(self) -> float:
        """Seconds of all that a step computes."""
        return self.node_s * (3 * self.num_layers - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """Choices that the papers leave open; the defaults reproduce the published tables."""

    weights_first: bool = False  # whether a layer's weights come before its activations in the backward pass
    has_first_gradient: bool = False  # whether the first layer computes the gradient of its input too: a node more
    # whether a forward pass waits for all reductions before it starts, and not for each at its layer
    waits_for_all: bool = False
    # whether the wire takes the earliest layer of those that are ready, not the first that was
    early_layers_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredMethod:
    """Schedule of the layers' exchanges.

    Raises:
        ValueError: A number is out of its range.
    """

    sync_interval: int  # H: inner steps between two exchanges of a layer
    # layers that are exchanged together, every `num_fragments`-th one; None for all at once
    layers_per_fragment: int | None = None
    overlap_steps: int = 0  # tau: whole steps for which a reduction may be under way without being waited for
    bits_per_parameter: float = 16.0  # that cross the wire, in each direction, for each parameter that is exchanged
    is_strided: bool = True  # False gives a fragment consecutive layers
    # from one fragment's exchange to the next one's; None for `round(H / P)` of P fragments
    gap_steps: int | None = None

    def __post_init__(self) -> None:
        if self.sync_interval < 1 or self.overlap_steps < 0 or self.bits_per_parameter <= 0:
            raise ValueError(
                f"sync_interval must be at least 1, overlap_steps at least 0 and bits_per_parameter above 0, got {self}"
            )
        if self.layers_per_fragment is not None and self.layers_per_fragment < 1:
            raise ValueError(f"layers_per_fragment must be at least 1, got {self.layers_per_fragment}; None for all")

    def fragments(self, num_layers: int) -> list[frozenset[int]]:
        """Return the layers of each fragment, counted from 0; late fragments are smaller where it does not come out.

        Example:
            >>> [sorted(fragment) for fragment in LayeredMethod(sync_interval=9, layers_per_fragment=3).fragments(6)]
            [[0, 2, 4], [1, 3, 5]]
        """
        size = self.layers_per_fragment or num_layers
        num_fragments = -(-num_layers // size)
        if not self.is_strided:
            cuts = range(0, num_layers, size)
            return [frozenset(range(first, min(first + size, num_layers))) for first in cuts]
        return [frozenset(range(first, num_layers, num_fragments)) for first in range(num_fragments)]

    def cycle(self, num_layers: int) -> tuple[int, dict[int, frozenset[int]]]:
        """Return the steps in which every fragment is exchanged once, and the layers that leave after each of them.

        With `round(H / P)` steps between fragments, a cycle may be a little shorter or longer than H.

        Example:
            >>> LayeredMethod(sync_interval=7, layers_per_fragment=3).cycle(6)[0]
            8
        """
        fragments = self.fragments(num_layers)
        gap = self.gap_steps or max(1, round(self.sync_interval / len(fragments)))
        return gap * len(fragments), {1 + gap * number: layers for number, layers in enumerate(fragments)}


def layered_tasks(
    model: LayeredModel, *, launches: Mapping[int, Collection[int]], num_steps: int, bits_per_parameter: float,
    overlap_steps: int = 0, order: StepOrder | None = None, is_merged: bool = True,
) -> tuple[list[Task], list[int]]:  # fmt: skip
    """Return the graph of some steps, and the number of the task that ends each of them.

    Args:
        model: Its layers.
        launches: The layers, counted from 0, that are reduced in each step, counted from 1.
        num_steps: How many.
        bits_per_parameter: That cross link 0 for each parameter.
        overlap_steps: The forward pass of step `t + 1 + overlap_steps` waits for what was launched in step t.
        order: What is left open.
        is_merged: Whether nodes that follow each other become one task where nothing else waits or is waited for.

    Example:
        >>> model = LayeredModel(num_layers=3, num_parameters=3e6, step_s=9.0)
        >>> tasks, ends = layered_tasks(
        ...     model, launches={1: range(3)}, num_steps=1, bits_per_parameter=16, is_merged=False)
        >>> len(tasks)  # 4 L - 1
        11
    """
    graph = _Graph(model, bits=bits_per_parameter * model.num_parameters / model.num_layers, is_merged=is_merged)
    order = order or StepOrder()
    reductions: dict[tuple[int, int], int] = {}
    ends = []
    for step in range(1, num_steps + 1):
        before = step - 1 - overlap_steps
        due = {layer: task for (launch, layer), task in reductions.items() if launch == before}
        graph.forward(model.num_layers, due, order)
        for layer, task in graph.backward(model.num_layers, launches.get(step, ()), order).items():
            reductions[step, layer] = task
        for layer in due:
            del reductions[before, layer]
        graph.end_task()
        ends.append(graph.last)
    return graph.tasks, ends


def compute_utilisation(
    model: LayeredModel, method: LayeredMethod, *, bandwidth_bits_per_s: float, order: StepOrder | None = None
) -> float:
    """Return the part of the time in which the processor computes, in the second of two cycles of the method.

    Args:
        model: Its layers.
        method: When they cross the wire.
        bandwidth_bits_per_s: Of the wire, which has no latency.
        order: What is left open.

    Example:
        >>> model = LayeredModel(num_layers=24, num_parameters=1e9, step_s=0.1)
        >>> method = LayeredMethod(sync_interval=100)
        >>> round(compute_utilisation(model, method, bandwidth_bits_per_s=1e9), 3)
        0.382
    """
    num_steps, launches = method.cycle(model.num_layers)
    twice = {step + cycle * num_steps: layers for cycle in range(2) for step, layers in launches.items()}
    tasks, ends = layered_tasks(
        model, launches=twice, num_steps=2 * num_steps, overlap_steps=method.overlap_steps,
        bits_per_parameter=method.bits_per_parameter, order=order,
    )  # fmt: skip
    num_nodes = 3 * model.num_layers - (order is None or not order.has_first_gradient)
    end_s = run_tasks(tasks, links=[SimLink(bandwidth_bits_per_s=bandwidth_bits_per_s)]).end_s
    return num_steps * num_nodes * model.node_s / (end_s[ends[-1]] - end_s[ends[num_steps - 1]])


class _Graph:
    """A graph that grows: one chain of computing, and reductions beside it."""

    def __init__(self, model: LayeredModel, *, bits: float, is_merged: bool) -> None:
        self.tasks: list[Task] = []
        self.last = -1
        self.waits: tuple[int, ...] = ()
        self._flow = FluidFlow(size_bits=bits, loads=((0, 1.0),))
        self._node_s, self._is_merged, self._num_nodes = model.node_s, is_merged, 0

    def add_node(self) -> None:
        self._num_nodes += 1
        if not self._is_merged:
            self.end_task()

    def end_task(self) -> None:
        if self._num_nodes:
            after = (self.last, *self.waits) if self.last >= 0 else self.waits
            self.tasks.append(ComputeTask(processor=REPLICA, seconds=self._num_nodes * self._node_s, after=after))
            self.last, self.waits, self._num_nodes = len(self.tasks) - 1, (), 0

    def forward(self, num_layers: int, due: Mapping[int, int], order: StepOrder) -> None:
        """Add a forward pass that waits for the reductions that are due, by their layers."""
        if due and order.waits_for_all:
            self.end_task()
            self.waits = tuple(due.values())
        for layer in range(num_layers):
            if layer in due and not order.waits_for_all:
                self.end_task()
                self.waits = (due[layer],)
            self.add_node()

    def backward(self, num_layers: int, launched: Collection[int], order: StepOrder) -> dict[int, int]:
        """Add a backward pass, and return the reductions of the layers that leave."""
        reductions = {}
        for layer in reversed(range(num_layers)):
            has_activations = layer > 0 or order.has_first_gradient
            if has_activations and not order.weights_first:
                self.add_node()
            self.add_node()
            if layer in launched:
                self.end_task()
                priority = float(layer) if order.early_layers_first else 0.0
                self.tasks.append(TransferTask(flow=self._flow, after=(self.last,), queue=WIRE, priority=priority))
                reductions[layer] = len(self.tasks) - 1
            if has_activations and order.weights_first:
                self.add_node()
        return reductions


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
