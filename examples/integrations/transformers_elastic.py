"""A transformers Trainer that joins and leaves an elastic run.

python transformers_elastic.py  # as often as you like, at any time
"""

import datasets
import torch
import transformers

import thinwire
from thinwire.integrations.hf import DiLoCoTrainerMixin


class Trainer(DiLoCoTrainerMixin, transformers.Trainer):
    """The trainer, with thinwire's optimizer."""


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
        "runs/elastic", max_steps=40, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True
    ),
    train_dataset=dataset.shuffle(),  # another order in each process
    method=thinwire.methods.streaming_diloco(sync_interval=10, overlap_steps=2),
    uri="127.0.0.1:29420",
)
trainer.train()  # ends at step 40 of the run, with the final exchange
trainer.save_model()  # runs/elastic/replica-N: the same on all replicas
