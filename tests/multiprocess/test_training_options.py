"""Options of `thinwire train` that are seldom given, in real runs of a tiny model: each does what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
from processes import Processes, free_port, run, values
from training_runs import DEADLINE_S, DOCUMENTS, OPTIONS, as_rank, metrics, sent_in_rounds

from thinwire.recording.metrics import open_loggers

STEPS = 14
# Name of a run: its options beside `OPTIONS`, with {inputs} for the folder of models and data.
ROWS = "--data {inputs}/rows.jsonl"
ALONE = {
    "jsonl": ROWS,
    "parquet": "--data {inputs}/rows.parquet --tensorboard",
    "hf": "--data hf:{inputs}/set",
    "bf16": f"{ROWS} --autocast bf16",
    "sgd": f"{ROWS} --inner-optimizer sgd",
    "constant": f"{ROWS} --inner-optimizer sgd --schedule constant",
    "compile": f"{ROWS} --compile",
}
THREE = {
    "all-gather": f"{ROWS} --codec block-int8 --exchange all-gather",
    "two-phase": f"{ROWS} --codec block-int8 --exchange two-phase",
    "own-overlaps": f"{ROWS} --overlap-steps 0,1,5",
    "decoupled": f"{ROWS} --method decoupled-diloco --method-option quorum=2 --method-option most_behind=2",
    "late": f"{ROWS} --sync-interval 2 --overlap-steps 1 --log-every 2 --expected-step-s 1e-4",
    "in-time": f"{ROWS} --sync-interval 2 --overlap-steps 1 --log-every 2 --expected-step-s 1e3",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same documents in three kinds of files, and two tiny models."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "set").mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    pq.write_table(pa.table({"text": DOCUMENTS}), folder / "rows.parquet")
    pq.write_table(pa.table({"text": DOCUMENTS}), folder / "set" / "train.parquet")
    special = {"bos_token_id": None, "eos_token_id": None}
    transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, architectures=["LlamaForCausalLM"], **special,
    ).save_pretrained(folder / "llama")  # fmt: skip
    transformers.GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2, n_positions=16, **special).save_pretrained(
        folder / "gpt2"
    )
    return folder


def command(words: str, *, model: str, inputs: Path, out: Path) -> list[str]:
    own = f"--model hf:{{inputs}}/{model} {words}".format(inputs=inputs).split()
    return [*OPTIONS, "--steps", str(STEPS), "--cache-dir", str(inputs / ".cache"), *own, "--out", str(out)]


@pytest.fixture(scope="module")
def found(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Make all runs, and return what each printed, with its folder."""
    folder = tmp_path_factory.mktemp("runs")

    def processes(runs: dict[str, str], *, model: str, num_ranks: int) -> Processes:
        lines = [command(words, model=model, inputs=inputs, out=folder / name) for name, words in runs.items()]
        arguments = {"lines": lines, "ports": [free_port() for _ in lines]}
        return Processes(as_rank, num_ranks=num_ranks, arguments=arguments)

    results: dict[str, dict[str, Any]] = {}
    with processes(ALONE, model="llama", num_ranks=1) as alone, processes(THREE, model="gpt2", num_ranks=3) as three:
        for runs, started in ((THREE, three), (ALONE, alone)):
            outcomes = values(started.join(deadline_s=DEADLINE_S))
            for number, name in enumerate(runs):
                for code, _, stderr in (done[number] for done in outcomes):
                    assert code == 0, f"{name}: {stderr}"
                    # the table of the result, by rank 0 alone; no library's progress bar
                    assert stderr == "" or stderr.startswith("validation loss "), f"{name}: {stderr}"
                results[name] = {**json.loads(outcomes[0][number][1]), "folder": folder / name}
    return results


def test_the_same_documents_train_the_same_model_whatever_files_they_are_in(found: dict[str, Any]) -> None:
    hashes = {found[name]["global_parameters_sha256"] for name in ("jsonl", "parquet", "hf")}
    assert len(hashes) == 1


def test_a_compiled_model_learns_what_the_plain_one_learns(found: dict[str, Any]) -> None:
    assert found["compile"]["val_loss"] == pytest.approx(found["jsonl"]["val_loss"], rel=1e-3)


