"""Copies of the weights that an inner optimizer keeps for itself: found by a test, exchanged with the parameters.

An optimizer with a copy of its own computes the next parameters from that copy, so its next step undoes what a round
has put into the model. The test steps two small trial copies of the optimizer. It changes the parameters of one after
the first step, and measures how much of the change is left. Three kinds pass:

- optimizers that step the parameters themselves;
- those with master weights, which are the parameters in float32: rounds read and write the masters, and set the
  parameters from them;
- Schedule-Free (arXiv 2405.15682), whose gradients are taken at `y = (1 - beta) z + beta x`: the parameters are y, and
  z is exchanged beside them, so that the average x follows on all replicas alike.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from thinwire.transport.shards import local_shard

# Steps of a trial after the change, without gradients: Lookahead (arXiv 1907.08610) pulls back every fifth or sixth.
# An optimizer that holds the parameters of before or after a step gets the larger number.
_STEPS, _MOST_STEPS = 8, 256
# Share of a change that must be left: Lookahead leaves a half, weight decay is off in trials.
_LEAST_LEFT = 0.75
# Trials begin within [-1, 1], so that bfloat16 shows the change, and in the search for masters each step.
_CHANGE = 1.0
_RATE, _GRADIENT = 1e-3, 0.01
_CLEAR_RATE, _CLEAR_GRADIENT = 0.1, 1.0
# No weight has this value by its initialisation, as norms have 1: a momentum of it is no copy of the weight.
_ODD_GRADIENT = 0.8378906
# Elements that a trial keeps of each dimension of a parameter.
_SIDE = 2

Read = Callable[[], "torch.Tensor | None"]


@dataclass(frozen=True, slots=True)
class WeightCopies:
    """Places of an inner optimizer's copies of the weights, by the `id` of the parameter.

    Attributes:
        masters: Return what stands for a parameter in rounds; None before the first step has made it.
        companions: Return what is exchanged beside a parameter.
        averaging: Schedule-Free optimizers, which have the modes `train` and `eval`.
        unknown: Why the optimizer is refused where rounds change parameters; empty where it is not.
        untested: Why the test could not run; empty where it ran.
    """

    masters: dict[int, Read] = field(default_factory=dict)
    companions: dict[int, Read] = field(default_factory=dict)
    averaging: tuple[Any, ...] = ()
    unknown: str = ""
    untested: str = ""

    def tensors(self) -> list[torch.Tensor]:
        found = (read() for read in [*self.masters.values(), *self.companions.values()])
        return [tensor for tensor in found if tensor is not None]

    def follow(self, parameters: Iterable[torch.Tensor]) -> None:
        """Set master weights that do not round to their parameters from these, as after a state without them."""
        for parameter in parameters:
            master = self.masters.get(id(parameter), lambda: None)()
            if master is not None and not torch.equal(master.to(parameter.dtype), parameter):
                master.copy_(parameter.detach())

    def check(self) -> None:
        """Refuse an optimizer whose copies are of no known kind.

        Raises:
            ValueError: It is one.
        """
        if self.unknown:
            raise ValueError(self.unknown)
        if self.untested:
            warnings.warn(self.untested, stacklevel=2)

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """Hold Schedule-Free optimizers in training mode, in which the parameters are y."""
        with self._in_mode(is_training=True):
            yield

    @contextmanager
    def in_evaluation(self) -> Iterator[None]:
        """Hold Schedule-Free optimizers in evaluation mode, in which the parameters are the average x."""
        with self._in_mode(is_training=False):
            yield

    @contextmanager
    def _in_mode(self, *, is_training: bool) -> Iterator[None]:
        changed = [one for one in self.averaging if _is_training(one) != is_training]
        for one in changed:
            one.train() if is_training else one.eval()
        try:
            yield
        finally:
            for one in changed:
                one.eval() if is_training else one.train()


def _is_training(averaging: Any) -> bool:
    return bool(averaging.param_groups[0].get("train_mode", getattr(averaging, "train_mode", True)))


_known: WeakKeyDictionary[Any, WeightCopies] = WeakKeyDictionary()


def copies_of(inner: Optimizer | None) -> WeightCopies:
    """Return the copies of an inner optimizer, which is tested once; those of its parts, where it joins several."""
    if inner is None:
        return WeightCopies()
    if inner not in _known:
        found = [_find(part) for part in _parts(inner)]
        masters = {key: read for one in found for key, read in one.masters.items()}
        companions = {key: read for one in found for key, read in one.companions.items()}
        averaging = tuple(part for one in found for part in one.averaging)
        unknown = next((one.unknown for one in found if one.unknown), "")
        untested = next((one.untested for one in found if one.untested), "")
        _known[inner] = WeightCopies(masters, companions, averaging, unknown, untested)
    return _known[inner]


def _parts(inner: Any) -> Iterator[Any]:
    parts = getattr(inner, "parts", None)
    if isinstance(parts, tuple):
        for part in parts:
            yield from _parts(part)
    else:
        yield inner


def _find(inner: Any) -> WeightCopies:
    parameters = [p for group in inner.param_groups for p in group["params"]]
    if any(p.is_meta for p in parameters):  # sizes are planned with it, and nothing is trained
        return WeightCopies()
    name = type(inner).__name__
    if not any(local_shard(p).numel() for p in parameters):  # as on a rank that holds no rows: there is nothing to undo
        return WeightCopies()
    try:
        left, places, held = _test(inner)
    except Exception as error:
        return WeightCopies(
            untested=f"{name} could not be tested for copies of the weights of its own ({type(error).__name__}: "
            f"{str(error)[:200]}); if it has some, its steps undo every exchange: compare the parameters before and "
            f"after a step that follows a round"
        )
    if left >= _LEAST_LEFT and held:
        return WeightCopies(
            untested=f"{name} keeps copies of the weights ({', '.join(held)}) that no exchange changes; in "
            f"{_MOST_STEPS} steps of a test they changed no parameter; if they ever do, take another optimizer"
        )
    if left >= _LEAST_LEFT:
        return WeightCopies()
    for place in places:
        reads = {id(p): place.reader(inner, index, p) for index, p in enumerate(parameters)}
        if place.is_master:
            return WeightCopies(masters=reads)
        _make_state(inner, place)
        return WeightCopies(companions=reads, averaging=(inner,))
    return WeightCopies(
        unknown=f"{name} keeps weights of its own: of a change from outside, {max(left, 0):.0%} is left after some "
        f"steps, at least {_LEAST_LEFT:.0%} must be, so it would undo every exchange; take an optimizer that steps the "
        f"parameters themselves, Schedule-Free or one with master weights in its state, or the method all_reduce()"
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a copy in an optimizer: under a key of a parameter's state, or in an attribute, in the groups' order."""

    name: str
    is_state: bool
    is_master: bool = False

    def read(self, optimizer: Any, index: int, parameter: torch.Tensor) -> torch.Tensor | None:
        if self.is_state:
            found = optimizer.state.get(parameter, {}).get(self.name)
            return found if isinstance(found, torch.Tensor) else None
        tensors = list(tensors_in(vars(optimizer).get(self.name)))
        return tensors[index] if index < len(tensors) else None

    def reader(self, optimizer: Any, index: int, parameter: torch.Tensor) -> Read:
        return partial(self.read, optimizer, index, parameter)


