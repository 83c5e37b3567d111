"""What thinwire's methods are measured against on a wire: DistributedDataParallel, and DiLoCo of torchft.

DDP runs plain and with its PowerSGD hook (arXiv 1905.13727). torchft's DiLoCo runs with fragments and overlap on its
gloo group, with a Lighthouse in rank 0's process. It is matched to ours as far as torchft 0.2 allows:

- the same fragments (each in a module of its own, since torchft takes modules), outer Nesterov, outer learning rate and
  blend;
- torchft counts an interval of H / P steps for each fragment in turn, so H is rounded down to a multiple of P. A round
  must end before the next fragment's turn, so tau is at most H / P - 1;
- payloads are float32: its quantisation needs Triton, and without it is skipped without a warning;
- bucketing stays off, as by default: it skips tensors that do not fill buckets evenly;
- at the end local parameters are averaged once, as ours are by the final exchange.

torchft would drop a failed round without an error and reset the fragment; here the first one ends the run.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import MissingExtra, ThinwireError
from thinwire.methods import default_outer_lr
from thinwire.sync.fragments import Pattern, find_blocks
from thinwire.transport.addresses import address_towards, interface_of
from thinwire.transport.base import all_gather_json
from thinwire.transport.connect import GLOO_INTERFACE
from thinwire.transport.recording import RecordingTransport
from thinwire.wire_benchmark.contenders import Contender, Trainer, TrainerSettings, loss_of

# The top of what PyTorch's documentation calls typical (1 to 4; it advises to go up from 1 until the loss is right, and
# a benchmark has no time to try). On `nano` it sends a fortieth of a block's gradients, and vectors whole.
POWERSGD_RANK = 4

# The least that the hook takes with error feedback and warm start, both of which its documentation wants on: DDP makes
# its buckets again after the first step. Its rule of a tenth of all steps would leave little to measure in a short run.
_FIRST_COMPRESSED_STEP = 2
_MEBIBYTE = 1 << 20


def ddp_trainer(model: nn.Module, inner: torch.optim.Optimizer, *, powersgd_rank: int = 0) -> Trainer:
    """Train with DDP over torch's default group.

    Args:
        model: The same values on all ranks.
        inner: Over the model's parameters.
        powersgd_rank: Rank of the PowerSGD hook; 0 sends whole gradients. The first two steps send them too.
    """
    wrapped = _wrapped(model, has_one_bucket=powersgd_rank > 0)
    if powersgd_rank:
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=powersgd_rank,
            start_powerSGD_iter=_FIRST_COMPRESSED_STEP,
            use_error_feedback=True,
            warm_start=True,
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Trainer(optimizer=inner, loss=wrapped)


def _wrapped(model: nn.Module, *, has_one_bucket: bool) -> DistributedDataParallel:
    # The hook starts a bucket's second all-reduce when its first has ended. Over gloo, two buckets do so in an order
    # that differs between ranks, and gloo then ends the process: "Received data size doesn't match expected size".
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    bucket_cap_mb = num_bytes // _MEBIBYTE + 1 if has_one_bucket else None
    with warnings.catch_warnings():
        # The newer name of `broadcast_buffers` is not known to all versions of torch that thinwire runs with.
        warnings.simplefilter("ignore", FutureWarning)
        # What DDP would send beside the gradients is left out: ranks start from the same seed, and the model's buffers
        # are constants.
        return DistributedDataParallel(
            _Loss(model), broadcast_buffers=False, init_sync=False, gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_cap_mb,
        )  # fmt: skip


class _Loss(nn.Module):
    """DDP follows what its module's forward computes, so forward is the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._loss = loss_of(model)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self._loss(tokens, targets)


_OUTER_MOMENTUM = 0.9
_BLEND = 0.5
_LIGHTHOUSE_TICK_MS = 10
_NOTE = 1 << 20  # the worker counts its own notes from 0


def load_torchft() -> SimpleNamespace:
    """Return the parts of torchft that are used here.

    Raises:
        MissingExtra: torchft is not installed.
    """
    try:
        found = {
            name: importlib.import_module(f"torchft.{name}")
            for name in ("coordination", "local_sgd", "manager", "process_group")
        }
    except ModuleNotFoundError as error:
        if error.name is not None and not error.name.startswith("torchft"):
            raise  # it is there, and lacks something of its own
        raise MissingExtra("torchft is not installed; install it with: pip install torchft") from error
    return SimpleNamespace(**found)


