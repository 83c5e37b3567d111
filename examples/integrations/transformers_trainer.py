"""A transformers Trainer as one replica of several.

torchrun --nproc-per-node 2 transformers_trainer.py
"""

import datasets
import torch
import transformers

import thinwire
from thinwire.integrations.data import split_dataset
from thinwire.integrations.hf import DiLoCoTrainerMixin


class Trainer(DiLoCoTrainerMixin, transformers.Trainer):
    """The trainer, with thinwire's optimizer."""


transport = thinwire.connect(solo=True)  # before TrainingArguments

model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
)
tokens = torch.randint(0, 64, (64, 16)).tolist()
dataset = datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens})
trainer = Trainer(
    model=model,
    args=transformers.TrainingArguments(
        "runs/trainer", max_steps=12, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True
    ),
    train_dataset=split_dataset(dataset, transport, equal=True),
    method=thinwire.methods.streaming_diloco(sync_interval=4, overlap_steps=1),
    transport=transport,
)
trainer.train()  # ends with the final exchange
trainer.save_model()  # runs/trainer/replica-N: the same on all replicas
transport.close()
