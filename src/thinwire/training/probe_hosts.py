"""Measurement of all hosts of a run: each one's inner step and codec speed, and the links between them."""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from collections.abc import Callable, Sequence

import psutil
import torch
from torch import nn

from thinwire.codecs import e3m0
from thinwire.errors import DataError, PayloadError
from thinwire.methods.iso_loco import Isotropic, flatten_spectrum
from thinwire.planning.cluster import Cluster, Machine, read_entry
from thinwire.planning.predict import FLOPS_PER_PARAMETER
from thinwire.planning.probe import ProbeBudget, WireMeasurements, probe_wires
from thinwire.sync.outer_optimizer import PlainSGD
from thinwire.sync.views import MatrixSpan
from thinwire.training.build import make_inner_optimizer
from thinwire.training.config import TrainConfig
from thinwire.transport.base import Transport, all_gather_json
from thinwire.transport.connect import connect
from thinwire.transport.secret import need_pyzmq, read_secret
from thinwire.workloads.language.workload import make_model

# Enough to drown what a call costs.
_CODED_ELEMENTS, _OUTER_SIDE = 2**20, 512
_LEAST_STEPS, _LEAST_CODINGS = 3, 3


def measure_machine(config: TrainConfig, *, name: str, seconds: float = 5.0) -> Machine:
    """Train a few steps on random tokens, code a few vectors, and ask for the free memory; wires are left out.

    Training takes about so many seconds: at least three steps after a first one that does not count.
    """
    if not seconds > 0:
        raise ValueError(f"the time for steps must be above 0 s, got {seconds}; 5 s is usual")
    device = torch.device(config.model.device)
    free_bytes = torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available
    model, inner, loss = random_step(config)

    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        inner.step()
        inner.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    step_s = _median_s(step, seconds=seconds, at_least=_LEAST_STEPS)
    step_tokens = (config.data.batch_size or 0) * (config.model.seq_len or 0)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Machine(
        name=name, step_s=step_s, step_tokens=step_tokens,
        flops_per_s=FLOPS_PER_PARAMETER * num_parameters * step_tokens / step_s,
        memory_bytes=float(free_bytes), encode_bytes_per_s=coding_bytes_per_s(device),
        float64_flops_per_s=outer_flops_per_s(device),
    )  # fmt: skip


def random_step(config: TrainConfig) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """Return model and inner optimizer of resolved options, and the loss of one batch of random tokens."""
    device = torch.device(config.model.device)
    torch.set_num_threads(config.model.threads or 1)
    model = make_model(config, vocab_size=None, device=device)
    inner = make_inner_optimizer(config, model)
    assert config.data.batch_size is not None and config.model.seq_len is not None
    shape = (config.data.batch_size, config.model.seq_len)
    tokens = torch.randint(int(model.vocab_size), shape, device=device)  # type: ignore[arg-type]

    def loss() -> torch.Tensor:
        found: torch.Tensor = model.loss(tokens, tokens)[0]  # type: ignore[operator]
        return found

    return model, inner, loss


def coding_bytes_per_s(device: torch.device) -> float:
    """Return how many bytes of float32 are encoded and decoded again in a second, in E3M0."""
    codec, vector = e3m0(), torch.randn(_CODED_ELEMENTS, device=device)

    def code() -> None:
        codec.decode(codec.encode(vector), numel=_CODED_ELEMENTS)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return 4 * _CODED_ELEMENTS / _median_s(code, seconds=0.2, at_least=_LEAST_CODINGS)


def outer_flops_per_s(device: torch.device) -> float:
    """Return the float64 operations a second of IsoLoCo's outer step on a square matrix, by the way it takes there."""
    matrix = torch.randn(_OUTER_SIDE, _OUTER_SIDE, device=device)
    spans = [MatrixSpan(start=0, shape=matrix.shape, parameter=matrix)]

    def flatten() -> None:
        flatten_spectrum(matrix)
        if device.type == "cuda":
            torch.cuda.synchronize()

    step = Isotropic(hidden=PlainSGD(), rest=PlainSGD())
    return step.matrix_operations(spans) / _median_s(flatten, seconds=0.2, at_least=_LEAST_CODINGS)


def _median_s(action: Callable[[], None], *, seconds: float, at_least: int) -> float:
    action()  # the first one compiles, allocates and reads from disk
    found: list[float] = []
    while len(found) < at_least or sum(found) < seconds:
        began_s = time.perf_counter()
        action()
        found.append(time.perf_counter() - began_s)
    return statistics.median(found)


_NAMES = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """Result of a probe, the same on all hosts but for this one's number; machines are in the replicas' order."""

    replica: int
    machines: tuple[Machine, ...]
    wires: WireMeasurements

    @property
    def cluster(self) -> Cluster:
        return self.wires.cluster(self.machines)


def probe_hosts(config: TrainConfig, *, budget: ProbeBudget, step_s: float) -> Probed:
    """Time this host's inner step for about `step_s`, join the others, and measure the wires between all.

    All hosts must call this together.

    Raises:
        ThinwireError: A host did not come, was lost, or sent something else.
        ValueError: There is one host only, an option is out of its range, or the secret's file cannot be used.
    """
    if config.run.secret is not None:  # said before the steps are timed, not after
        need_pyzmq()
        read_secret(config.run.secret)
    machine = measure_machine(config, name=socket.gethostname(), seconds=step_s)
    deadline_s = config.run.join_deadline_s
    transport = connect(
        interface=config.run.interface, address=config.run.address, secret=config.run.secret, deadline_s=deadline_s
    )
    try:
        machines = _all_machines(machine, transport, deadline_s=deadline_s)
        wires = probe_wires(transport, budget=budget, deadline_s=deadline_s, number=_NAMES + 1)
    finally:
        transport.close()
    return Probed(replica=transport.replica, machines=tuple(machines), wires=wires)


def _all_machines(own: Machine, transport: Transport, *, deadline_s: float) -> Sequence[Machine]:
    """Tell all replicas of one's own machine, and return theirs under names that differ."""
    told = all_gather_json(dataclasses.asdict(own), transport=transport, number=_NAMES, deadline_s=deadline_s)
    found = []
    for replica, note in enumerate(told):
        known = {name: value for name, value in note.items() if value is not None}
        try:
            found.append(read_entry(known, Machine, f"what replica {replica} says of itself"))
        except DataError as error:
            raise PayloadError(f"{error}; run the same thinwire on all hosts") from error
    names = [machine.name for machine in found]
    return [
        dataclasses.replace(machine, name=f"{machine.name}-{replica}") if names.count(machine.name) > 1 else machine
        for replica, machine in enumerate(found)
    ]
