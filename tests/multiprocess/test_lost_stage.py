"""A stage that micro-batches may skip is killed in the middle of a step: the run goes on, and takes it back."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from live_processes import environment_of
from training_runs import OPTIONS, Started, finish, metrics, result, with_slow_steps, worker_of

from thinwire.training.checkpoints.replica_checkpoints import ReplicaCheckpoints
from thinwire.training.config import read_config
from thinwire.training.launch import rank_folder
from thinwire.training.run_origin import run_of
from thinwire.transport.addresses import RENDEZVOUS_FILE

STAGE, STEP, STEPS, EVERY = 2, 7, 24, 4


def state_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the parameters of the stage in its checkpoint."""
    identity = run_of(read_config(run))
    saved = ReplicaCheckpoints(rank_folder(run, STAGE), run=identity.run, replica=0, num_replicas=1,
                               config_digest=identity.config_digest)  # fmt: skip
    found: dict[str, torch.Tensor] = saved.load(step)["model"]
    return found


def steps_of(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(folder, 0) if line["kind"] == "step"}


def test_a_run_goes_on_without_a_killed_stage_and_takes_it_back(tmp_path: Path) -> None:
    run, killed, held = tmp_path / "run", tmp_path / "killed", tmp_path / "held"
    killed.write_text(f"{STAGE} {STEP}")
    held.write_text(str(STEP + EVERY))  # until the stage is back: else the others may end without it
    words = ["--replicas", "1", *OPTIONS, "--model", "nano", "--batch-size", "4", "--micro-batch", "1", "--pp", "4",
             "--skip", "0.25", "--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--log-every", "1",
             "--eval-every", "9", "--out", str(run)]  # fmt: skip
    environment = {**with_slow_steps(held_at=held), "CHAOS_KILLED_AT": str(killed)}
    started = Started(words, environment=environment)
    own = rank_folder(run, STAGE)
    try:
        started.until(lambda: not killed.exists(), "the stage's death")
        before = state_of(run, EVERY)
        # it posts that it is there, for the group without it if that has not begun, else for the next one
        store = Path(environment_of(worker_of(started, 0))[RENDEZVOUS_FILE])
        posts = [f"stages/0/0/here/{number}/{STAGE}".encode() for number in (1, 2)]
        started.until(lambda: any(post in store.read_bytes() for post in posts), "the stage's return")
        held.unlink()
        finish(started)
    finally:
        started.kill_family()
    assert started.stderr.count("rank 2 was ended by SIGKILL; it is skipped until it is back") == 1

    losses, returned = steps_of(run), steps_of(own)
    assert sorted(losses) == list(range(1, STEPS + 1)) and all(map(math.isfinite, losses.values()))
    assert math.isfinite(result(started)["val_loss"]) and result(started)["steps"] == STEPS
    # what it shows of a step without it is the latest loss that it knows; at the end it is in step with the others
    assert [returned[step] for step in (STEPS - 1, STEPS)] == [losses[step] for step in (STEPS - 1, STEPS)]
    after = state_of(run, STEPS)
    assert all(not torch.equal(before[name], after[name]) for name in before)
