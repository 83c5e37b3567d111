"""`thinwire run`: scripts without a line of thinwire train as replicas, end equal, and resume to the same bits."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from live_processes import DEADLINE_S
from safetensors.torch import load_file

from thinwire.cli.argument_parsing import options_of
from thinwire.cli.main import main
from thinwire.cli.run import ScriptOptions

NEEDS_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install 'thinwire[hf]'"
)
# A loop of Accelerate, and trainers of Lightning and transformers: each whole, then again from a checkpoint. That
# of transformers is stopped by an error first.
SCRIPT = """
import hashlib
import sys

import accelerate
import datasets
import lightning
import torch
import transformers
from torch.utils.data import DataLoader


def digest(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


order = torch.Generator()  # Lightning's checkpoints hold no generator


def loaders(generator=None):
    points = torch.randn(65, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(points, batch_size=4, shuffle=True, generator=generator), DataLoader(points[:6], batch_size=4)


def accelerated(checkpoint=None):
    accelerator = accelerate.Accelerator(cpu=True)
    accelerate.utils.set_seed(3)
    model = torch.nn.Linear(8, 4)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, optimizer, batches, evaluated, schedule = accelerator.prepare(
        model, inner, *loaders(), torch.optim.lr_scheduler.LinearLR(inner, total_iters=24))
    if checkpoint:
        accelerator.load_state(checkpoint)
    for epoch in range(1 if checkpoint else 0, 3):
        for batch in batches:
            accelerator.backward(prepared(batch).pow(2).mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accelerator.save_state(f"states/epoch_{epoch}")
    print("evaluated", sum(len(batch) for batch in evaluated), "rate", schedule.get_last_lr()[0])
    accelerator.save_model(prepared, "accelerated")
    accelerator.end_training()
    return digest(model)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 4)

    def training_step(self, batch):
        return self.net(batch).pow(2).mean()

    def on_train_epoch_end(self):
        order.manual_seed(self.current_epoch + 1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def by_lightning(checkpoint=None):
    lightning.seed_everything(1)
    module = Module()
    callback = lightning.pytorch.callbacks.ModelCheckpoint(save_top_k=-1)
    trainer = lightning.Trainer(
        strategy="ddp", accelerator="cpu", max_epochs=3, enable_progress_bar=False, enable_model_summary=False,
        logger=False, default_root_dir="light", callbacks=[callback])
    order.manual_seed(1 if checkpoint else 0)
    trainer.fit(module, loaders(order)[0], ckpt_path=checkpoint)
    return digest(module)


print("accelerate", accelerated(), accelerated("states/epoch_0"))
print("lightning", by_lightning(), by_lightning("light/replica-0/checkpoints/epoch=0-step=8.ckpt"))

class Stop(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 8:
            raise InterruptedError


def train(callbacks=(), checkpoint=None, **more):
    args = transformers.TrainingArguments(
        sys.argv[1], max_steps=12, per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True, save_steps=4,
        learning_rate=1e-2, report_to="tensorboard", push_to_hub=False, **more)
    transformers.set_seed(args.seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    tokens = torch.randint(0, 64, (65, 16)).tolist()
    data = datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens})
    trainer = transformers.Trainer(
        model=transformers.LlamaForCausalLM(config), args=args, train_dataset=data, callbacks=list(callbacks))
    trainer.remove_callback(transformers.integrations.TensorBoardCallback)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except InterruptedError:
        return
    trainer.save_model(args.output_dir + "/" + str(checkpoint is not None))
    print("trackers:", args.report_to, "examples:", len(trainer.train_dataset))


train()
train([Stop()])
train(checkpoint=sys.argv[1] + "/replica-0/checkpoint-8")
"""


def run(*words: str, at: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thinwire.cli.main", "run", *words]
    return subprocess.run(command, cwd=at, capture_output=True, text=True, timeout=10 * DEADLINE_S, check=False)


def test_the_options_are_those_that_were_agreed_on() -> None:
    options = [option.flag for option in options_of(ScriptOptions).values() if not option.is_positional]
    frozen = (Path(__file__).parents[1] / "cli" / "options_of_run.txt").read_text().splitlines()
    assert sorted(options) == sorted(frozen), "an option is a promise: change options_of_run.txt and CHANGELOG.md too"


@NEEDS_TRANSFORMERS
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning: 'thinwire[lightning]'")
def test_unmodified_loops_end_equal_and_resume_to_the_bits_of_the_whole_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    found = run("--replicas", "2", "--method-option", "sync_interval=5", "--explain", "train.py", "out", at=tmp_path)
    assert found.returncode == 0, found.stderr
    other = (tmp_path / "runs/train/replica-1.log").read_text()
    for text in (found.stdout, other):
        for name in ("accelerate", "lightning"):
            whole, resumed = re.findall(rf"^{name} (\w{{64}}) (\w{{64}})$", text, re.MULTILINE)[0]
            assert whole == resumed
            assert whole in found.stdout, "the other replica ends with the same"
        assert "evaluated 6" in text, "what does not shuffle is not shared"
        rate = float(re.findall(r"rate ([\d.e-]+)", text)[0])
        assert rate == pytest.approx(1e-2), "the schedule ends with the replica's 24 steps"
    models = [path.read_bytes() for path in sorted((tmp_path / "out").glob("replica-*/*/model.safetensors"))
              if "checkpoint" not in str(path)]  # fmt: skip
    assert len(models) == 4 and len({hashlib.sha256(model).hexdigest() for model in models}) == 1
    assert "trackers: ['tensorboard'] examples: 32" in found.stdout and "trackers: [] examples: 32" in other
    lines = [line.removeprefix("thinwire run: ") for line in found.stderr.splitlines() if "thinwire run: " in line]
    assert [line.partition(":")[0] for line in lines[1:5]] == ["loop", "data", "files", "start"]
    assert lines[2] == "data: 32 of 65 examples of a loader"
    assert "changed accelerate.accelerator.Accelerator.prepare" in lines
    assert re.fullmatch(r"sent: [\d,]+ bytes each; collectives of other libraries: 0", lines[-1])
    assert re.fullmatch(r"2 replicas ended equal after 128 steps, sha256 \w{16}", lines[-2])
    assert len(list((tmp_path / "states").glob("epoch_*/replica-*"))) == 6
    final = load_file(tmp_path / "runs/train/model.safetensors")
    joined = hashlib.sha256(b"".join(final[name].numpy().tobytes() for name in ("weight", "bias"))).hexdigest()
    assert f"accelerate {joined}" in found.stdout


def test_a_loop_of_its_own_is_refused_at_its_first_step(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("import torch\np = torch.nn.Linear(2, 2)\no = torch.optim.SGD(p.parameters())\n"
                      "p(torch.ones(2)).sum().backward()\no.step()\nprint('has stepped')\n")  # fmt: skip
    found = run("--replicas", "1", "own.py", at=tmp_path)
    assert (found.returncode, "has stepped" in found.stdout) == (2, False)
    assert "an optimizer (SGD) that thinwire has not joined" in found.stderr
    assert "docs/use-in-scripts.md#your-own-loop" in found.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--replicas 2", "nothing to run; got no TARGET"),
        ("--replicas 2 missing.py", "nothing of that name can be run; got missing.py"),
        ("--replicas 2 -m no_such_module x", "no such module; got no_such_module"),
        ("--replicas 0 -m json", "--replicas is out of its range; got 0"),
        ("-m json", "one process alone is no replica of several"),
        ("--replicas 2 --method streming -m json", "unknown method; got 'streming'"),
    ],
)
def test_a_wrong_command_line_is_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words.split()]) == 2
    assert message in capsys.readouterr().err
