"""The default process group: this process's rank, a text of each rank, the port of its store."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

TEXT_BYTES = 512


def own_rank(*, gpu_calls: bool = False) -> int:
    """Return this process's rank in its job.

    Args:
        gpu_calls: Whether calls on GPUs are to be recorded, so that a process group over nccl alone will do.

    Raises:
        ValueError: There is no process group yet, or none whose calls are recorded.
    """
    if not dist.is_initialized():
        raise ValueError("there is no process group yet; call torch.distributed.init_process_group before")
    backend = str(dist.get_backend_config())
    if "gloo" in backend or (gpu_calls and "nccl" in backend):
        return dist.get_rank()
    if "nccl" in backend:
        raise ValueError(
            f"calls are recorded on gloo, and this process group is {backend}; gpu_calls=True records calls on GPUs "
            f"too, which was not tried on a GPU; or let torch's Flight Recorder write JSON, which thinwire diagnose "
            f"reads too"
        )
    raise ValueError(f"calls are recorded on gloo, and on nccl with gpu_calls=True; this process group is {backend}")


def rank_or_zero() -> int:
    """Return this process's rank in the default group, 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def all_gather_text(own: str) -> list[str]:
    """Return the text of each rank of the default group; all ranks call it together.

    Args:
        own: This rank's text; cut off after 512 bytes.

    Raises:
        RuntimeError: A rank did not come within the group's timeout.
    """
    text = own.encode("utf-8", "replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    is_on_cpu = "cpu" in str(dist.get_backend_config())
    device = torch.device("cpu") if is_on_cpu else torch.device("cuda", torch.cuda.current_device())
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [part.cpu().numpy().tobytes().rstrip(b"\0").decode("utf-8", "replace") for part in found]


def default_store() -> Any:
    """Return the default group's store."""
    return dist.distributed_c10d._get_default_store()


def store_port() -> int:
    """Return the port of the default group's store; 0 if it has none, or this torch does not expose it."""
    try:
        store = default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return int(store.port)
    except (AttributeError, RuntimeError, ValueError):  # a file; no group; another torch
        return 0