def _test(inner: Any) -> tuple[float, list[_Place], list[str]]:
    """Return the share of a change that is left, places of known kinds that keep the rest, and names of all copies."""
    failure: Exception = ValueError("it holds no parameter with elements")
    for origin, is_sparse in itertools.product(get_args(_Origin), (False, True)):
        make = partial(_Trial, inner, origin=origin, is_sparse=is_sparse)
        try:
            left, held = _share_left(make, None), []
            if left >= _LEAST_LEFT and (held := _held_places(make)):  # maybe slow weights that wait for their turn
                left = _share_left(make, None, num_steps=_MOST_STEPS)
        except Exception as error:
            failure = error
            continue
        places = [] if left >= _LEAST_LEFT else [one for one in _places(make) if _share_left(make, one) >= _LEAST_LEFT]
        return left, places, held
    raise failure


def _share_left(make: Callable[[], _Trial], place: _Place | None, *, num_steps: int = _STEPS) -> float:
    plain, changed = make(), make()
    plain.step(_GRADIENT)
    changed.step(_GRADIENT)
    changed.change(place)
    found = []
    for _ in range(num_steps):
        plain.step(0.0)
        changed.step(0.0)
        pairs = zip(changed.parameters, plain.parameters, strict=True)
        found += [float((one - other).detach().abs().mean() / _CHANGE) for one, other in pairs]
    return min(found)


