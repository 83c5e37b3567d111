"""Fine-tuning in real processes: adapters alone travel, and runs start from what earlier ones saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from processes import free_port, run, values
from training_runs import DEADLINE_S, DOCUMENTS, as_rank, metrics

from tests.pretrained_models import write_llama_with_weights, write_tokenizer
from thinwire.codecs import by_name
from thinwire.inference import export_model, load_trained
from thinwire.sync.fragments import find_blocks
from thinwire.training.build import make_method
from thinwire.training.config import read_config
from thinwire.training.cost_check import count_rounds
from thinwire.workloads.language.workload import make_model, make_sampler, open_data

STEPS, INTERVAL, RANK = 24, 2, 128
SHARED = (  # noqa: SIM905 - the words as a user types them
    "--batch-size 1 --seq-len 16 --eval-every 0 --final-eval-batches 2 --log-every 1 --threads 1 --quiet --json "
    "--warmup-steps 0 --schedule constant --weight-decay 0"
).split()
ADAPTERS = f"--lora {RANK} --lr 1e-3 --sync-interval {INTERVAL} --overlap-steps 1"
# Name of a run: its options beside `SHARED`, with {inputs} for the folder of inputs and {runs} for that of the runs.
RUNS = {
    "lora": f"--model hf:{{inputs}}/model {ADAPTERS} --steps {STEPS} --checkpoint-every 0 --out {{runs}}/lora",
    "more": "--init-from {runs}/lora --steps 1 --lr 1e-9 --out {runs}/more",
}

# What the processes of both runs need, and which takes seconds to load.
LOADED_ONCE = ("peft", "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a pretrained model, a text and the finished runs."""
    folder = tmp_path_factory.mktemp("fine-tuning")
    (folder / "text.txt").write_text(" ".join(DOCUMENTS))
    sizes = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    write_tokenizer(write_llama_with_weights(folder / "model", **sizes), texts=DOCUMENTS)
    data = ["--data", str(folder / "text.txt"), "--cache-dir", str(folder / ".cache")]
    # one after the other: both ranks of the second run read what rank 0 of the first one writes last
    for name, words in RUNS.items():
        line = [*SHARED, *data, *words.format(inputs=folder, runs=folder).split()]
        arguments = {"lines": [line], "ports": [free_port()]}
        outcomes = run(as_rank, num_ranks=2, arguments=arguments, deadline_s=DEADLINE_S, imports=LOADED_ONCE)
        for ((code, _, stderr),) in values(outcomes):
            assert code == 0, f"{name}: {stderr}"
    return folder


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def first_loss(run: Path) -> float:
    return next(float(line["loss"]) for line in metrics(run, 0) if line["kind"] == "step")


def sent_bytes(run: Path, replica: int) -> int:
    """Return all bytes that the transport of a replica counted, start and end of the run included."""
    lines = (run / f"transfers-replica-{replica}.jsonl").read_text().splitlines()
    return sum(found["wire_bytes"] for found in map(json.loads, lines) if found["direction"] == "sent")


def test_what_is_sent_is_the_adapters_and_at_most_a_tenth_more(folder: Path) -> None:
    config = read_config(folder / "lora")
    model, method = make_model(config, vocab_size=None, device="meta"), make_method(config)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    fragments = method.view.fragments.partition(find_blocks(model))  # type: ignore[attr-defined]
    rounds = count_rounds(method.schedule, num_fragments=len(fragments), num_steps=STEPS)
    sizes = [sum(trained[name] for name in names) for names in fragments]
    # between two replicas each sends its part once a round; one round more of each fragment ends the run
    adapters_bytes = sum(
        by_name("e3m0").payload_bytes(size) * (rounds[0, fragment] + 1) for fragment, size in enumerate(sizes)
    )
    assert sum(sizes) == sum(trained.values()) == summary(folder / "lora")["parameters"]
    for replica in range(2):
        assert adapters_bytes <= sent_bytes(folder / "lora", replica) <= 1.1 * adapters_bytes
    # sending what is frozen at the start would show
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert sent_bytes(folder / "lora", 0) + 4 * frozen > 1.1 * adapters_bytes


def test_training_begins_at_the_loss_of_the_pretrained_model(folder: Path) -> None:
    config = read_config(folder / "lora")
    tokens, targets = next(make_sampler(config, open_data(config), replica=0))
    windows = torch.cat([tokens, targets[:, -1:]], dim=1)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    expected = plain(input_ids=windows, labels=windows).loss.item()
    assert first_loss(folder / "lora") == pytest.approx(expected, abs=1e-5)


def test_the_adapters_learn_and_the_merged_model_is_the_base_with_them(folder: Path) -> None:
    losses = [float(line["loss"]) for line in metrics(folder / "lora", 0) if line["kind"] == "step"]
    assert sum(losses[-6:]) / 6 < sum(losses[:6]) / 6 - 0.1
    base, merged = (
        transformers.AutoModelForCausalLM.from_pretrained(place) for place in (folder / "model", folder / "lora/model")
    )
    tokens = torch.arange(3, 19)[None]
    expected = merged(tokens).logits
    assert (base(tokens).logits - expected).abs().max() > 1e-3
    import peft  # takes seconds, which each worker that collects would spend

    adapted = peft.PeftModel.from_pretrained(base, folder / "lora" / "adapters")
    # logits of about 10, in float32
    torch.testing.assert_close(adapted(tokens).logits, expected, rtol=0, atol=1e-4)


def test_checkpoints_leave_the_frozen_weights_out(folder: Path) -> None:
    (newest,) = (folder / "lora" / "checkpoints").glob("step-*")
    written = b"".join(file.read_bytes() for file in newest.iterdir())
    assert b"q_proj.lora_A.default.weight" in written and b"q_proj.base_layer.weight" not in written


def test_a_checkpoint_of_adapters_is_exported_merged_with_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    trained = load_trained(folder / "lora", step=STEPS)
    tokens = torch.arange(3, 19)[None]
    expected = trained.model(tokens).detach()
    export_model(trained, tmp_path / "out", to="hf")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(plain(tokens).logits, expected, rtol=0, atol=1e-4)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "</s>"
    # the result of the run has done the final exchange too
    assert load_trained(folder / "lora").tokenizer.to_json() == trained.tokenizer.to_json()


def test_a_run_starts_from_an_earlier_one_with_its_tokenizer(folder: Path) -> None:
    # nothing is learnt at such a rate, so both end with the same loss on the same held-out text
    assert summary(folder / "more")["val_loss"] == pytest.approx(summary(folder / "lora")["val_loss"], abs=1e-4)
    config = read_config(folder / "more")
    assert open_data(config).tokenizer.to_json() == open_data(read_config(folder / "lora")).tokenizer.to_json()
    assert config.model.lora is None and config.model.seq_len == 16
