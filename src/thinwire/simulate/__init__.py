"""Training in virtual seconds: what links, step times and failures make of any schedule, before anything is run.

Nothing here imports torch or the parts that train: schedules, groups and payload sizes are handed in as values.
"""

from __future__ import annotations

from thinwire.simulate.cluster import SimCluster, joined_sites, leaf_spine, ring, star
from thinwire.simulate.exchange_model import Everyone, ExchangeModel, RoundTimes
from thinwire.simulate.fluid_network import FlowDemand, FluidFlow, FluidNetwork, SimLink, max_min_rates
from thinwire.simulate.patterns import AllGather, LinkStage, Pattern, RingAllReduce, Star, TwoPhase
from thinwire.simulate.task_graph import ComputeTask, TaskTimes, TransferTask, run_tasks
from thinwire.simulate.training_loop import SimReplica, SimRun, Stall, simulate_training
from thinwire.simulate.virtual_clock import VirtualClock

__all__ = [
    "AllGather",
    "ComputeTask",
    "Everyone",
    "ExchangeModel",
    "FlowDemand",
    "FluidFlow",
    "FluidNetwork",
    "LinkStage",
    "Pattern",
    "RingAllReduce",
    "RoundTimes",
    "SimCluster",
    "SimLink",
    "SimReplica",
    "SimRun",
    "Stall",
    "Star",
    "TaskTimes",
    "TransferTask",
    "TwoPhase",
    "VirtualClock",
    "joined_sites",
    "leaf_spine",
    "max_min_rates",
    "ring",
    "run_tasks",
    "simulate_training",
    "star",
]