def torchft_trainer(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    *,
    numbers: TrainerSettings,
    transport: RecordingTransport,
) -> Trainer:
    """Train with torchft's DiLoCo; each rank is a replica group of its own.

    Args:
        model: The same values on all ranks.
        inner: Over the model's parameters; torchft hooks its `step`.
        numbers: What all contenders share.
        transport: Says which replica this is, of how many.

    Raises:
        MissingExtra: torchft is not installed.
        ValueError: H is below the number of fragments.
    """
    torchft = load_torchft()
    fragments = matched_fragments(model)
    interval, overlap = matched_numbers(
        sync_interval=numbers.sync_interval, overlap_steps=numbers.overlap_steps, num_fragments=len(fragments)
    )
    session = _Session(torchft, numbers=numbers, num_replicas=transport.num_replicas)
    try:
        session.open(transport)
        outer_lr = default_outer_lr(transport.num_replicas)
        outer = [torch.optim.SGD(part.parameters(), outer_lr, _OUTER_MOMENTUM, nesterov=True) for part in fragments]
        diloco = torchft.local_sgd.DiLoCo(
            session.manager, fragments, inner, outer, sync_every=interval, fragment_sync_delay=overlap,
            fragment_update_alpha=_BLEND if overlap else 0.0, use_bucketization=False, should_quantize=False,
        )  # fmt: skip
        session.enter(diloco)
    except BaseException:
        session.release()
        raise
    return Trainer(
        optimizer=inner,
        loss=loss_of(model),
        close=lambda: session.close(model),
        release=session.release,
        num_fragments=len(fragments),
        sync_interval=interval,
        overlap_steps=overlap,
    )


def matched_numbers(*, sync_interval: int, overlap_steps: int, num_fragments: int) -> tuple[int, int]:
    """Return H and tau that torchft takes, nearest to those wanted.

    Raises:
        ValueError: H is below the number of fragments.

    Example:
        >>> matched_numbers(sync_interval=100, overlap_steps=3, num_fragments=3)
        (99, 3)
        >>> matched_numbers(sync_interval=6, overlap_steps=3, num_fragments=3)
        (6, 1)
    """
    if sync_interval < num_fragments:
        raise ValueError(
            f"sync_interval must be at least {num_fragments} for torchft, one step a fragment, got {sync_interval}"
        )
    each = sync_interval // num_fragments
    return each * num_fragments, min(overlap_steps, each - 1)


def matched_fragments(model: nn.Module) -> list[nn.Module]:
    """Return the fragments that Streaming DiLoCo makes by default, each as a module that holds the parameters."""
    by_name = dict(model.named_parameters())
    fragments = Pattern().partition(find_blocks(model))
    return [nn.ParameterList([by_name[name] for name in names]) for names in fragments]


