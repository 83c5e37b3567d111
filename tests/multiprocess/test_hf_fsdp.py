"""A Trainer whose replica is two ranks with FSDP: four real ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run, values
from safetensors.torch import load_file

import thinwire
from thinwire.transport.connect import connect

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'thinwire[hf]'")


def digest(state: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode() + state[name].detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def rank(folder: str) -> dict[str, Any]:
    import datasets

    from thinwire.integrations.data import split_dataset
    from thinwire.integrations.hf import DiLoCoTrainerMixin

    class Trainer(DiLoCoTrainerMixin, transformers.Trainer):  # type: ignore[misc]
        pass

    torch.set_num_threads(1)
    transport = connect(solo=True, ranks_per_replica=2)
    tokens = torch.randint(3, 300, (64, 8), generator=torch.Generator().manual_seed(5)).tolist()
    share = split_dataset(datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens}), transport, equal=True)

    model = transformers.AutoModelForCausalLM.from_pretrained(
        f"{folder}/model", distributed_config=transformers.distributed.DistributedConfig(fsdp_size=2)
    )
    args = transformers.TrainingArguments(
        f"{folder}/run", max_steps=8, per_device_train_batch_size=2, learning_rate=1e-2, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=args, train_dataset=share, transport=transport,
        method=thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=2),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    torch.distributed.barrier()
    found = {
        "hash": digest(load_file(f"{folder}/run/replica-{transport.replica}/model.safetensors")),
        "start": digest(load_file(f"{folder}/model/model.safetensors")),
        "sent": transport.log.totals("sent").wire_bytes, "ranks": torch.distributed.get_world_size(),
        "sharded": sum(hasattr(parameter, "placements") for parameter in model.parameters()),
    }  # fmt: skip
    transport.close()
    return found


def test_replicas_of_two_ranks_save_the_same_model(tmp_path: Path) -> None:
    from tests.pretrained_models import write_llama_with_weights  # not there in a rank

    write_llama_with_weights(tmp_path / "model")
    arguments = {"folder": str(tmp_path)}
    loaded = ("accelerate", "datasets", "transformers.trainer")
    found = values(run(rank, num_ranks=4, arguments=arguments, imports=loaded))
    assert len({one["hash"] for one in found}) == 1
    assert found[0]["hash"] != found[0]["start"]
    assert [one["ranks"] for one in found] == [2, 2, 2, 2], "torch sees the ranks of one replica"
    assert all(one["sent"] > 0 and one["sharded"] > 0 for one in found)
