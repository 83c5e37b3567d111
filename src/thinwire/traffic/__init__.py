"""Traffic of a leaf/spine fabric: which path each flow takes, by hashing or by plan, and what that costs.

Collectives are few, long and predictable flows, so their paths can be planned (C4, arXiv 2406.04594), and minimal
splitting of flows equals ideal packet spraying (Ethereal, arXiv 2407.00550). Everything here is pure: no torch.
"""

from __future__ import annotations

from thinwire.traffic.fabric import Fabric, FabricFlow, read_fabric, read_flows
from thinwire.traffic.planner import METHODS, PathPiece, TrafficPlan, congestion_bound, plan_traffic

__all__ = [
    "METHODS", "Fabric", "FabricFlow", "PathPiece", "TrafficPlan", "congestion_bound", "plan_traffic", "read_fabric",
    "read_flows",
]  # fmt: skip
