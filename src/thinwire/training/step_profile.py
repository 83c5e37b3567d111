"""Profile of an inner step: seconds of each kind of module and phase, and memory of each kind.

Phases are timed in whole steps. The split by modules comes from steps of their own, with hooks before and after each
module; on a GPU every hook waits for the device, so that these steps are slower than others. What the exchange adds to
a step is computed from measured rates: coding and the outer steps of an interval, spread over its steps. The table
follows arXiv 2311.03687, which splits steps of large models by module, phase and kind of memory.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from thinwire.planning.cluster import Machine
from thinwire.planning.predict import FLOPS_PER_PARAMETER, interval_coding_s, interval_outer_s
from thinwire.planning.simulator_adapter import traffic_of
from thinwire.training.build import make_method
from thinwire.training.config import TrainConfig
from thinwire.training.probe_hosts import coding_bytes_per_s, outer_flops_per_s, random_step

FORMAT, VERSION = "thinwire-profile", 1
# Names of modules in a list differ by their number alone.
_NUMBER = re.compile(r"\.\d+\.")
_REPLICAS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProfile:
    """All modules of one kind.

    Attributes:
        name: As in the model, with `*` for the number of a block.
        parameters: Of all of them.
        forward_s: Seconds of a step; `backward_s` too.
    """

    name: str
    parameters: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Time and memory of a step by what they are spent on, medians over some steps.

    Attributes:
        tokens: Of a step.
        steps: Timed steps.
        forward_s: With the loss.
        exchange_s: Coding and outer steps of two replicas, spread over the interval. Waiting is not in it.
        modules: By kind, in the order of the forward pass. What is left of the phases is outside of all modules.
        optimizer_bytes: Of the inner optimizer's state.
        activations_bytes: Of what the forward pass keeps for the backward pass, each storage once.
        encode_bytes_per_s: See `thinwire.planning.cluster.Machine`, as for `float64_flops_per_s`.
    """

    model: str
    method: str
    device: str
    threads: int
    num_parameters: int
    tokens: int
    steps: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    exchange_s: float
    modules: tuple[ModuleProfile, ...]
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    encode_bytes_per_s: float
    float64_flops_per_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step with its share of the exchange."""
        return self.forward_s + self.backward_s + self.optimizer_s + self.exchange_s

    @property
    def flops_per_s(self) -> float:
        """FLOP/s that training reaches, for `thinwire plan --flops` and the files of clusters and sites."""
        inner_s = self.forward_s + self.backward_s + self.optimizer_s
        return FLOPS_PER_PARAMETER * self.num_parameters * self.tokens / inner_s

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT, "version": VERSION, **asdict(self), "step_s": self.step_s,
            "flops_per_s": self.flops_per_s,
        }  # fmt: skip


def profile_step(config: TrainConfig, *, steps: int) -> StepProfile:
    """Profile steps on random tokens.

    Args:
        config: Resolved: the model, the batch, the device, the threads, the inner optimizer and the method.
        steps: Steps to time, and as many again for the modules; one more before each does not count.

    Raises:
        ValueError: `steps` is below 1, or the model or the device is not there.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}; 5 is usual")
    device = torch.device(config.model.device)
    model, inner, loss = random_step(config)
    phases = _phases(loss, inner, device=device, steps=steps)
    modules = _modules(model, loss, inner, device=device, steps=steps)
    activations = _activation_bytes(model, loss)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    machine = Machine(
        name=str(device), encode_bytes_per_s=coding_bytes_per_s(device), float64_flops_per_s=outer_flops_per_s(device)
    )
    assert machine.encode_bytes_per_s is not None and machine.float64_flops_per_s is not None
    method = make_method(config)
    traffic = traffic_of(method, model, num_replicas=_REPLICAS, inner=inner)
    interval_s = interval_coding_s(machine, traffic) + interval_outer_s(machine, traffic)
    return StepProfile(
        model=config.model.name, method=config.sync.method, device=str(device), threads=torch.get_num_threads(),
        num_parameters=sum(parameter.numel() for parameter in trained), steps=steps,
        tokens=(config.data.batch_size or 0) * (config.model.seq_len or 0),
        forward_s=phases[0], backward_s=phases[1], optimizer_s=phases[2],
        exchange_s=interval_s / method.schedule.sync_interval, modules=modules,
        parameters_bytes=_bytes_of(model.parameters()), gradients_bytes=_bytes_of(trained),
        optimizer_bytes=_bytes_of(x for state in inner.state.values() for x in state.values()),
        activations_bytes=activations, encode_bytes_per_s=machine.encode_bytes_per_s,
        float64_flops_per_s=machine.float64_flops_per_s,
    )  # fmt: skip


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _phases(
    loss: Callable[[], torch.Tensor], inner: torch.optim.Optimizer, *, device: torch.device, steps: int
) -> tuple[float, float, float]:
    """Return median seconds of forward pass, backward pass and optimizer."""
    found = []
    for _ in range(1 + steps):  # the first one compiles and allocates
        times_s = [_now_s(device)]
        value = loss()
        times_s.append(_now_s(device))
        value.backward()  # type: ignore[no-untyped-call]
        times_s.append(_now_s(device))
        inner.step()
        times_s.append(_now_s(device))
        inner.zero_grad()
        found.append([after - before for before, after in itertools.pairwise(times_s)])
    forward, backward, optimizer = zip(*found[1:], strict=True)
    return statistics.median(forward), statistics.median(backward), statistics.median(optimizer)