class _Session:
    """Server, group and manager that torchft's DiLoCo needs, closed in reverse order."""

    def __init__(self, torchft: SimpleNamespace, *, numbers: TrainerSettings, num_replicas: int) -> None:
        self.manager: Any = None
        self._torchft = torchft
        self._numbers = numbers
        self._num_replicas = num_replicas
        self._made = _Made()

    def open(self, transport: RecordingTransport) -> None:
        """Start the Lighthouse on replica 0, and here a store, a group and a manager."""
        address, made = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")), self._made
        os.environ[GLOO_INTERFACE] = interface_of(address)  # where the group listens
        replica, own = transport.replica, ""
        if replica == 0:
            made.lighthouse = self._torchft.coordination.LighthouseServer(
                bind="[::]:0", min_replicas=self._num_replicas, quorum_tick_ms=_LIGHTHOUSE_TICK_MS,
                heartbeat_timeout_ms=int(self._numbers.timeout_s * 1000),
            )  # fmt: skip
            # It calls itself by its host's name, which others need not be able to resolve.
            own = f"http://{address}:{made.lighthouse.address().rsplit(':', 1)[1]}"
        limit_s = self._numbers.timeout_s
        notes = all_gather_json({"lighthouse": own}, transport=transport, number=_NOTE, deadline_s=limit_s)
        lighthouse, limit = str(notes[0].get("lighthouse")), timedelta(seconds=limit_s)
        made.store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
        made.group = _Group.of(self._torchft, timeout=limit, works=made.works)
        self.manager = self._torchft.manager.Manager(
            pg=made.group, load_state_dict=None, state_dict=None, min_replica_size=self._num_replicas,
            use_async_quorum=False, timeout=limit, quorum_timeout=limit, connect_timeout=limit, rank=0, world_size=1,
            store_addr=address, store_port=made.store.port, lighthouse_addr=lighthouse, hostname=address,
            replica_id=f"replica_{replica}",
            # All start from the same seed; and a round that failed is an error here, not a step to skip.
            init_sync=False, max_retries=0,
        )  # fmt: skip

    def enter(self, diloco: Any) -> None:
        """Let DiLoCo hook the inner optimizer."""
        diloco.__enter__()
        self._made.diloco = diloco

    def close(self, model: nn.Module) -> None:
        """Wait for a round in flight, and set all replicas to the mean of their local parameters."""
        self._unhook()
        for work in self._made.works:
            work.wait()
        error = self.manager.errored() or self._made.group.errored()
        if error is not None:
            raise ThinwireError(f"torchft lost a round: {error}; see its own log above")
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data.div_(self._num_replicas)

    def release(self) -> None:
        """End the manager's server and the Lighthouse."""
        self._unhook()
        if self.manager is not None:
            self.manager.shutdown(wait=False)
            self.manager = None
        if self._made.group is not None:
            self._made.group.shutdown()
        if self._made.lighthouse is not None:
            self._made.lighthouse.shutdown()
        self._made = _Made()

    def _unhook(self) -> None:
        if self._made.diloco is not None:
            self._made.diloco.__exit__(None, None, None)
            self._made.diloco = None


@dataclass(slots=True)
class _Made:
    lighthouse: Any = None
    store: Any = None
    group: Any = None
    diloco: Any = None
    works: list[Any] = field(default_factory=list)


class _Group:
    """torchft's gloo group, which also remembers the latest rounds' works: DiLoCo shows no way to wait for them."""

    @staticmethod
    def of(torchft: SimpleNamespace, *, timeout: timedelta, works: list[Any]) -> Any:
        """Return a group; `works` holds the works of the all-reduces that have not ended."""

        class Remembering(torchft.process_group.ProcessGroupGloo):  # type: ignore[misc, name-defined]
            def allreduce(self, tensors: Sequence[torch.Tensor], opts: object) -> Any:
                work = super().allreduce(tensors, opts)
                works[:] = [other for other in works if not other.is_completed()]
                works.append(work)
                return work

        return Remembering(timeout=timeout)


@dataclass(frozen=True, kw_only=True)
class _Reference(Contender):
    program: ClassVar[tuple[str, ...]] = (str(Path(__file__).resolve().with_name("bench.py")),)
    is_reference: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Ddp(_Reference):
    """PyTorch's DistributedDataParallel.

    Attributes:
        powersgd_rank: Rank of its PowerSGD hook, 0 for no hook.
    """

    powersgd_rank: int = 0

    def trainer(
        self, model: nn.Module, inner: torch.optim.Optimizer, *, numbers: TrainerSettings,
        transport: RecordingTransport,
    ) -> Trainer:  # fmt: skip
        return ddp_trainer(model, inner, powersgd_rank=self.powersgd_rank)


@dataclass(frozen=True, kw_only=True)
class Torchft(_Reference):
    """torchft's DiLoCo."""

    def trainer(
        self, model: nn.Module, inner: torch.optim.Optimizer, *, numbers: TrainerSettings,
        transport: RecordingTransport,
    ) -> Trainer:  # fmt: skip
        return torchft_trainer(model, inner, numbers=numbers, transport=transport)


REFERENCES: dict[str, Contender] = {
    "ddp": Ddp(name="ddp", kind="every-step"),
    "ddp-powersgd": Ddp(name="ddp-powersgd", kind="every-step", payload_share=1 / 20, powersgd_rank=POWERSGD_RANK),
    "torchft-diloco": Torchft(name="torchft-diloco", kind="streaming", has_fragments=True, has_overlap=True),
}
