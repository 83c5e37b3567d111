"""`train --activation-memory`: differences to the last visit of each window cross, and a resumed run has all copies."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import torch
from training_runs import OPTIONS, Started, finish, metrics, result

from thinwire.codecs.activation_code import ActivationCode
from thinwire.training.checkpoints.replica_checkpoints import ReplicaCheckpoints
from thinwire.training.config import read_config
from thinwire.training.launch import rank_folder
from thinwire.training.run_origin import run_of

# 49 windows in batches of 4: a batch in which an epoch ends may hold a window twice
WINDOWS, SEQ_LEN, STEPS, HALF, WIDTH = 49, 16, 32, 20, 192


def border_of(run: Path, stage: int, step: int) -> dict[str, Any]:
    """Return what the one border of a stage remembers in its checkpoint."""
    identity = run_of(read_config(run))
    saved = ReplicaCheckpoints(rank_folder(run, stage), run=identity.run, replica=0, num_replicas=1,
                               config_digest=identity.config_digest)  # fmt: skip
    found: dict[str, Any] = saved.load(step)["memory"]["0"]["memories"][str(1 - stage)]
    return found


def test_copies_are_equal_at_both_ends_and_a_resumed_run_goes_on_with_them_bit_for_bit(tmp_path: Path) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    chance = random.Random(3)
    text.write_text("".join(chance.choice("thin wire ") for _ in range(803)))
    words = ["--replicas", "1", *OPTIONS, "--model", "nano", "--data", str(text), "--batch-size", "4", "--micro-batch",
             "2", "--pp", "2", "--activation-code", "block-int4/block-int8", "--steps", str(STEPS), "--log-every", "1",
             "--checkpoint-every", str(HALF), "--out", str(run)]  # fmt: skip
    words.remove("--quiet")
    refused = Started([*words, "--activation-memory", "300kB"])
    assert refused.end() == 2
    num_bytes = (WINDOWS + 4) * SEQ_LEN * WIDTH * 2
    assert f"for {WINDOWS} windows; try --activation-memory {num_bytes}, or less text" in refused.stderr
    whole = finish(Started([*words, "--activation-memory", str(num_bytes)]))
    assert f"differences to the last visit of {WINDOWS} windows take 326 kB on each side of each border" in whole.stderr

    ends = [border_of(run, stage, STEPS) for stage in (0, 1)]
    for name in ("visits", "last"):
        assert torch.equal(ends[0][name], ends[1][name])
    # each window once an epoch, on its own place or on that of a row that has it again
    visits = ends[0]["visits"]
    assert int(visits.sum()) == 4 * STEPS and int(visits[:WINDOWS].min()) >= 4 * STEPS // WINDOWS - 1
    sent = [0, *(line["sent_bytes"] for line in metrics(run, 0) if line["kind"] == "step")]
    rows = 2 * SEQ_LEN * WIDTH  # elements of a micro-batch
    saved = 2 * (4 * rows - ActivationCode("block-int4").payload_bytes(rows))
    assert sent[1] - (sent[STEPS] - sent[STEPS - 1]) == saved  # first visits cross uncoded, in float32

    resumed = tmp_path / "resumed"
    shutil.copytree(run, resumed)
    (resumed / "summary.json").unlink()
    for stage in (0, 1):
        for folder in (rank_folder(resumed, stage) / "checkpoints").glob(f"step-*{STEPS}"):
            shutil.rmtree(folder)
    again = finish(Started(["--resume", str(resumed), "--json", "--quiet"]))
    assert result(again)["global_parameters_sha256"] == result(whole)["global_parameters_sha256"]
    assert all(torch.equal(border_of(resumed, 1, STEPS)[name], ends[1][name]) for name in ("visits", "last"))