def _modules(
    model: nn.Module, loss: Callable[[], torch.Tensor], inner: torch.optim.Optimizer, *, device: torch.device,
    steps: int,
) -> tuple[ModuleProfile, ...]:  # fmt: skip
    kinds: dict[str, list[nn.Module]] = defaultdict(list)
    for name, module in _parts(model):
        kinds[_NUMBER.sub(".*.", name)].append(module)
    spent: dict[tuple[str, str], float] = defaultdict(float)
    began_s: dict[tuple[int, str], float] = {}

    def begin(phase: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: object) -> None:
            began_s[id(module), phase] = _now_s(device)

        return hook

    def end(kind: str, phase: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: object) -> None:
            if (since_s := began_s.pop((id(module), phase), None)) is not None:
                spent[kind, phase] += _now_s(device) - since_s

        return hook

    handles = [
        handle
        for kind, modules in kinds.items()
        for module in modules
        for handle in (
            module.register_forward_pre_hook(begin("forward")), module.register_forward_hook(end(kind, "forward")),
            module.register_full_backward_pre_hook(begin("backward")),
            module.register_full_backward_hook(end(kind, "backward")),
        )
    ]  # fmt: skip
    with warnings.catch_warnings():  # an embedding's input has no gradient: its hooks see its output's
        warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
        for number in range(1 + steps):
            if number == 1:
                spent.clear()
            loss().backward()  # type: ignore[no-untyped-call]
            inner.zero_grad()
    for handle in handles:
        handle.remove()
    return tuple(
        ModuleProfile(
            name=kind, parameters=sum(p.numel() for module in modules for p in module.parameters()),
            forward_s=spent[kind, "forward"] / steps, backward_s=spent[kind, "backward"] / steps,
        )
        for kind, modules in kinds.items()
    )  # fmt: skip


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of each block, and the modules outside of the blocks; none is inside another one."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            for number, block in enumerate(child):
                inside = list(block.named_children()) or [("", block)]
                yield from ((f"{prefix}{name}.{number}.{part}", found) for part, found in inside)
        elif any(isinstance(found, nn.ModuleList) for found in child.modules()):
            yield from _parts(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _activation_bytes(model: nn.Module, loss: Callable[[], torch.Tensor]) -> int:
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss()  # alive until all are counted, so that no storage is used twice
    total = sum(kept.values())
    del value
    return total


def _bytes_of(values: Any) -> int:
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, torch.Tensor))
