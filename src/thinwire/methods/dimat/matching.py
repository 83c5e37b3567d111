"""Matched averaging of models whose units have no common order: match first, then average (arXiv 2404.08079).

Two networks that were trained apart compute similar things with units in a different order, and their plain average
computes nothing. `match_and_merge` finds, for every group of units, the permutation of a neighbour's units that
correlates best with one's own on some batches of data, permutes the neighbour, averages with the weights of a mixing
matrix, and measures the statistics of BatchNorm again. One's own model is the reference, so two neighbours that merge
with each other do not end with the same parameters, also where their weights are symmetric.

What differs from the shipped code: units are watched wherever a layer reads them and the correlations are summed
(there: one place for each group, written down by hand for each architecture); statistics are summed in float64; dropout
stays off while BatchNorm is measured; the baselines measure BatchNorm again too; weight matching compares with one's
own model (there: with what was merged so far, scaled by its weights), in the order of the groups (there: a random one).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.errors import MissingExtra, NonFiniteError
from thinwire.methods.dimat.permutation_graph import (
    PermutationGraph,
    PermutationGroup,
    UnitAxis,
    find_permutations,
)
from thinwire.transport.shards import local_shard


def has_statistics(model: nn.Module) -> bool:
    """Return whether some BatchNorm of the model keeps running statistics."""
    return any(True for _ in _norms(model))


@torch.no_grad()
def reset_statistics(model: nn.Module, batches: Iterable[torch.Tensor]) -> None:
    """Replace the running statistics of every BatchNorm by their plain mean over some batches.

    The variance of an averaged unit is smaller than the average of the variances, so a merged model with averaged
    statistics is far off until they are measured on data (arXiv 2211.08403).

    Every batch counts the same, whatever its size. Only BatchNorm is in training mode meanwhile; dropout is off. Modes
    and momenta are as before afterwards. A model without running statistics is not run at all.

    Args:
        model: The model; only its running statistics change.
        batches: Inputs on the model's device, each of at least two samples.

    Example:
        >>> norm = nn.BatchNorm1d(1)
        >>> reset_statistics(norm, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])])
        >>> norm.running_mean.item(), norm.running_var.item(), norm.training
        (4.0, 2.0, True)
    """
    norms = list(_norms(model))
    if not norms:
        return
    modes = {module: module.training for module in model.modules()}
    momenta = [norm.momentum for norm in norms]
    try:
        model.eval()
        for norm in norms:
            norm.train()
            norm.momentum = None  # a cumulative mean instead of an exponential one
            norm.reset_running_stats()
        for batch in batches:
            model(batch)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _norms(model: nn.Module) -> Iterator[_BatchNorm]:
    return (module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats)


# what a product of two deviations counts for at least: below, a unit counts as one that never changes
MIN_DEVIATIONS = 1e-7


def correlations(
    own: PermutationGraph, neighbour: PermutationGraph, batches: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the correlation of every unit of one model with every unit of another, group by group.

    Every sample and every position of an image counts as one observation. Where several layers read a group, their
    correlations are summed.

    Args:
        own: The groups of one model, which is in eval mode.
        neighbour: The groups of another one of the same architecture, in eval mode too.
        batches: Inputs on the models' device.

    Returns:
        float64, `(num_units, num_units)`, own units by neighbour's units; one for each group.
    """
    moments = [[_Moments() for _ in group.observations] for group in own.groups]
    for batch in batches:
        outputs = [_Recorder(graph).outputs(batch) for graph in (own, neighbour)]
        for group, sums in zip(own.groups, moments, strict=True):
            for observation, one in zip(group.observations, sums, strict=True):
                dim, block, pair = observation.dim, observation.block, []
                for output in (found[observation.name] for found in outputs):
                    split = (*output.shape[:dim], -1, block, *output.shape[dim + 1 :])
                    pair.append(output.reshape(split).movedim(dim, 0).flatten(start_dim=1))
                one.add(*pair)
    return [torch.stack([one.correlation() for one in sums]).sum(dim=0) for sums in moments]


