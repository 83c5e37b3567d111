"""Ranks of a watched job: their places in it, and an exchange of one message each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

WORD_BYTES = 512


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


def words_of_all(own: str) -> list[str]:
    """Return what each rank of the default group tells of itself; all ranks call it together.

    Args:
        own: This rank's word; cut off where it is longer than 512 bytes.

    Raises:
        RuntimeError: A rank did not come within the group's timeout.
    """
    told = own.encode("utf-8", "replace")[:WORD_BYTES].ljust(WORD_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(told), dtype=torch.uint8).to(_device_of_words())
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [part.cpu().numpy().tobytes().rstrip(b"\0").decode("utf-8", "replace") for part in found]


def store_port() -> int:
    """Return the port of the store that the ranks met at; 0 where it has none, or this torch does not tell."""
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return int(store.port)
    except (AttributeError, RuntimeError, ValueError):  # a file; no group; another torch
        return 0


def _device_of_words() -> torch.device:
    if "cpu" in str(dist.get_backend_config()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
