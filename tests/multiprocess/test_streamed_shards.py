"""Streamed backward of models that FSDP2 shards over two real processes, at every stage of ZeRO."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from processes import run, values
from training_runs import DOCUMENTS, OPTIONS, Started, finish, result

import thinwire
from thinwire.workloads.language.presets import TransformerConfig
from thinwire.workloads.language.transformer import build_transformer

pytestmark = pytest.mark.multiprocess

# Stage 1 sums gradients once in two passes, 2 after each of them, and 3 frees the parameters too.
STAGES = (1, 2, 3)


def make(kind: str) -> tuple[Any, list[Any]]:
    if kind == "decoder":
        shape = TransformerConfig(vocab_size=31, dim=12, layers=2, heads=3, max_seq_len=16, tied_head=False)
        own = build_transformer(shape, seed=1).double()
        return own, list(own.blocks)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).double()
    return model, list(model.model.layers)


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    if hasattr(model, "loss_function"):
        found: torch.Tensor = model(input_ids=rows, labels=rows).loss
        return found
    loss: torch.Tensor = model.loss(rows, rows)[0]
    return loss


def batch() -> torch.Tensor:
    return torch.randint(0, 31, (4, 11), generator=torch.Generator().manual_seed(2))


def largest_error(kind: str, is_late: bool) -> list[float]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    found = []
    plain, _ = make(kind)
    for rows in batch().split(1):
        (loss_of(plain, rows) / 4).backward()
    scale = max(float(one.grad.abs().max()) for one in plain.parameters())
    own_rows = batch().split(1)[dist.get_rank() :: 2]
    for stage in STAGES:
        model, layers = make(kind)
        if not is_late:
            thinwire.streamed(model, chunks=3)
        for layer in layers:
            fully_shard(layer, reshard_after_forward=stage == 3)
        fully_shard(model, reshard_after_forward=stage == 3)
        if is_late:
            thinwire.streamed(model, chunks=3)
        for number, rows in enumerate(own_rows):
            model.set_requires_gradient_sync(stage > 1 or number == 1)
            (loss_of(model, rows) / 2).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        found.append(max(float((one.grad.full_tensor() - other.grad).abs().max()) for one, other in pairs) / scale)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("kind", "is_late", "limit"), [("decoder", False, 1e-12), ("transformers", True, 3e-7)])
def test_gradients_of_shards_are_those_of_one_process(kind: str, is_late: bool, limit: float) -> None:
    outcomes = run(largest_error, num_ranks=2, arguments={"kind": kind, "is_late": is_late})
    for errors in values(outcomes):
        assert len(errors) == len(STAGES) and max(errors) < limit


@pytest.mark.parametrize(
    ("cut", "chunks", "ranks"),
    [("--dp-shard 2 --zero-stage 3 --sequences documents", 5, 2), ("--cp 4", 4, 4)], ids=["shards", "shared sequences"],
)  # fmt: skip
def test_a_streamed_run_learns_what_the_usual_one_does_and_resumes_to_the_bit(
    tmp_path: Path, cut: str, chunks: int, ranks: int
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    place = OPTIONS.index("--batch-size")
    words = [*OPTIONS[:place], *OPTIONS[place + 2 :], "--batch-size", "2", "--replicas", "1", "--steps", "8",
             "--data", str(tmp_path / "rows.jsonl"), "--cache-dir", str(tmp_path / ".cache"),
             "--no-samples"]  # fmt: skip
    usual = finish(Started([*words, *(cut.split() if ranks == 2 else ()), "--out", str(tmp_path / "usual")]))
    out = tmp_path / "run"
    streamed = finish(Started([*words, *cut.split(), "--stream-backward", str(chunks), "--out", str(out)]))
    assert result(streamed)["val_loss"] == pytest.approx(result(usual)["val_loss"], abs=1e-4)
    for folder in (out, *(out / "ranks" / str(rank) for rank in range(1, ranks))):
        shutil.rmtree(folder / "checkpoints" / "step-00000008")
    (out / "summary.json").unlink()
    resumed = finish(Started(["--resume", str(out), "--quiet", "--json"]))
    assert result(resumed)["global_parameters_sha256"] == result(streamed)["global_parameters_sha256"]
