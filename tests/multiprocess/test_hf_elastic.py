"""Hugging Face trainers in one elastic run, with real processes and no launcher: one is killed and comes back."""

from __future__ import annotations

import runpy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Processes, announce, free_port, values
from safetensors.torch import load_file
from test_own_loop import end_coordinator

import thinwire
from thinwire.elastic.coordinator_client import send_command
from thinwire.elastic.invitation import read_invitation
from thinwire.errors import DesyncError
from thinwire.training.summary import parameters_sha256
from thinwire.transport.loopback import LoopbackWorld
from thinwire.transport.secret import read_secret

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'thinwire[hf]'")

# From SLOW_STEP on, until the killed process is back, steps are slow: else the run would end without it.
STEPS, FIRST_STEP, SLOW_STEP, STEP_S, SLOW_S, LR = 160, 16, 40, 0.05, 1.0, 1e-2
EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "transformers_elastic.py"
METHOD = thinwire.methods.streaming_diloco(sync_interval=8, overlap_steps=2)


def make_trainer(folder: str, port: int, seed: int, *, steps: int = STEPS) -> Any:
    """Return a trainer of a tiny Llama, whose first values and data are those of a seed."""
    import datasets

    from thinwire.integrations.hf import DiLoCoTrainerMixin

    class Trainer(DiLoCoTrainerMixin, transformers.Trainer):  # type: ignore[misc]
        pass

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    tokens = torch.randint(0, 64, (64, 8)).tolist()
    args = transformers.TrainingArguments(
        output_dir=f"{folder}/out", max_steps=steps, per_device_train_batch_size=2, learning_rate=LR, logging_steps=4,
        save_strategy="steps", save_steps=STEPS, save_total_limit=1, report_to="none", use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    return Trainer(
        model=transformers.LlamaForCausalLM(config), args=args, method=METHOD, uri=f"127.0.0.1:{port}",
        train_dataset=datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens}),
        options={"replicas": 3, "folder": f"{folder}/run"},
    )  # fmt: skip