class _Moments:
    """Running sums from which the correlation follows."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, own: torch.Tensor, neighbour: torch.Tensor) -> None:
        """Count observations, `(num_units, num_observations)` each."""
        self._count += own.shape[1]
        terms = {
            "own": own.sum(dim=1), "neighbour": neighbour.sum(dim=1), "product": own @ neighbour.T,
            "own_square": own.square().sum(dim=1), "neighbour_square": neighbour.square().sum(dim=1),
        }  # fmt: skip
        for name, term in terms.items():
            self._sums[name] = self._sums[name] + term if name in self._sums else term

    def correlation(self) -> torch.Tensor:
        mean = {name: total / self._count for name, total in self._sums.items()}
        covariance = mean["product"] - torch.outer(mean["own"], mean["neighbour"])
        deviations = [
            (mean[f"{name}_square"] - mean[name].square()).clamp(min=0).sqrt() for name in ("own", "neighbour")
        ]
        return covariance / torch.outer(*deviations).clamp(min=MIN_DEVIATIONS)


class _Recorder(fx.Interpreter):
    """Runs a traced model and keeps what its observed nodes put out."""

    def __init__(self, graph: PermutationGraph) -> None:
        super().__init__(graph.traced)
        self._wanted = {observation.name for group in graph.groups for observation in group.observations}
        self._found: dict[str, torch.Tensor] = {}

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.name in self._wanted:
            self._found[node.name] = result.to(torch.float64, copy=True)  # the next layer may write in place
        return result

    @torch.no_grad()
    def outputs(self, batch: torch.Tensor) -> Mapping[str, torch.Tensor]:
        self.run(batch)
        return self._found


MergeMethod = Literal["activations", "weights", "none"]
Permutations = Sequence[torch.Tensor]
State = Mapping[str, torch.Tensor]

MAX_SWEEPS = 100


def match_and_merge(
    own: nn.Module, neighbours: Mapping[int, State], weights: Mapping[int, float], batches: Iterable[torch.Tensor],
    *, method: MergeMethod = "activations",
) -> None:  # fmt: skip
    """Average a model with those of its neighbours in place, after their units were brought into its own order.

    Integer buffers and tensors that the state dict does not hold stay one's own.

    Args:
        own: The model, any device. Its parameters and buffers are overwritten; its training mode is kept.
        neighbours: State dicts by replica, with the names, shapes and dtypes of `own`'s.
        weights: A row of a mixing matrix: one weight for each neighbour and one more for `own`; they sum to 1.
        batches: Inputs for the forward passes, on `own`'s device; the more, the better the statistics. Replicas need
            not use the same ones. With BatchNorm every batch needs at least two samples.
        method: "activations" matches units by the correlation of what they compute, "weights" by the products of their
            weights (arXiv 2209.04836), "none" averages as it is.

    Raises:
        ValueError: The weights are no row for these neighbours, a state dict is not one of this architecture, the model
            is sharded, there is no batch where one is needed or it is no tensor, or the model holds an operation that
            matching does not understand.
        NonFiniteError: A model's parameters, buffers or activations hold NaN or infinity; `own` is as it was.
        MissingExtra: scipy is not installed.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> neighbour = {"weight": model.weight.detach() + 1}
        >>> before = model.weight.detach().clone()
        >>> match_and_merge(model, {1: neighbour}, {0: 0.5, 1: 0.5}, [torch.ones(3, 2)])
        >>> torch.allclose(model.weight, before + 0.5)
        True
    """
    if method not in get_args(MergeMethod):
        raise ValueError(f"method must be one of {', '.join(get_args(MergeMethod))}, got {method!r}")
    check_whole(own)
    own_weight = _check_weights(neighbours, weights)
    _check_states(own, neighbours)
    _check_finite(own.state_dict(), whose="this replica")
    for replica, state in neighbours.items():
        _check_finite(state, whose=f"replica {replica}")
    held = list(batches)  # a shuffling loader would show every model other samples
    other = next((batch for batch in held if not isinstance(batch, torch.Tensor)), None)
    if other is not None:
        raise ValueError(f"batches must hold tensors of inputs, got {type(other).__name__}; leave out the labels")
    if not held and (method != "none" or has_statistics(own)):
        raise ValueError("batches must hold at least one batch, got 0: matching and BatchNorm need forward passes")
    if method != "none" and neighbours:
        groups, matched = find_permutations(own, sample=held[0]).groups, {}
        for replica, state in neighbours.items():
            if method == "activations":
                permutations = match_activations(own, state, held, replica=replica)
            else:
                permutations = match_weights(own, state, groups)
            matched[replica] = permute(state, groups, permutations)
        neighbours = matched
    _average(own, neighbours, weights, own_weight=own_weight)
    reset_statistics(own, held)


def match_activations(
    own: nn.Module, neighbour: State, batches: Sequence[torch.Tensor], *, replica: int = 0
) -> list[torch.Tensor]:
    """Return for every group the permutation of the neighbour's units that correlates best with one's own.

    Both models see the same batches, with their BatchNorm statistics measured on them. Units that never change (dead
    ones) correlate with nothing and take whatever places are left.

    Args:
        own: The reference; it is not changed.
        neighbour: The neighbour's state dict.
        batches: Inputs on the model's device.
        replica: The neighbour's number, for messages.

    Returns:
        int64 tensors on the CPU, `(num_units,)`, in the order of the groups of `find_permutations`: entry i is the
        neighbour's unit that takes the place of one's own unit i.

    Raises:
        NonFiniteError: The activations hold NaN or infinity.
    """
    reference, other = copy.deepcopy(own), copy.deepcopy(own)
    other.load_state_dict(dict(neighbour))
    for model in (reference, other):
        reset_statistics(model.eval(), batches)
    one, two = (find_permutations(model, sample=batches[0]) for model in (reference, other))
    found = correlations(one, two, batches)
    for group, score in zip(one.groups, found, strict=True):
        if not bool(torch.isfinite(score).all()):
            raise NonFiniteError(
                f"matching with replica {replica}: activations at {group.observations[0].name} hold NaN or infinity; "
                f"one of the two models has diverged: look at its loss and resume from a checkpoint before that"
            )
    return [assign(score) for score in found]


def match_weights(own: nn.Module, neighbour: State, groups: Sequence[PermutationGroup]) -> list[torch.Tensor]:
    """Return for every group the permutation of the neighbour's units whose weights are most like one's own.

    The groups depend on each other, so they are solved in turn, each with the others held, until none changes for the
    better: a local optimum (arXiv 2209.04836, algorithm 1). Only parameters count, not buffers.

    Returns:
        As `match_activations`.
    """
    mine = {name: value.detach().double() for name, value in own.named_parameters(remove_duplicate=False)}
    theirs = {name: neighbour[name].detach().to(mine[name]) for name in mine if name in neighbour}
    permutations = [torch.arange(group.num_units) for group in groups]
    for _ in range(MAX_SWEEPS):
        has_changed = False
        for place, group in enumerate(groups):
            score = torch.zeros(group.num_units, group.num_units, dtype=torch.float64)
            others = [
                (other, order) for j, (other, order) in enumerate(zip(groups, permutations, strict=True)) if j != place
            ]
            for axis in group.axes:
                if axis.name in theirs:
                    moved = _permuted(axis.name, theirs[axis.name], others)
                    score += (_rows(mine[axis.name], axis) @ _rows(moved, axis).T).cpu()
            found = assign(score)
            units = torch.arange(group.num_units)
            gain = score[units, found].sum() - score[units, permutations[place]].sum()
            if float(gain) > 1e-12 * float(score.abs().sum()):  # less is rounding, and would turn in circles
                permutations[place], has_changed = found, True
        if not has_changed:
            break
    return permutations


def assign(score: torch.Tensor) -> torch.Tensor:
    """Return the permutation that maximises the sum of `score[i, permutation[i]]`.

    Args:
        score: Floating, `(num_units, num_units)`, finite.

    Returns:
        int64 on the CPU, `(num_units,)`.

    Raises:
        MissingExtra: scipy is not installed.

    Example:
        >>> assign(torch.tensor([[0.9, 0.8], [0.7, 0.1]])).tolist()  # 0.8 + 0.7 is more than 0.9 + 0.1
        [1, 0]
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ModuleNotFoundError:
        raise MissingExtra.of("scipy", extra="match") from None
    _, columns = linear_sum_assignment(score.detach().double().cpu().numpy(), maximize=True)
    return torch.as_tensor(columns, dtype=torch.int64)