def _held_places(make: Callable[[], _Trial]) -> list[str]:
    """Return the names of places that hold the parameters as they were before a step, or are after it.

    That of torch's ASGD is an average, which changes no parameter.
    """
    trial = make()
    if type(trial.optimizer) is torch.optim.ASGD:
        return []
    before = [p.detach().clone() for p in trial.parameters]
    trial.step(_ODD_GRADIENT)
    if any(torch.equal(p, start) for p, start in zip(trial.parameters, before, strict=True)):
        return []  # what has not moved is equal to any copy
    places = trial.places()
    return sorted(one.name for one in places if trial.is_rounded(one) or trial.is_rounded(one, to=before))


def _places(make: Callable[[], _Trial]) -> list[_Place]:
    """Return the places of a trial's copies that are master weights or Schedule-Free's z."""
    trial = make()
    for group in trial.optimizer.param_groups:
        group["lr"] = _CLEAR_RATE
    trial.step(_CLEAR_GRADIENT)
    has_modes = all(callable(getattr(trial.optimizer, mode, None)) for mode in ("train", "eval"))
    if has_modes and _Place("z", is_state=True) in trial.places():
        return [_Place("z", is_state=True)]
    masters, before = trial.places(), [p.detach().clone() for p in trial.parameters]
    for _ in range(_STEPS):  # master weights are the parameters after every step, slow weights only after some
        trial.step(_CLEAR_GRADIENT)
        masters = {place for place in masters if trial.is_rounded(place)}
    if any(torch.equal(p, start) for p, start in zip(trial.parameters, before, strict=True)):
        return []  # what has not moved is equal to any copy
    return [_Place(place.name, place.is_state, is_master=True) for place in sorted(masters, key=str)]


# How a trial is made: the next way is tried where a step of the one before fails.
_Origin = Literal["copied", "without state", "rebuilt"]


class _Trial:
    """A copy of an optimizer with a few elements of each parameter, to step without touching the model."""

    def __init__(self, inner: Any, *, origin: _Origin, is_sparse: bool) -> None:
        self._is_sparse = is_sparse
        memo: dict[int, Any] = {}
        own = {id(p) for group in inner.param_groups for p in group["params"]}
        attributes = [value for key, value in vars(inner).items() if key not in ("param_groups", "state")]
        for tensor in itertools.chain(tensors_in(inner.param_groups), *map(tensors_in, attributes)):
            if id(tensor) not in memo:
                memo[id(tensor)] = _small(tensor, is_parameter=id(tensor) in own)
        if origin == "rebuilt":
            self.optimizer = type(inner)([memo[key] for key in own if memo[key].numel()][:1], **inner.defaults)
        else:
            has_others = len(memo) > len(own)
            self.optimizer = _copied(inner, memo, is_fresh=origin == "without state", has_others=has_others)
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._indices = [index for index, p in enumerate(every) if p.numel()]
        self.parameters = [p for p in every if p.numel()]
        if not self.parameters:
            raise ValueError("it holds no parameter with elements")
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._step = inspect.unwrap(type(self.optimizer).step)  # without the hooks of profilers and schedulers
        self._takes_closure = "closure" in inspect.signature(self._step).parameters

    def step(self, gradient: float) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, gradient)
            if self._is_sparse:
                parameter.grad = parameter.grad.to_sparse(1)
        devices = list({p.device for p in self.parameters if p.device.type == "cuda"})
        loss = torch.zeros((), device=self.parameters[0].device)
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.default_generator.manual_seed(0)
            for device in devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(0)
            self._step(self.optimizer, *([lambda: loss] if self._takes_closure else []))

    def change(self, place: _Place | None) -> None:
        with torch.no_grad():
            for index, parameter in zip(self._indices, self.parameters, strict=True):
                parameter.add_(_CHANGE)
                found = None if place is None else place.read(self.optimizer, index, parameter)
                if found is not None:
                    found.add_(_CHANGE)

    def places(self) -> set[_Place]:
        """Return all places that hold a tensor of its parameter's shape for every parameter."""
        keys = {key for parameter in self.parameters for key in self.optimizer.state.get(parameter, {})}
        places = [_Place(key, is_state=True) for key in keys]
        names = set(vars(self.optimizer)) - {"param_groups", "state", "defaults"}
        places += [_Place(name, is_state=False) for name in names]
        return {place for place in places if all(found is not None for found in self._read(place))}

    def is_rounded(self, place: _Place, *, to: Sequence[torch.Tensor] | None = None) -> bool:
        """Return whether the place holds the parameters, or other values, maybe in a wider dtype."""
        pairs = zip(self._read(place), self.parameters if to is None else to, strict=True)
        return all(one is not None and torch.equal(one.to(p.dtype), p) for one, p in pairs)

    def _read(self, place: _Place) -> Iterator[torch.Tensor | None]:
        for index, parameter in zip(self._indices, self.parameters, strict=True):
            found = place.read(self.optimizer, index, parameter)
            is_like = found is not None and found is not parameter and found.shape == parameter.shape
            yield found if is_like else None


