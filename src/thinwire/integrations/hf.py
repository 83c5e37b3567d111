"""Hugging Face Trainers over thin wires: a mixin for transformers' `Trainer` and its subclasses, such as TRL's.

The trainer sees one process, since `thinwire.connect(solo=True)` hides the launcher's variables: it wraps the model in
nothing, gathers nothing, and saves on every replica. Only thinwire's own messages travel.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from thinwire.errors import CheckpointError, DesyncError, MissingExtra, refusal
from thinwire.integrations.tracking import metrics
from thinwire.sync.method import Method
from thinwire.sync.optimizer import DistributedOptimizer, average_tensors
from thinwire.transport.base import Transport

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtra.of("transformers", extra="hf") from error

# What the tests have passed with; other versions are not refused, only untried.
TRIED_VERSIONS = {"transformers": "5.23", "trl": "1.16", "peft": "0.21", "accelerate": "1.15"}
# The local parameters of a replica, beside the global ones in `model.safetensors`.
LOCAL_FILE = "local_parameters.safetensors"
# Above the numbers that `average_buffers` counts from 0.
_NUMBER_OF_STEPS_CHECK = 1 << 40


class DiLoCoTrainerMixin:
    """Train with any `transformers.Trainer` as one replica of several; name it before the trainer's class.

    The optimizer that the trainer makes, or is given as `optimizers=`, is wrapped in a `DistributedOptimizer`. The
    last step ends with the final exchange. Evaluation, prediction, `save_model` and the model in each checkpoint use
    the global parameters, so every replica saves the same model. Each replica writes its own checkpoints, to
    `output_dir/replica-N` if there are several.

    Args:
        *args: For the trainer.
        method: The method, or its name: see `thinwire.methods`.
        transport: Joins the replicas: `thinwire.connect(solo=True)`, called before `TrainingArguments` is made.
        options: Further arguments of `DistributedOptimizer`, by name.
        **kwargs: For the trainer.

    Raises:
        ValueError: The trainer sees several processes or several GPUs.

    Example:
        ```python
        class Trainer(DiLoCoTrainerMixin, transformers.Trainer):
            pass


        transport = thinwire.connect(solo=True)
        trainer = Trainer(model=model, args=args, train_dataset=own_share, method="iso-loco", transport=transport)
        trainer.train()
        ```
    """

    model: Any
    args: Any
    optimizer: Any
    state: Any
    is_fsdp_enabled: bool

    def __init__(
        self, *args: Any, method: Method | str, transport: Transport, options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        self.transport = transport
        self.diloco: DistributedOptimizer | None = None
        self._method, self._options = method, dict(options or {})
        self._is_finished = False
        super().__init__(*args, **kwargs)
        self._check_is_alone()
        if transport.num_replicas > 1:
            self.args = copy.copy(self.args)
            self.args.output_dir = str(Path(self.args.output_dir) / f"replica-{transport.replica}")
        self.add_callback(_FinalExchange(self))  # type: ignore[attr-defined]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Wrap the trainer's optimizer; once a training."""
        if self.diloco is not None and self._is_finished:
            self.diloco = self.optimizer = None
        inner = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if self.diloco is None:
            self.diloco = self.optimizer = DistributedOptimizer(
                self.model, inner, method=self._method, transport=self.transport, **self._options
            )
            self._is_finished = False
        return self.diloco

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and end with the final exchange; after an exception, without any exchange."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            if self.diloco is not None:
                self.diloco.abandon()
            raise

    def finish(self) -> None:
        """Exchange the last steps and keep the global parameters in the model; the trainer calls it by itself."""
        if self.diloco is None or self._is_finished:
            return
        self.diloco.close(final_exchange=True)
        with self.diloco.global_parameters():
            kept = {name: p.detach().clone() for name, p in self._trained()}
        with torch.no_grad():
            for name, parameter in self._trained():
                parameter.copy_(kept[name])
        self._is_finished = True

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict with the global parameters."""
        with self._global_parameters():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the global parameters, the same on all replicas."""
        with self._global_parameters():
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log thinwire's numbers beside the trainer's own, wherever `report_to` sends them."""
        if self.diloco is not None and "loss" in logs:
            logs = logs | {f"thinwire/{name}": value for name, value in metrics(self.diloco).items() if name != "step"}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def check_number_of_steps(self) -> None:
        """Compare the number of steps that the replicas plan: they must all take part in every round.

        Raises:
            DesyncError: Another replica plans another number.
        """
        if self.transport.num_replicas == 1:
            return
        number = torch.tensor([own := float(self.state.max_steps)])
        average_tensors([number], transport=self.transport, number=_NUMBER_OF_STEPS_CHECK, deadline_s=300.0)
        if number[0].item() != own:
            raise DesyncError(
                f"replica {self.transport.replica} plans {own:.0f} steps, the mean over the replicas is "
                f"{number[0].item():g}; give all the same max_steps, or shares of one size "
                f"(thinwire.integrations.data.split_dataset)"
            )

    def _load_best_model(self) -> None:
        self.finish()  # what is loaded next must not be averaged with the last steps
        super()._load_best_model()  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if not self._is_finished:
            local = {name: parameter.detach().contiguous() for name, parameter in self._trained()}
            save_file(local, Path(output_dir) / LOCAL_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None or not (Path(checkpoint) / LOCAL_FILE).exists():
            return  # a checkpoint of a finished training: local and global parameters are the same
        local, trained = load_file(Path(checkpoint) / LOCAL_FILE), dict(self._trained())
        if set(local) != set(trained):
            raise CheckpointError(
                f"{checkpoint}/{LOCAL_FILE} holds {len(local)} parameters, the model trains {len(trained)}; resume "
                f"with the same model"
            )
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(local[name])

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    @contextmanager
    def _global_parameters(self) -> Iterator[None]:
        if self.diloco is None or self._is_finished:
            yield
            return
        with self.diloco.global_parameters(may_lag=True):
            yield

    def _check_is_alone(self) -> None:
        ranks = getattr(getattr(self.transport, "inner", self.transport), "ranks_per_replica", 1)
        if self.args.world_size != ranks:
            raise refusal(
                "the Trainer sees ranks of other replicas, so it would average gradients at every step",
                allowed=f"the {ranks} of this replica", got=self.args.world_size,
                remedy="thinwire.connect(solo=True) before TrainingArguments is made",
            )  # fmt: skip
        if self.is_fsdp_enabled:
            raise refusal(
                "--fsdp shards the model after thinwire has read it", got="fsdp in TrainingArguments",
                allowed="a model that is sharded already",
                remedy="from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=RANKS))",
            )  # fmt: skip
        if self.args.n_gpu > 1:
            raise refusal(
                "the Trainer sees several GPUs, so it would split each batch over them", got=self.args.n_gpu,
                allowed="0 or 1", remedy="CUDA_VISIBLE_DEVICES=$LOCAL_RANK for each process",
            )  # fmt: skip


class _FinalExchange(TrainerCallback):
    """Ends the training of a trainer: before the last evaluation and checkpoint if its last step is known."""

    def __init__(self, trainer: DiLoCoTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the numbers of steps."""
        self._trainer.check_number_of_steps()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish after the last step."""
        if state.global_step >= state.max_steps:
            self._trainer.finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish a training that was stopped early."""
        self._trainer.finish()