def permute(state: State, groups: Sequence[PermutationGroup], permutations: Permutations) -> dict[str, torch.Tensor]:
    """Return a state dict whose units are permuted group by group; the model computes the same as before.

    Args:
        state: A state dict; it is not changed.
        groups: The model's groups.
        permutations: One for each group; entry i is the unit that moves to place i.

    Raises:
        ValueError: There is not one permutation of the right size for each group.
    """
    pairs = list(zip(groups, permutations, strict=True))
    for group, order in pairs:
        if sorted(order.tolist()) != list(range(group.num_units)):
            raise ValueError(f"permutation must hold each of 0 to {group.num_units - 1} once, got {order.tolist()}")
    return {name: _permuted(name, tensor, pairs) for name, tensor in state.items()}


def _permuted(name: str, tensor: torch.Tensor, pairs: Iterable[tuple[PermutationGroup, torch.Tensor]]) -> torch.Tensor:
    for group, order in pairs:
        for axis in group.axes:
            if axis.name == name:
                columns = (order[:, None] * axis.block + torch.arange(axis.block)).reshape(-1)
                tensor = tensor.index_select(axis.dim, columns.to(tensor.device))
    return tensor


def _rows(tensor: torch.Tensor, axis: UnitAxis) -> torch.Tensor:
    """Return a tensor as one row for each unit of an axis."""
    return tensor.movedim(axis.dim, 0).reshape(tensor.shape[axis.dim] // axis.block, -1)


@torch.no_grad()
def _average(
    own: nn.Module, neighbours: Mapping[int, State], weights: Mapping[int, float], *, own_weight: float
) -> None:
    order, merged, seen = sorted(neighbours), [], set()
    for name, tensor in own.state_dict(keep_vars=True).items():
        if id(tensor) in seen or not tensor.is_floating_point():
            continue  # one that has several names comes once
        seen.add(id(tensor))
        # summed in float32 at least: bfloat16 would lose the light weights
        total = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * own_weight
        for replica in order:
            total.add_(neighbours[replica][name].to(total), alpha=weights[replica])
        merged.append((tensor, total))
    for tensor, total in merged:  # only now: a refusal must not leave half a merge behind
        tensor.copy_(total)


def _check_weights(neighbours: Mapping[int, State], weights: Mapping[int, float]) -> float:
    """Return the weight of one's own model, the only one that is no neighbour's."""
    rest = sorted(set(weights) - set(neighbours))
    if len(rest) != 1 or not set(neighbours) <= set(weights):
        raise ValueError(
            f"weights must hold each neighbour and one replica more, this one, got {sorted(weights)} for the "
            f"neighbours {sorted(neighbours)}"
        )
    if not all(weight >= 0 for weight in weights.values()) or not math.isclose(sum(weights.values()), 1, abs_tol=1e-6):
        raise ValueError(f"weights must be at least 0 and sum to 1, got {dict(weights)}; take a row of a mixing matrix")
    return weights[rest[0]]


def check_whole(own: nn.Module) -> None:
    """Refuse a model of which this rank holds only shards.

    Raises:
        ValueError: It is one; names a tensor.
    """
    for name, tensor in own.state_dict().items():
        if type(local_shard(tensor)) is not type(tensor.detach()):
            raise ValueError(
                f"{name} is a shard, and units can only be matched in whole models; merge without matching ('none'), "
                f"or do not shard the model inside a replica"
            )


def _check_states(own: nn.Module, neighbours: Mapping[int, State]) -> None:
    wanted = own.state_dict()
    for replica, state in neighbours.items():
        for name in sorted(set(wanted) ^ set(state)):
            where = "lacks" if name in wanted else "has an unknown"
            raise ValueError(f"the model of replica {replica} {where} {name}; all must build the same model")
        for name, tensor in wanted.items():
            if tensor.shape != state[name].shape:
                shapes = f"{tuple(state[name].shape)} instead of {tuple(tensor.shape)}"
                raise ValueError(
                    f"the model of replica {replica} has {name} of shape {shapes}; all must build the same model"
                )


def _check_finite(state: State, *, whose: str) -> None:
    for name, tensor in state.items():
        # the sum is finite only if every element is, up to an overflow
        if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(
                f"{name} of {whose} holds NaN or infinity; its model has diverged: look at its loss, lower its "
                f"learning rate or clip its gradients, and resume from a checkpoint before that"
            )
