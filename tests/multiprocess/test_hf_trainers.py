"""Hugging Face trainers on two real ranks: training, resuming, adapters, and a plain accelerate loop."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from processes import Outcome, run, values
from safetensors.torch import load_file
from torch import nn

import thinwire
from thinwire.compat import group_operators, intercept
from thinwire.errors import DesyncError
from thinwire.transport.loopback import LoopbackWorld
from thinwire.transport.secret import make_secret

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'thinwire[hf]'")

HAS_TRL = importlib.util.find_spec("trl") is not None
STEPS, SAVE_AT = 12, 5
TEXTS = [f"line {number}: the quick brown fox jumps over {number * 7} lazy dogs" for number in range(64)]


def digest(state: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode() + state[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def rows(transport: thinwire.RecordingTransport) -> Any:
    """Return this replica's share: 8 tokens a row, all different between replicas."""
    import datasets

    from thinwire.integrations.data import split_dataset

    tokens = torch.randint(3, 300, (64, 8), generator=torch.Generator().manual_seed(5)).tolist()
    whole = datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens})
    return split_dataset(whole, transport, equal=True)


def arguments(folder: Path, **more: Any) -> Any:
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 2,
        "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "dataloader_pin_memory": False, **more,
    }  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(folder), **settings)


def two_runs(transport: thinwire.RecordingTransport, folder: Path) -> dict[str, Any]:
    """Train to the end, then resume from a checkpoint with rounds in flight, and train to the end again."""
    from thinwire.integrations.hf import LOCAL_FILE, DiLoCoTrainerMixin

    class Trainer(DiLoCoTrainerMixin, transformers.Trainer):  # type: ignore[misc]
        pass

    method = thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=2)
    share, found = rows(transport), {}
    for name in ("whole", "resumed"):
        args = arguments(
            folder / "whole", save_strategy="steps", save_steps=SAVE_AT, eval_strategy="steps", eval_steps=6,
            report_to="tensorboard" if name == "whole" else "none",
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
        trainer = Trainer(
            model=model, args=args, train_dataset=share, eval_dataset=rows(LoopbackWorld(1).transports[0]),
            method=method, transport=transport,
        )  # fmt: skip
        checkpoint = folder / "whole" / f"replica-{transport.replica}" / f"checkpoint-{SAVE_AT}"
        one_for_all = str(folder / "whole" / "replica-0" / checkpoint.name)  # one command line for all ranks
        trainer.train(resume_from_checkpoint=one_for_all if name == "resumed" else None)
        trainer.save_model()
        found[name] = digest(dict(model.named_parameters()))
        if name == "whole":
            saved = load_file(folder / "whole" / f"replica-{transport.replica}" / "model.safetensors")
            found["saved"] = digest({n: p for n, p in model.named_parameters() if n in saved}) == digest(saved)
            found["checkpoint"] = digest(load_file(checkpoint / "model.safetensors"))
            found["run"] = [trainer.args.run_name, os.environ.get("WANDB_RUN_GROUP")]
            with mock.patch.object(transformers.Trainer, "push_to_hub", lambda self: "uploaded"):
                found["pushed"] = trainer.push_to_hub()
            found["local"] = digest(load_file(checkpoint / LOCAL_FILE))
            found["log"] = [line for line in trainer.state.log_history if "loss" in line]
            found["eval_loss"] = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    return found


def disagreeing(transport: thinwire.RecordingTransport, folder: Path) -> str:
    """Let the replicas plan different numbers of steps."""
    from thinwire.integrations.hf import DiLoCoTrainerMixin

    class Trainer(DiLoCoTrainerMixin, transformers.Trainer):  # type: ignore[misc]
        pass

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    args = arguments(folder / "other", max_steps=3 + transport.replica)
    trainer = Trainer(model=model, args=args, train_dataset=rows(transport), method="diloco", transport=transport)
    with pytest.raises(DesyncError) as refused:
        trainer.train()
    return str(refused.value)


def sft(transport: thinwire.RecordingTransport, folder: Path) -> dict[str, Any]:
    """Fine-tune adapters that each replica seeds differently with TRL's trainer."""
    import datasets
    import peft
    import trl

    from thinwire.integrations.data import split_dataset
    from thinwire.integrations.hf import DiLoCoTrainerMixin

    class Trainer(DiLoCoTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
        pass

    torch.manual_seed(100 + transport.replica)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    args = trl.SFTConfig(
        output_dir=str(folder / "sft"), max_steps=4, per_device_train_batch_size=2, logging_steps=1, max_length=16,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, bf16=False,
        gradient_checkpointing=False, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=args, processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
        train_dataset=split_dataset(datasets.Dataset.from_dict({"text": TEXTS}), transport, equal=True),
        method=thinwire.methods.diloco(sync_interval=2), transport=transport,
    )  # fmt: skip
    before = transport.log.totals("sent").wire_bytes
    trainer.train()
    sent = transport.log.totals("sent").wire_bytes - before
    trainer.save_model()
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saved = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(folder / "model"), trainer.args.output_dir
    )
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad():
        model.eval()
        apart = (saved.merge_and_unload()(tokens).logits - model(tokens).logits).abs().max().item()
    return {
        "hash": digest(adapters), "sent": sent, "apart": apart,
        "adapters": sum(p.numel() for p in adapters.values()), "all": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip


def accelerated(transport: thinwire.RecordingTransport) -> dict[str, Any]:
    """Train in a plain accelerate loop, and in the same loop without accelerate."""
    import accelerate

    def train(prepare: Any) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        method = thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=1)
        optimizer = thinwire.DistributedOptimizer(model, inner, method=method, transport=transport)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        points = torch.randn(20, 4, 8, generator=torch.Generator().manual_seed(transport.replica))
        loader = torch.utils.data.DataLoader(points, batch_size=None)
        accelerator, (wrapped, stepper, batches, decay) = prepare(model, optimizer, loader, schedule)
        for batch in batches:
            loss = wrapped(batch).pow(2).mean()
            accelerator.backward(loss) if accelerator else loss.backward()
            stepper.step()
            decay.step()
            stepper.zero_grad()
        optimizer.close(final_exchange=True)
        with optimizer.global_parameters():
            return digest(dict(model.named_parameters()))

    accelerator = accelerate.Accelerator(cpu=True)
    return {
        "accelerate": train(lambda *parts: (accelerator, accelerator.prepare(*parts))),
        "bare": train(lambda *parts: (None, parts)), "processes": accelerator.num_processes,
    }  # fmt: skip


def rank(folder: str, secret: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    transport = thinwire.connect(solo=True, secret=Path(secret), address="127.0.0.1")
    counts: list[str] = []

    def count(name: str, _: Any, go_on: Any) -> Any:
        counts.append(name)
        return go_on()

    stop = intercept(sorted(group_operators()), count)
    found = {
        "trainer": two_runs(transport, Path(folder)), "sft": sft(transport, Path(folder)) if HAS_TRL else None,
        "accelerate": accelerated(transport), "disagreeing": disagreeing(transport, Path(folder)),
    }  # fmt: skip
    stop()
    transport.close()
    return {**found, "collectives": counts, "has_group": torch.distributed.is_initialized()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.pretrained_models import write_llama_with_weights, write_tokenizer  # not there in a rank

    folder = tmp_path_factory.mktemp("hf")
    write_tokenizer(write_llama_with_weights(folder / "model"), texts=TEXTS)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """Return what both ranks found."""
    make_secret(folder / "secret")
    outcomes: list[Outcome] = run(
        rank, num_ranks=2, arguments={"folder": str(folder), "secret": str(folder / "secret")}, deadline_s=240,
        imports=("accelerate", "datasets", "transformers.trainer", "trl"), environment={"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    return values(outcomes)


def test_no_collective_of_torch_runs_while_training(found: list[dict[str, Any]]) -> None:
    assert [one["collectives"] for one in found] == [[], []]
    assert [one["has_group"] for one in found] == [False, False]


def test_a_resumed_training_ends_with_the_hash_of_the_uninterrupted_one(found: list[dict[str, Any]]) -> None:
    first, second = (one["trainer"] for one in found)
    assert first["whole"] == second["whole"] == first["resumed"] == second["resumed"]
    assert first["local"] != first["checkpoint"] and first["local"] != second["local"]


def test_replicas_that_plan_different_numbers_of_steps_are_refused(found: list[dict[str, Any]]) -> None:
    assert "replica 0 plans 3 steps, the mean over the replicas is 3.5" in found[0]["disagreeing"]
    assert "replica 1 plans 4 steps" in found[1]["disagreeing"]


def test_every_replica_saves_the_same_global_model(found: list[dict[str, Any]]) -> None:
    first, second = (one["trainer"] for one in found)
    assert first["saved"] and second["saved"]
    assert first["checkpoint"] == second["checkpoint"] != first["whole"]


def test_the_evaluation_is_that_of_the_global_parameters(found: list[dict[str, Any]]) -> None:
    first, second = (one["trainer"]["eval_loss"] for one in found)
    assert first == second and len(first) == STEPS // 6


def test_thinwire_numbers_go_where_the_trainer_reports(found: list[dict[str, Any]], folder: Path) -> None:
    last = found[0]["trainer"]["log"][-1]
    assert last["thinwire/rounds_applied"] > 0 and last["thinwire/sent_bytes"] > 0 and last["step"] == STEPS
    events = list((folder / "whole" / "replica-0").rglob("events.out.tfevents.*"))
    assert any(b"thinwire/sent_bytes" in path.read_bytes() for path in events)


@pytest.mark.skipif(not HAS_TRL, reason="trl is not installed; install it with: pip install 'thinwire[trl]'")
def test_adapters_with_different_seeds_become_one_and_only_they_travel(found: list[dict[str, Any]]) -> None:
    first, second = (one["sft"] for one in found)
    assert first["hash"] == second["hash"]
    assert max(first["apart"], second["apart"]) < 1e-4, "the saved adapters, merged, are the trained model"
    # the start, rounds of 2 steps and the final exchange: each adapter in 4 bytes at most, beside small messages
    assert max(first["sent"], second["sent"]) < 4.4 * 4 * first["adapters"] + 8192


def test_a_loop_of_accelerate_trains_the_bits_of_the_bare_loop(found: list[dict[str, Any]]) -> None:
    first, second = (one["accelerate"] for one in found)
    assert first["processes"] == second["processes"] == 1
    assert len({first["accelerate"], first["bare"], second["accelerate"], second["bare"]}) == 1


def test_one_replica_uploads_and_all_report_to_one_group(found: list[dict[str, Any]]) -> None:
    assert [one["trainer"]["pushed"] for one in found] == ["uploaded", None]
    assert [one["trainer"]["run"] for one in found] == [[f"whole-replica-{replica}", "whole"] for replica in (0, 1)]
