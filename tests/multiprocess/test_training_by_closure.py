"""`thinwire train` with a method that asks for gradients itself: it learns, and resumes bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from processes import free_port, run, values
from training_runs import DEADLINE_S, DOCUMENTS, as_rank, metrics

STEPS, STOP = 24, 8
OPTIONS = (
    "--method masha2 --method-option refresh_probability=0.3 --lr 0.5 --weight-decay 0.01 --tokenizer bytes "
    f"--batch-size 2 --seq-len 16 --steps {STEPS} --eval-every 0 --final-eval-batches 4 --checkpoint-every {STOP} "
    "--log-every 4 --threads 1 --quiet --json"
).split()


class _StoppedOnPurpose(Exception):
    pass


def as_stopped_rank(words: list[str], port: int) -> bool:
    """Run a command line until the checkpoint after step `STOP`, and tell whether it came to that."""
    from thinwire.training.loop import Training

    save = Training.save

    def save_and_stop(self: Any) -> None:
        save(self)
        if self.step == STOP:
            raise _StoppedOnPurpose

    Training.save = save_and_stop  # type: ignore[method-assign]
    try:
        as_rank([words], [port])
    except _StoppedOnPurpose:
        return True
    finally:
        Training.save = save  # type: ignore[method-assign]
    return False


def three_runs(whole: list[str], stopped: list[str], resumed: list[str], ports: list[int]) -> list[Any]:
    """Run one to its end, one to its first checkpoint, and that one to its end; return whether so, and the results."""
    is_stopped = as_stopped_rank(stopped, ports[0])
    return [is_stopped, *as_rank([whole, resumed], ports[1:])]


def test_masha2_lowers_the_loss_of_a_model_with_dropout_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    # GPT-2's dropout is 0.1: a resumed run must go on with the random numbers of the one that was stopped
    transformers.GPT2Config(
        vocab_size=300, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=None, eos_token_id=None
    ).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "text.txt").write_text("\n".join(DOCUMENTS))
    inputs = {"model": f"hf:{tmp_path / 'gpt2'}", "data": tmp_path / "text.txt", "cache-dir": tmp_path / "cache"}
    words = [*OPTIONS, *(word for name, value in inputs.items() for word in (f"--{name}", str(value)))]
    arguments = {
        "whole": [*words, "--out", str(tmp_path / "whole")],
        "stopped": [*words, "--out", str(tmp_path / "stopped")],
        "resumed": ["--resume", str(tmp_path / "stopped"), "--json", "--quiet"],
        "ports": [free_port() for _ in range(3)],
    }
    outcomes = values(run(three_runs, num_ranks=2, arguments=arguments, deadline_s=DEADLINE_S))
    for is_stopped, *done in outcomes:
        assert is_stopped and all(code == 0 for code, _, _ in done), done
    whole, resumed = (json.loads(stdout) for _, stdout, _ in outcomes[0][1:])

    told = [line["loss"] for line in metrics(tmp_path / "whole", 0) if line["kind"] == "step"]
    assert len(told) == STEPS // 4
    assert told[-1] < told[0] - 0.5 and whole["val_loss"] < told[0] - 0.5
    assert 0 < whole["payload_bytes"] < whole["allreduce_bytes"]

    for name in ("global_parameters_sha256", "val_loss", "tokens"):
        assert resumed[name] == whole[name]
    # it went on rather than began anew: the model was compared and sent twice
    assert resumed["payload_bytes"] > whole["payload_bytes"]
    steps = [line for line in metrics(tmp_path / "stopped", 0) if line["kind"] == "step"]
    assert [line["loss"] for line in steps] == told
