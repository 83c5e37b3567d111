"""Environment of a job: a process's place in it by its launcher's variables, and the removal of these variables.

Launchers speak through the environment, so this module and `connect` touch it; no other module of the library does.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.errors import refusal
from thinwire.transport.addresses import RENDEZVOUS_FILE

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
TRACKER_GROUP = "WANDB_RUN_GROUP"
# Rank, size, rank on this host and size on this host, as each MPI starts its ranks: Open MPI; MPICH and Intel MPI.
_MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}  # fmt: skip
# The number of an mpirun, the same for all of its ranks and another one for the next mpirun.
_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
# A rank of launchers whose size and hosts thinwire does not read: PMIx alone, Cray PALS, IBM jsrun, Flux, MVAPICH.
_UNREAD = ("PMIX_RANK", "PALS_RANKID", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK", "MV2_COMM_WORLD_RANK")
# Set by `accelerate launch` in every process; the engines that it would start over all ranks, and their names.
_ACCELERATE = "ACCELERATE_MIXED_PRECISION"
_ENGINES = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_FSDP": "FSDP",
            "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}  # fmt: skip
_ALONE = "accelerate launch started this process alone: on a CPU it starts one, whatever --num_processes is"
_SEVERAL = "torchrun --nproc-per-node 2 SCRIPT, or accelerate launch --multi_gpu"
# Ports that Linux does not lend to outgoing connections.
_FIRST_PORT, _NUM_PORTS = 16_000, 12_000
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
    """World of one replica's ranks, as the libraries inside a replica shall see it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    master_address: str  # address of the replica's first rank
    master_port: int  # a port there that was free


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


def refuse_engines(environment: Mapping[str, str]) -> None:
    """Refuse engines by which `accelerate launch` would shard the model over the ranks of all replicas.

    Raises:
        ValueError: One is switched on.
    """
    for name, engine in _ENGINES.items():
        if environment.get(name, "").lower() in ("1", "true", "yes"):
            raise refusal(
                f"accelerate would let {engine} shard the model, and {engine} by accelerate has not been run inside a "
                f"replica", got=f"{name}={environment[name]}", allowed="one rank a replica, or fully_shard within one",
                remedy=f"accelerate launch without {engine} (unset {name}); to shard, connect(ranks_per_replica=N) and "
                f"fully_shard",
            )  # fmt: skip


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


def offer_tracker_group(name: str) -> None:
    """Put the replicas' runs of Weights & Biases into one group, unless the user named one."""
    os.environ.setdefault(TRACKER_GROUP, name)


