"""Places that launchers' variables state, and what is left of them in a solo world."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

from thinwire import compat
from thinwire.transport.job_environment import (
    VISIBLE_GPUS,
    launcher_variables,
    pin_gpus,
    read_environment,
    refuse_engines,
)

SLURM = {
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "31", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "rack[1-2]n[07-08],login", "SLURM_JOB_NODELIST": "other",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "1", "PMIX_NAMESPACE": "2871853057",
}  # fmt: skip
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}


def test_srun_states_what_torchrun_would() -> None:
    found = launcher_variables(SLURM)
    port = int(found.pop("MASTER_PORT"))
    assert found == {
        "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "rack1n07",
    }  # fmt: skip
    assert 16_000 <= port < 28_000
    assert launcher_variables({**SLURM, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != str(port)
    assert launcher_variables({**SLURM, "SLURM_STEP_NUM_NODES": "1"})["MASTER_ADDR"] == "127.0.0.1"
    place = read_environment({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert place is not None
    assert (place.name, place.rank, place.world_size, place.local_rank) == ("10.0.0.1:29500", 5, 7, 1)


def test_mpirun_states_what_torchrun_would_on_one_host_and_is_asked_for_the_address_on_several() -> None:
    found = launcher_variables(OPEN_MPI)
    assert found.pop("MASTER_PORT").isdecimal()
    assert found == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    for several in ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, HYDRA):
        with pytest.raises(
            ValueError, match=r"where they meet is not stated; got no MASTER_ADDR; .*mpirun -x MASTER_ADDR"
        ):
            launcher_variables(several)
        place = read_environment({**several, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
        assert place is not None and place.world_size == 2


def test_tasks_that_slurm_numbers_by_its_own_pmi_meet_at_slurms_host() -> None:
    pmi = {"PMI_RANK": SLURM["SLURM_PROCID"], "PMI_SIZE": SLURM["SLURM_STEP_NUM_TASKS"]}
    assert launcher_variables({**SLURM, **pmi}) == launcher_variables(SLURM)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "SLURM_NTASKS=4"),
        ({"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "2"}, "SLURM_JOB_NUM_NODES=2"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0"),
        ({"FLUX_TASK_RANK": "3"}, "FLUX_TASK_RANK=3"),
        ({**SLURM, "SLURM_JOB_ID": ""}, "job ''"),
        ({**SLURM, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "hosts ''"),
    ],
)
def test_a_rank_that_would_train_alone_beside_others_is_refused(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=f"got .*{named}.*; allowed .*; try "):
        read_environment(environment)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_PROCID": "0"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_job_of_one_task_trains_alone(environment: dict[str, str]) -> None:
    assert read_environment(environment) is None


def test_torchruns_variables_count_before_all_others() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5"}
    for other in (SLURM, OPEN_MPI, HYDRA, {"PMIX_RANK": "7"}):
        place = read_environment({**other, **torchrun})
        assert place is not None and (place.rank, place.world_size, place.name) == (1, 3, "127.0.0.1:5")


@pytest.mark.parametrize(
    ("listed", "gpus", "local_ranks", "left"),
    [
        (None, 4, [2], "2"),
        (None, 4, [2, 3], "2,3"),
        (None, 2, [0, 1], None),  # all of them
        (None, 2, [3], "1"),  # more ranks than GPUs: they share
        ("7,5", 2, [1], "5"),
        ("GPU-a,GPU-b", 2, [0], "GPU-a"),
        ("6", 1, [3], "6"),  # the launcher has chosen
        (None, 1, [1], None),
        (None, 4, [], None),  # LOCAL_RANK is unknown
    ],
)
def test_a_replica_is_left_the_gpus_of_its_local_ranks(
    listed: str | None, gpus: int, local_ranks: Sequence[int], left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have_gpus(listed, gpus, monkeypatch)
    monkeypatch.setattr(compat, "num_usable_gpus", lambda: len(os.environ[VISIBLE_GPUS].split(",")))
    pin_gpus(local_ranks)
    assert os.environ.get(VISIBLE_GPUS) == left


@pytest.mark.parametrize("listed", [None, "0,1"])
def test_cuda_that_runs_already_is_refused_and_the_choice_is_as_before(
    listed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have_gpus(listed, 2, monkeypatch)
    monkeypatch.setattr(compat, "num_usable_gpus", lambda: 2)  # CUDA has read the variable before
    with pytest.raises(ValueError, match=r"CUDA runs in this process already; got 2 GPUs.*connect\(solo=True\) first"):
        pin_gpus([1])
    assert os.environ.get(VISIBLE_GPUS) == listed


def _have_gpus(listed: str | None, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if listed is None:
        monkeypatch.delenv(VISIBLE_GPUS, raising=False)
    else:
        monkeypatch.setenv(VISIBLE_GPUS, listed)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


@pytest.mark.parametrize("name", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"])
def test_engines_that_accelerate_would_start_over_all_replicas_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"got {name}=true; .* try accelerate launch without .* \(unset {name}\)"):
        refuse_engines({name: "true"})
    refuse_engines({name: "false"})
    refuse_engines({})  # the remedy


def test_what_accelerate_itself_sets_for_one_process_of_a_cpu_is_refused_with_a_launcher_that_starts_several() -> None:
    launch = pytest.importorskip("accelerate.commands.launch", reason="needs accelerate: pip install 'thinwire[hf]'")
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    def environment(count: int) -> dict[str, str]:
        args = launch.launch_command_parser().parse_args(["--cpu", "--num_processes", str(count), "train.py"])
        args, *_ = launch._validate_launch_command(args)
        _, found = prepare_simple_launcher_cmd_env(args)
        return {name: value for name, value in found.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}

    with pytest.raises(ValueError, match=r"accelerate launch started this process alone.* try torchrun --nproc-per-n"):
        read_environment(environment(2))
    assert read_environment(environment(1)) is None
    # the remedy: what torchrun adds to the same environment
    place = read_environment({**environment(2), "RANK": "1", "WORLD_SIZE": "2"})
    assert place is not None and (place.rank, place.world_size) == (1, 2)