def _small(tensor: torch.Tensor, *, is_parameter: bool) -> torch.Tensor:
    corner = local_shard(tensor)[(slice(_SIDE),) * tensor.dim()].clone()
    if corner.is_floating_point():
        corner.clamp_(-1, 1)
    return torch.nn.Parameter(corner, requires_grad=tensor.requires_grad) if is_parameter else corner


def _copied(inner: Any, memo: dict[int, Any], *, is_fresh: bool, has_others: bool) -> Any:
    trial = object.__new__(type(inner))
    memo[id(inner)] = trial
    for value in list(vars(inner).values()):
        if isinstance(value, Optimizer) and id(value) not in memo:  # copy.deepcopy would lose their attributes
            _copied(value, memo, is_fresh=is_fresh, has_others=has_others)
    for key, value in vars(inner).items():
        if key.startswith("_optimizer_"):  # hooks are the user's
            vars(trial)[key] = OrderedDict()
        elif key not in ("step", "state", "param_groups"):  # a scheduler's step would count as the inner optimizer's
            vars(trial)[key] = copy.deepcopy(value, memo)
    if "param_groups" in vars(inner):
        trial.param_groups = [_group(inner, group, memo, has_others=has_others) for group in inner.param_groups]
    if "state" in vars(inner):
        trial.state = defaultdict(dict)
        for parameter, state in () if is_fresh else inner.state.items():
            if id(parameter) in memo:
                shape = parameter.shape
                corners = {
                    key: _small(value, is_parameter=False)
                    if isinstance(value, torch.Tensor) and value.shape == shape
                    else value
                    for key, value in state.items()
                }
                trial.state[memo[id(parameter)]] = copy.deepcopy(corners, memo)
    return trial


def _group(inner: Any, group: dict[str, Any], memo: dict[int, Any], *, has_others: bool) -> dict[str, Any]:
    """Return a group with its first options, as before any step, without weight decay, with a small rate."""
    found = {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
    found |= {key: copy.deepcopy(value) for key, value in inner.defaults.items() if key in found}
    if "weight_decay" in found:
        found["weight_decay"] = 0.0
    if isinstance(found.get("lr"), float | int):
        found["lr"] = _RATE
    corners = [memo[id(p)] for p in group["params"]]
    first = [p for p in corners if p.numel()][:1]
    return {**found, "params": corners if has_others else first}


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and mappings, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one, depth - 1)


def _make_state(inner: Any, place: _Place) -> None:
    """Make the state of a first step, which has not been done, so that there is a z from the start: the parameters."""
    parameters = [p for group in inner.param_groups for p in group["params"]]
    without = [p for p in parameters if place.read(inner, 0, p) is None]
    if not without:
        return
    options = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
    kept = [(p, p.grad, p.detach().clone()) for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    for parameter in without:
        parameter.grad = torch.zeros_like(parameter)
    was_training = _is_training(inner)
    inner.train()
    with torch.no_grad():
        inspect.unwrap(type(inner).step)(inner)
        for parameter, gradient, value in kept:
            parameter.copy_(value)
            parameter.grad = gradient
    for parameter in without:
        _reset(inner.state[parameter], place.name, parameter.detach())
    for group, saved in zip(inner.param_groups, options, strict=True):
        members = group["params"]
        group.clear()
        group |= {"params": members, **saved}
    if not was_training:
        inner.eval()


def _reset(state: dict[str, Any], name: str, value: torch.Tensor) -> None:
    for key, found in state.items():
        if isinstance(found, torch.Tensor):
            found.copy_(value) if key == name else found.zero_()
        elif isinstance(found, int | float):
            state[key] = 0