def pin_gpus(local_ranks: Sequence[int]) -> None:
    """Leave this process the GPUs of its replica's ranks on this host, by CUDA_VISIBLE_DEVICES.

    A library that sees one process and several GPUs would take DataParallel. Where this host has fewer GPUs than ranks,
    ranks share them.

    Args:
        local_ranks: LOCAL_RANK of each rank of the replica on this host.

    Raises:
        ValueError: CUDA runs in this process already, so that the choice would have no effect.
    """
    import torch  # takes seconds, and the command line reads variables without it

    from thinwire import compat

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
    environment = {**launcher_variables(environment), **environment}
    file = environment.get(RENDEZVOUS_FILE, "")
    if file:
        # MASTER_ADDR and MASTER_PORT of another job may stand in the shell that started the launcher
        environment = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    missing = [name for name in REQUIRED if not environment.get(name)]
    if len(missing) == len(REQUIRED):
        return None
    if missing:
        present = [name for name in REQUIRED if name not in missing]
        if "RANK" in missing and environment.get(_ACCELERATE):
            raise refusal(_ALONE, got=f"{', '.join(present)} without RANK", allowed="several processes",
                          remedy=_SEVERAL)  # fmt: skip
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


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables as srun or mpirun state them.

    Args:
        environment: Where MASTER_ADDR and MASTER_PORT are set, they count; RANK or WORLD_SIZE mean another launcher.

    Returns:
        What to add to the environment; nothing where no other rank exists, or torchrun's own variables are set.

    Raises:
        ValueError: A launcher started several ranks, and how they meet is not stated; or a batch job has several tasks,
            and this process is none of them.

    Example:
        >>> step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
        >>> launcher_variables({**step, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[03-04]"})["MASTER_ADDR"]
        'gpu03'
    """
    if any(environment.get(name) for name in ("RANK", "WORLD_SIZE", RENDEZVOUS_FILE)):
        return {}
    for launcher, names in _MPI.items():
        if environment.get(names[0]) and environment.get(names[1]):
            # Slurm's own PMI numbers its tasks as Slurm does, and only Slurm states the hosts
            slurm = [environment.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
            if slurm == [environment[name] for name in names[:2]]:
                break
            return _mpi_variables(environment, launcher, names)
    if environment.get("SLURM_PROCID") and environment.get("SLURM_STEP_ID"):
        return _slurm_variables(environment)
    _refuse_lone_task(environment)
    return {}


def _slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    size = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or ""
    if size == "1":
        return {}
    found = {"RANK": environment["SLURM_PROCID"], "WORLD_SIZE": size}
    if local_rank := environment.get("SLURM_LOCALID"):
        found["LOCAL_RANK"] = local_rank
    counts = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environment.get("SLURM_NODEID", "")
    if node.isdecimal() and int(node) < len(counts):
        found["LOCAL_WORLD_SIZE"] = str(counts[int(node)])
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    job = environment.get("SLURM_JOB_ID", "")
    if not environment.get("MASTER_ADDR"):
        is_one_host = environment.get("SLURM_STEP_NUM_NODES") == "1"
        found["MASTER_ADDR"] = "127.0.0.1" if is_one_host else _first_host(hosts)
    if not environment.get("MASTER_PORT"):
        found["MASTER_PORT"] = _port_of(f"slurm {job}.{environment['SLURM_STEP_ID']}")
    if not size or not job or not found.get("MASTER_ADDR", "x"):
        raise refusal("srun started this task, and its variables are incomplete", got=f"tasks {size!r}, job {job!r}, "
                      f"hosts {hosts!r}", allowed="SLURM_NTASKS, SLURM_JOB_ID and SLURM_JOB_NODELIST",
                      remedy="srun without --export=NONE")  # fmt: skip
    return found


def _mpi_variables(environment: Mapping[str, str], launcher: str, names: Sequence[str]) -> dict[str, str]:
    rank, size, local_rank, local_size = (environment.get(name, "") for name in names)
    if size == "1":
        return {}
    found = {"RANK": rank, "WORLD_SIZE": size}
    if local_rank and local_size:
        found |= {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    job = next((environment[name] for name in _MPI_JOB if environment.get(name)), "")
    if local_size == size and job:
        return {**found, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port_of(f"mpi {job}")}
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise refusal(
            f"mpirun ({launcher}) started {size} ranks, and where they meet is not stated", got=f"no {missing[0]}",
            allowed="MASTER_ADDR with an address of rank 0's host, and MASTER_PORT with a free port there",
            remedy="mpirun -x MASTER_ADDR=10.0.0.1 -x MASTER_PORT=29500 (Open MPI), or -genv (MPICH)",
        )  # fmt: skip
    return found


def _refuse_lone_task(environment: Mapping[str, str]) -> None:
    """Refuse a process that knows of other ranks, and would train alone beside them.

    Raises:
        ValueError: It does.
    """
    for name in _UNREAD:
        if environment.get(name):
            raise refusal(
                "a launcher whose variables thinwire does not read started this process", got=f"{name}="
                f"{environment[name]}", allowed="torchrun, srun, mpirun, or torchrun's variables",
                remedy=f"to set {', '.join(REQUIRED)} for each rank, or to unset {name} to train alone",
            )  # fmt: skip
    for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"):
        if environment.get(name, "1") != "1":
            raise refusal(
                "this process is one of a Slurm job of several tasks or hosts, and srun did not start it",
                got=f"{name}={environment[name]}", allowed="a task of srun, or a job of one task",
                remedy=f"srun in front of the command, or to unset {name} to train alone",
            )  # fmt: skip


def _first_host(hosts: str) -> str:
    """Return the first of Slurm's list of hosts.

    Example:
        >>> _first_host("rack[2-3]gpu[007,9],login1")
        'rack2gpu007'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def _tasks_per_node(text: str) -> list[int]:
    """Return the tasks on each host of a step.

    Example:
        >>> _tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    found: list[int] = []
    for part in text.split(","):
        if (match := re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)) is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _port_of(job: str) -> str:
    return str(_FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS)
