"""Environment of a job: a process's place in it by its launcher's variables, and the removal of these variables.

Launchers speak through the environment, so this module and `connect` touch it; no other module of the library does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from thinwire import compat
from thinwire.errors import refusal
from thinwire.transport.addresses import RENDEZVOUS_FILE

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
# Variables by which libraries learn that they are one rank of several.
_TORCHRUN = (
    *REQUIRED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "ROLE_NAME", RENDEZVOUS_FILE,
)  # fmt: skip
_OTHERS = (
    "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES", "PMI_RANK", "PMI_SIZE", "PMIX_RANK",
    "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
)  # fmt: skip
_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """Place of a process in its job, by its environment; `rendezvous_file` is set by thinwire's own launcher."""

    rank: int
    world_size: int
    master_address: str
    master_port: int
    agent_serves_store: bool
    prefix: str
    rendezvous_file: str = ""
    local_rank: int | None = None

    @property
    def name(self) -> str:
        """Name of the rendezvous in errors."""
        return self.rendezvous_file or f"{self.master_address}:{self.master_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWorld:
    """World of one replica's ranks, as the libraries inside a replica shall see it.

    Attributes:
        rank: This rank's number within the replica.
        size: Ranks of the replica.
        local_rank: This rank's number among the replica's ranks on this host.
        local_size: Ranks of the replica on this host.
        master_address: Address of the replica's first rank.
        master_port: A port there that was free.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    master_address: str
    master_port: int


# The place of a process whose variables were removed; it stays the place of that process.
_hidden: list[JobPlace] = []


def job_place() -> JobPlace | None:
    """Return the place that this process's environment states, or None where no launcher's variable is set.

    Raises:
        ValueError: Only some are set, or one is no number in its range.
    """
    return _hidden[0] if _hidden else read_environment(os.environ)


def is_hidden() -> bool:
    """Return whether this process's variables were removed by `hide_job`."""
    return bool(_hidden)


def hide_job(place: JobPlace, *, world: ReplicaWorld | None) -> None:
    """Remove the launcher's variables, or state a replica's own world in them; nothing puts them back.

    A later `job_place` returns the place as it was.

    Args:
        place: This process's place in the whole job.
        world: World of the replica's ranks; None for a replica of one rank, which is in no world.
    """
    _hidden[:] = [place]
    for name in list(os.environ):
        if name in _TORCHRUN or name in _OTHERS or name.startswith(_PREFIXES):
            del os.environ[name]
    if world is not None:
        os.environ.update(
            RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.local_rank),
            LOCAL_WORLD_SIZE=str(world.local_size), MASTER_ADDR=world.master_address,
            MASTER_PORT=str(world.master_port),
        )  # fmt: skip


def pin_gpus(local_ranks: Sequence[int]) -> None:
    """Leave this process the GPUs of its replica's ranks on this host, by CUDA_VISIBLE_DEVICES.

    A library that sees one process and several GPUs would take DataParallel. Where this host has fewer GPUs than ranks,
    ranks share them.

    Args:
        local_ranks: LOCAL_RANK of each rank of the replica on this host.

    Raises:
        ValueError: CUDA runs in this process already, so that the choice would have no effect.
    """
    listed = os.environ.get(VISIBLE_GPUS)
    # counted through NVML, which leaves CUDA alone: once it has started, it does not read the variable again
    found = torch.cuda.device_count()
    names = listed.split(",") if listed else [str(number) for number in range(found)]
    chosen = dict.fromkeys(names[rank % len(names)] for rank in local_ranks) if names else {}
    if found <= 1 or len(chosen) in (0, len(names)):
        return
    os.environ[VISIBLE_GPUS] = ",".join(chosen)
    if compat.num_usable_gpus() != len(chosen):
        if listed is None:
            del os.environ[VISIBLE_GPUS]
        else:
            os.environ[VISIBLE_GPUS] = listed
        raise refusal(
            "connect(solo=True) chooses this rank's GPU, and CUDA runs in this process already", got=f"{found} GPUs",
            allowed="a process that has not called torch.cuda yet, torch.cuda.is_available() included",
            remedy=f"to call connect(solo=True) first, or to set {VISIBLE_GPUS} for each rank",
        )  # fmt: skip


def read_environment(environment: Mapping[str, str]) -> JobPlace | None:
    """Return the place that an environment states; see `job_place`."""
    file = environment.get(RENDEZVOUS_FILE, "")
    if file:
        # MASTER_ADDR and MASTER_PORT of another job may stand in the shell that started the launcher
        environment = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    missing = [name for name in REQUIRED if not environment.get(name)]
    if len(missing) == len(REQUIRED):
        return None
    if missing:
        present = [name for name in REQUIRED if name not in missing]
        raise ValueError(
            f"{', '.join(missing)} must be set where {', '.join(present)} is; start with torchrun, which sets all of "
            f"{', '.join(REQUIRED)}, or unset them all to run in this process alone"
        )
    place = JobPlace(
        rank=_integer(environment, "RANK", low=0),
        world_size=_integer(environment, "WORLD_SIZE", low=1),
        master_address=environment["MASTER_ADDR"],
        master_port=_integer(environment, "MASTER_PORT", low=1),
        # torchrun's agent may hold the store itself; then no rank may open the port.
        agent_serves_store=not file and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        # A restarted job meets in the same store: notes of the attempt before must not count.
        prefix=f"thinwire/{environment.get('TORCHELASTIC_RUN_ID', '')}/"
        f"{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        rendezvous_file=file,
        local_rank=_integer(environment, "LOCAL_RANK", low=0) if environment.get("LOCAL_RANK") else None,
    )
    if place.rank >= place.world_size:
        raise ValueError(f"RANK must be below WORLD_SIZE {place.world_size}, got {place.rank}")
    if place.master_port > 65_535:
        raise ValueError(f"MASTER_PORT must be at most 65535, got {place.master_port}")
    return place


def _integer(environment: Mapping[str, str], name: str, *, low: int) -> int:
    text = environment[name]
    if not text.isascii() or not text.isdecimal() or int(text) < low:
        raise ValueError(f"{name} must be a whole number of at least {low}, got {text!r}")
    return int(text)