def train(folder: str, port: int, seed: int) -> dict[str, Any]:
    """Train; `killed` and `back` are files of the test."""
    torch.set_num_threads(1)
    killed, back = Path(folder, "killed"), Path(folder, "back")
    refused = []
    is_return = killed.exists()
    if is_return:  # first with other arguments, by mistake
        for other, checkpoint in ((make_trainer(folder, port, seed, steps=STEPS + 1), None), (None, "checkpoint-1")):
            with pytest.raises((DesyncError, ValueError)) as error:
                (other or make_trainer(folder, port, seed)).train(resume_from_checkpoint=checkpoint)
            refused.append(str(error.value))
    trainer = make_trainer(folder, port, seed)
    waits, rounds, steps = [0.0], [], []

    class Pace(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.stalled_s = trainer.diloco.statistics.stalled_s

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert state.global_step == trainer.diloco.steps_done
            steps.append(state.global_step)
            if killed.exists() and not back.exists():
                waits.append(trainer.diloco.statistics.stalled_s - self.stalled_s)
                rounds.append(trainer.diloco.statistics.rounds_applied)
            if is_return:
                back.touch()
            for step in (FIRST_STEP, SLOW_STEP):  # a replica that is behind may pass over any one
                if state.global_step >= step:
                    announce(f"past {step}")
            time.sleep(SLOW_S if state.global_step >= SLOW_STEP and not back.exists() else STEP_S)

    trainer.add_callback(Pace())
    trainer.train()
    trainer.save_model()
    saved = load_file(f"{trainer.args.output_dir}/model.safetensors")
    return {
        "sha256": parameters_sha256(trainer.model), "waited_s": max(waits),
        "refused": refused, "rounds": rounds[-1] - rounds[0] if rounds else 0, "steps": steps,
        "saved": all(torch.equal(saved[name], p) for name, p in trainer.model.named_parameters() if name in saved),
        "rates": [(line["step"], line["learning_rate"]) for line in trainer.state.log_history if "loss" in line],
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "mean_loss": trainer.state.log_history[-1]["train_loss"],
        "checkpoint": sorted(path.name for path in Path(f"{trainer.args.output_dir}/checkpoint-{STEPS}").iterdir()),
    }  # fmt: skip


def test_trainers_go_on_without_a_killed_one_and_it_comes_back_to_the_same_model(tmp_path: Path) -> None:
    port = free_port()

    def start(rank: int) -> Processes:
        arguments = {"folder": str(tmp_path), "port": port, "seed": rank}
        unset = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        environment = {**unset, "HF_HUB_OFFLINE": "1"}
        return Processes(
            train,
            num_ranks=4,
            ranks=[rank],
            arguments=arguments,
            environment=environment,
            imports=("datasets", "transformers.trainer"),
        )

    try:
        with start(0) as first, start(1) as second, start(2) as third:
            for rank, processes in enumerate((first, second, third)):  # any of them may have created the run
                processes.wait_for(f"past {FIRST_STEP}", rank=rank)
            first.kill(0)
            (tmp_path / "killed").touch()
            second.wait_for(f"past {SLOW_STEP}", rank=1)
            secret = read_secret(tmp_path / "run" / "secret")
            status = send_command(
                read_invitation(f"127.0.0.1:{port}"), secret=secret, deadline_s=30, verb="status", target=""
            )["status"]
            with start(3) as again:
                outcomes = values([*second.join(), *third.join(), *again.join()])
    finally:
        end_coordinator(tmp_path / "run")
    survivors, returned = outcomes[:2], outcomes[2]
    for one in survivors:
        assert one["rounds"] >= 2
        # nobody waits until the killed one is let go; how much longer than the grace depends on how busy the machine is
        assert one["waited_s"] < status["silence_s"] / 4
    assert len({one["sha256"] for one in outcomes}) == 1 and all(one["saved"] for one in outcomes)
    assert returned["steps"][0] > FIRST_STEP, "it begins at the step of the run"
    assert "the run ends at step 160, and this trainer at 161; give it the same max_steps" in returned["refused"][0]
    assert "resume_from_checkpoint does not go with an elastic run" in returned["refused"][1]
    for one in outcomes:
        assert one["steps"][-1] == STEPS
        # means over the steps that this trainer did itself: the loss of guessing is ln 64
        assert all(3.0 < loss < 4.5 for loss in (*one["losses"], one["mean_loss"]))
        for step, rate in one["rates"]:  # of the run's step, also in a process that came late or passed steps over
            assert rate == pytest.approx(LR * (1 - (step - 1) / STEPS))
        assert "model.safetensors" in one["checkpoint"] and "optimizer.pt" not in one["checkpoint"]


def test_the_file_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        trainer = runpy.run_path(str(EXAMPLE))["trainer"]
    finally:
        end_coordinator(tmp_path)
    assert trainer.state.global_step == trainer.diloco.steps_done == 40
    saved = load_file(tmp_path / "runs" / "elastic" / "replica-0" / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in trainer.model.named_parameters() if name in saved)


def test_a_trainer_without_a_way_to_the_others_or_a_last_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thinwire.integrations.hf import DiLoCoTrainerMixin

    class Trainer(DiLoCoTrainerMixin, transformers.Trainer):  # type: ignore[misc]
        pass

    monkeypatch.delenv("THINWIRE_JOIN", raising=False)
    with pytest.raises(ValueError, match=r"got neither transport nor uri; allowed one of them, or the variable THINW"):
        Trainer(method=METHOD)
    with pytest.raises(ValueError, match="uri does not go with transport"):
        Trainer(method=METHOD, uri="127.0.0.1:1", transport=LoopbackWorld(1).transports[0])
    with pytest.raises(ValueError, match=r"counts steps, not epochs; got max_steps=-1; .* try max_steps=1000"):
        make_trainer(str(tmp_path), 1, 0, steps=-1).train()
