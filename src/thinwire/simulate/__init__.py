"""Training in virtual seconds: what links, step times and failures make of any schedule, before anything is run.

Nothing here imports torch or the parts that train: schedules, groups and payload sizes are handed in as values.
"""

from __future__ import annotations

from thinwire.simulate.cluster import Cluster, joined_sites, leaf_spine, ring, star
from thinwire.simulate.exchange_model import Everyone, Exchange, RoundTimes
from thinwire.simulate.fluid_network import Flow, Link, Network
from thinwire.simulate.patterns import AllGather, Pattern, RingAllReduce, Stage, Star, TwoPhase
from thinwire.simulate.runs import Replica, Run, Stall
from thinwire.simulate.sharing import Demand, max_min_rates
from thinwire.simulate.task_graph import Compute, Times, Transfer, run_tasks
from thinwire.simulate.training_loop import simulate_training
from thinwire.simulate.virtual_clock import Clock

__all__ = [
    "AllGather",
    "Clock",
    "Cluster",
    "Compute",
    "Demand",
    "Everyone",
    "Exchange",
    "Flow",
    "Link",
    "Network",
    "Pattern",
    "Replica",
    "RingAllReduce",
    "RoundTimes",
    "Run",
    "Stage",
    "Stall",
    "Star",
    "Times",
    "Transfer",
    "TwoPhase",
    "joined_sites",
    "leaf_spine",
    "max_min_rates",
    "ring",
    "run_tasks",
    "simulate_training",
    "star",
]
