"""Backends of torch.distributed that this build of torch has."""

from __future__ import annotations

import torch.distributed as dist


def backends() -> dict[str, bool]:
    """Return whether gloo and nccl are there.

    Example:
        >>> sorted(backends())
        ['gloo', 'nccl']
    """
    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
