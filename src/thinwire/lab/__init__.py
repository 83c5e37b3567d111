"""Lab: slow networks on one machine, made from the kernel's namespaces and removed when the lab ends."""

from __future__ import annotations

from thinwire.lab.counters import Counters
from thinwire.lab.lab import HostProcess, HostResult, Lab, rank_environment
from thinwire.lab.settings import Access, FabricShape, LabSettings, Link

__all__ = [
    "Access",
    "Counters",
    "FabricShape",
    "HostProcess",
    "HostResult",
    "Lab",
    "LabSettings",
    "Link",
    "rank_environment",
]
