"""`thinwire.join` in a training loop of one's own, with real processes: killed, come back, refused."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from live_processes import DEADLINE_S, is_running, kill, until, words_of
from processes import Processes, announce, free_port, values

import thinwire
from thinwire.cli.main import main
from thinwire.elastic.coordinator_client import send_command
from thinwire.elastic.invitation import read_invitation
from thinwire.elastic.journal import read_journal
from thinwire.errors import Refused, RunOver
from thinwire.runlog.run_identity import new_identity
from thinwire.training.elastic.coordinator_process import JOURNAL_FILE
from thinwire.training.elastic.job import LoopJob
from thinwire.training.elastic.own_loop import RunPlace
from thinwire.training.summary import parameters_sha256
from thinwire.transport.secret import JOIN_VARIABLE, read_secret

# From SLOW_STEP on, until the killed process is back, steps are slow: else the run would end without it.
ANSWER_S = DEADLINE_S / 4
STEPS, FIRST_STEP, SLOW_STEP, STEP_S, SLOW_S = 160, 20, 50, 0.05, 0.3
METHOD = thinwire.methods.streaming_diloco(sync_interval=8, overlap_steps=2)


def small_model(seed: int, *, width: int = 6) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))


def train(folder: str, port: int, seed: int) -> dict[str, Any]:
    """Train like a script that knows nothing of launchers; `killed` and `back` are files of the test."""
    uri, killed, back = f"127.0.0.1:{port}", Path(folder, "killed"), Path(folder, "back")
    refused = ""
    if killed.exists():  # this process comes back; first with another model, by mistake
        other = small_model(seed, width=7)
        with pytest.raises(Refused) as error:
            thinwire.join(uri, other, torch.optim.SGD(other.parameters(), lr=0.1), method=METHOD, folder=folder)
        refused = str(error.value)
    model = small_model(seed)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(seed)
    waits, rounds, first_step = [0.0], 0, None
    joined = thinwire.join(uri, model, inner, method=METHOD, steps=STEPS, replicas=3, folder=folder)
    with joined as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        first_number = optimizer.transport.replica
        while not optimizer.is_finished:
            before = optimizer.statistics.stalled_s, optimizer.statistics.rounds_applied
            inputs = torch.randn(8, 4, generator=data)
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            first_step = first_step or optimizer.steps_done
            if killed.exists() and not back.exists():
                waits.append(optimizer.statistics.stalled_s - before[0])
                rounds += max(0, optimizer.statistics.rounds_applied - before[1])  # counted from 0 after joining again
            if refused:
                back.touch()
            for step in (FIRST_STEP, SLOW_STEP):  # a replica that is behind may pass over any one
                if optimizer.steps_done >= step:
                    announce(f"past {step}")
            time.sleep(SLOW_S if optimizer.steps_done >= SLOW_STEP and not back.exists() else STEP_S)
    sha256 = parameters_sha256(model)
    return {
        "sha256": sha256, "waited_s": max(waits), "rounds": rounds, "first_step": first_step, "refused": refused,
        "joined_again": optimizer.transport.replica != first_number,
    }  # fmt: skip


def coordinators(folder: Path) -> list[psutil.Process]:
    return [one for one in psutil.process_iter() if {str(folder), "coordinator"} <= set(words_of(one))]


def end_coordinator(folder: Path) -> None:
    """Kill the coordinator of a run in a folder of this test, where a failure has left one."""
    found = coordinators(folder)
    kill(found)
    # it loses its command line before its files, and holds the lock of the run until it is gone
    until(lambda: not any(map(is_running, found)))


def test_own_loops_go_on_without_a_killed_one_and_it_comes_back_to_the_same_model(tmp_path: Path) -> None:
    port = free_port()

    def start(ranks: list[int]) -> Processes:
        arguments = {"folder": str(tmp_path), "port": port, "seed": ranks[0]}
        unset = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        return Processes(train, num_ranks=4, ranks=ranks, arguments=arguments, environment=unset)

    try:
        with start([0]) as first, start([1]) as second, start([2]) as third:
            for rank, processes in enumerate((first, second, third)):  # any of them may have created the run
                processes.wait_for(f"past {FIRST_STEP}", rank=rank)
            first.kill(0)
            (tmp_path / "killed").touch()
            second.wait_for(f"past {SLOW_STEP}", rank=1)
            invitation, secret = read_invitation(f"127.0.0.1:{port}"), read_secret(tmp_path / "secret")
            status = send_command(invitation, secret=secret, deadline_s=ANSWER_S, verb="status", target="")["status"]
            # the killed one may still be in the list, at the step that it had reached
            survivor = str(max(status["members"], key=lambda member: member["step"])["replica"])
            assert send_command(invitation, secret=secret, deadline_s=ANSWER_S, verb="expel", target=survivor)["ok"]
            with start([3]) as again:
                outcomes = values([*second.join(), *third.join(), *again.join()])
    finally:
        end_coordinator(tmp_path)
    survivors, returned = outcomes[:2], outcomes[2]
    for one in survivors:
        assert one["rounds"] >= 2
        # nobody waits until the killed one is let go; how much longer than the grace depends on how busy the machine is
        assert one["waited_s"] < status["silence_s"] / 4
    assert status["grace_s"] < status["silence_s"] / 4
    assert sorted(one["joined_again"] for one in outcomes) == [False, False, True]  # the expelled one, by itself
    assert returned["first_step"] > FIRST_STEP and len({one["sha256"] for one in outcomes}) == 1
    assert "the run trains a model of other parameters" in returned["refused"]
    journal = [line["what"] for line in read_journal(tmp_path / JOURNAL_FILE)]
    assert "finished" in journal and "failed" not in journal
    model = small_model(0)
    with pytest.raises(RunOver, match="has ended; begin another one with folder=NEW-FOLDER"):
        thinwire.join(f"127.0.0.1:{port}", model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)


def test_a_killed_coordinator_is_started_again_with_the_same_run_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bare, secret_file = f"127.0.0.1:{free_port()}", tmp_path / "job.secret"
    assert main(["secret", str(secret_file), "--coordinator", bare]) == 0
    [named] = re.findall(rf"export {JOIN_VARIABLE}=(\S+)", capsys.readouterr().out)
    place = RunPlace.find(named, secret=secret_file, folder=None, reach={})

    def new_job() -> LoopJob:
        identity = new_identity(config_digest=32 * "0")
        return LoopJob.of(METHOD, setup={}, num_replicas=1, last_step=0, identity=identity)

    def run_and_process() -> tuple[str, int]:
        secret = place.ready(new_job)
        found = send_command(place.near, secret=secret, deadline_s=ANSWER_S, verb="status", target="")["status"]
        [process] = coordinators(place.folder)
        return found["identity"]["run"], process.pid

    try:
        first = run_and_process()
        assert run_and_process() == first  # a second process of this host takes the coordinator that runs
        end_coordinator(place.folder)
        again = run_and_process()
        with pytest.raises(ValueError, match=f"got no key, and .*; allowed {named}; try that address"):
            RunPlace.find(bare, secret=secret_file, folder=None, reach={}).ready(new_job)
    finally:
        end_coordinator(place.folder)
    assert again[0] == first[0] and again[1] != first[1]
