"""Event-driven simulator of training in virtual time: links, step times and failures for any schedule.

It uses the real schedules, topologies and message patterns, and imports no torch: payload sizes are values.
"""

from __future__ import annotations

from thinwire.averaging.message_pattern import (
    AllGatherMessages,
    RingMessages,
    StarMessages,
    StoreMessages,
    TwoPhaseMessages,
)
from thinwire.simulate.cluster import SimCluster, joined_sites, leaf_spine, ring, star
from thinwire.simulate.exchange_model import ExchangeModel, LinkStage, RoundTimes
from thinwire.simulate.fluid_network import FlowDemand, FluidFlow, FluidNetwork, SimLink, max_min_rates
from thinwire.simulate.task_graph import ComputeTask, TaskTimes, TransferTask, run_tasks
from thinwire.simulate.training_loop import SimRecovery, SimReplica, SimRun, Stall, simulate_training
from thinwire.simulate.virtual_clock import VirtualClock

__all__ = [
    "AllGatherMessages",
    "ComputeTask",
    "ExchangeModel",
    "FlowDemand",
    "FluidFlow",
    "FluidNetwork",
    "LinkStage",
    "RingMessages",
    "RoundTimes",
    "SimCluster",
    "SimLink",
    "SimRecovery",
    "SimReplica",
    "SimRun",
    "Stall",
    "StarMessages",
    "StoreMessages",
    "TaskTimes",
    "TransferTask",
    "TwoPhaseMessages",
    "VirtualClock",
    "joined_sites",
    "leaf_spine",
    "max_min_rates",
    "ring",
    "run_tasks",
    "simulate_training",
    "star",
]  # fmt: skip