def test_autocast_rounds_the_forward_pass_and_learns_nearly_the_same(found: dict[str, Any]) -> None:
    assert found["bf16"]["global_parameters_sha256"] != found["jsonl"]["global_parameters_sha256"]
    assert found["bf16"]["val_loss"] == pytest.approx(found["jsonl"]["val_loss"], rel=1e-2)


def test_the_inner_optimizer_and_the_schedule_are_those_that_were_named(found: dict[str, Any]) -> None:
    names = ("jsonl", "sgd", "constant")
    assert len({found[name]["global_parameters_sha256"] for name in names}) == 3
    # both begin at the peak: the schedule makes a difference only later
    lines = {name: metrics(found[name]["folder"], 0) for name in names}
    first = {name: next(line["loss"] for line in lines[name] if line["kind"] == "step") for name in names}
    assert first["sgd"] == pytest.approx(first["constant"], rel=1e-2)


def test_two_phases_send_less_than_an_all_gather_among_three_and_come_to_nearly_the_same(found: dict[str, Any]) -> None:
    one, two = found["all-gather"], found["two-phase"]
    assert one["replicas"] == two["replicas"] == 3 and one["codec"] == two["codec"] == "block-int8"
    assert 0 < sent_in_rounds(two["folder"]) < sent_in_rounds(one["folder"])
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-3)
    assert two["global_parameters_sha256"] != one["global_parameters_sha256"]


def test_three_replicas_with_their_own_overlaps_agree(found: dict[str, Any]) -> None:
    # replicas whose global parameters differ at the end fail the run
    assert found["own-overlaps"]["replicas"] == 3
    assert found["own-overlaps"]["overlap_steps"] == [0, 1, 5]


def test_three_replicas_that_need_not_wait_for_each_other_agree_too(found: dict[str, Any]) -> None:
    assert found["decoupled"]["replicas"] == 3 and found["decoupled"]["method"] == "decoupled-diloco"
    assert found["decoupled"]["steps"] == STEPS and found["decoupled"]["codec"] == "e3m0"


def test_each_replica_is_told_once_that_steps_take_longer_than_planned_and_only_then(found: dict[str, Any]) -> None:
    for replica in range(3):
        told, untold = (
            [(line["step"], line["message"]) for line in metrics(found[name]["folder"], replica)
             if line["kind"] == "warning" and "the plan's" in line["message"]]
            for name in ("late", "in-time")
        )  # fmt: skip
        # counted after step 1 in windows of 2 steps: one that does not count, and three
        [(step, message)] = told
        assert step == 9 and message.startswith(f"replica {replica}: steps take ")
        assert "times the plan's 100 us: computing " in message
        assert "plan again" in message and "\n" not in message
        assert untold == []


def scalars(folder: Path, name: str) -> Iterator[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return ((event.step, event.value) for event in events.Scalars(name))


def test_tensorboard_gets_what_the_metrics_say(found: dict[str, Any]) -> None:
    folder = found["parquet"]["folder"]
    written = [(line["step"], line["loss"]) for line in metrics(folder, 0) if line["kind"] == "step"]
    shown = list(scalars(folder / "tensorboard" / "replica-0", "loss"))
    assert [step for step, _ in shown] == [step for step, _ in written] == [4, 8, 12, 14]
    assert [loss for _, loss in shown] == pytest.approx([loss for _, loss in written])


def test_tensorboard_shows_a_step_that_a_resumed_run_did_again_once(tmp_path: Path) -> None:
    for after_step, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        (logger,) = open_loggers(tmp_path, tensorboard=True, wandb=False, replica=0, after_step=after_step)
        for step in steps:
            logger.log({"loss": 10.0 * after_step + step}, step=step)
        logger.close()
    shown = list(scalars(tmp_path / "tensorboard" / "replica-0", "loss"))
    assert shown == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0), (5, 25.0)]


def test_a_compiler_that_fails_ends_the_run_in_one_line(inputs: Path, tmp_path: Path) -> None:
    line = command(f"{ROWS} --compile", model="llama", inputs=inputs, out=tmp_path / "run")
    broken = {"CXX": "false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    arguments = {"lines": [line], "ports": [free_port()]}
    [[(code, stdout, stderr)]] = values(
        run(as_rank, num_ranks=1, arguments=arguments, environment=broken, deadline_s=DEADLINE_S)
    )
    assert (code, stdout) == (1, "") and len(stderr.splitlines()) == 1
    assert "--compile failed: " in stderr and "start a new run without --compile" in stderr
