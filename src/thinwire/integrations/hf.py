"""Hugging Face Trainers over thin wires: a mixin for transformers' `Trainer` and its subclasses, such as TRL's.

The trainer sees one process, since `thinwire.connect(solo=True)` hides the launcher's variables: it wraps the model in
nothing, gathers nothing, and saves on every replica. Only thinwire's own messages travel. Without a launcher, trainers
join an elastic run: they come and go while the others train.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

import thinwire.methods  # noqa: F401 - registers the names that `method` may be
from thinwire.errors import CheckpointError, DesyncError, MissingExtra, excluded, refusal
from thinwire.integrations.hooks import check_hooks
from thinwire.integrations.run_schedule import RunSchedule
from thinwire.integrations.tracking import is_lead, metrics, tracker_names
from thinwire.sync.buffers import average_tensors, gather_numbers
from thinwire.sync.method import Method
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.transport.base import Transport
from thinwire.transport.connect import check_way_to_join
from thinwire.transport.job_environment import offer_tracker_group
from thinwire.transport.secret import need_pyzmq

if TYPE_CHECKING:
    from thinwire.training.elastic.own_loop import ElasticOptimizer

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtra.of("transformers", extra="hf") from error

# The local parameters of a replica, beside the global ones in `model.safetensors`.
LOCAL_FILE = "local_parameters.safetensors"
# Above the numbers that `average_buffers` counts from 0.
_NUMBER_OF_STEPS_CHECK, _CHECKPOINTS_CHECK = 1 << 40, 1 << 41
_REPLICA, _CHECKPOINT = re.compile(r"replica-\d+"), re.compile(r"checkpoint-(\d{1,15})")


class DiLoCoTrainerMixin:
    """Train with any `transformers.Trainer` as one replica of several; name it before the trainer's class.

    The optimizer that the trainer makes, or is given as `optimizers=`, is wrapped in a `DistributedOptimizer`. The
    last step ends with the final exchange. Evaluation, prediction, `save_model` and the model in each checkpoint use
    the global parameters, so every replica saves the same model. Each replica writes its own checkpoints, to
    `output_dir/replica-N` if there are several.

    In an elastic run, `max_steps` is the last step of the run, and `state.global_step` the step that the run has
    reached: a trainer that comes late begins there, and so does its learning-rate schedule. Checkpoints hold the model
    alone, since the others have the state of the run.

    Args:
        *args: For the trainer.
        method: The method, or its name: see `thinwire.methods`.
        transport: Joins the replicas: `thinwire.connect(solo=True)`, called before `TrainingArguments` is made. None
            for an elastic run.
        uri: Address of the elastic run, see `thinwire.join`; None for the variable THINWIRE_JOIN.
        options: Further arguments by name: of `DistributedOptimizer`, or of `thinwire.join`.
        **kwargs: For the trainer.

    Raises:
        ValueError: The trainer sees several processes or several GPUs, or has neither transport nor address.

    Example:
        ```python
        class Trainer(DiLoCoTrainerMixin, transformers.Trainer):
            pass


        transport = thinwire.connect(solo=True)
        trainer = Trainer(model=model, args=args, train_dataset=own_share, method="iso-loco", transport=transport)
        trainer.train()

        # elastic: no launcher; the first process creates the run
        trainer = Trainer(model=model, args=args, train_dataset=data, method="iso-loco", uri="127.0.0.1:29410")
        ```
    """

    model: Any
    args: Any
    optimizer: Any
    state: Any
    lr_scheduler: Any
    is_fsdp_enabled: bool

    def __init__(
        self, *args: Any, method: Method | str, transport: Transport | None = None, uri: str | None = None,
        options: dict[str, Any] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        check_way_to_join(transport, uri)
        check_hooks("transformers", [kind for kind in type(self).__mro__ if not issubclass(kind, DiLoCoTrainerMixin)])
        self.transport = transport
        self.diloco: DistributedOptimizer | None = None
        self._method, self._uri, self._options = method, uri, dict(options or {})
        self._is_finished = False
        super().__init__(*args, **kwargs)
        self._check_is_alone()
        self.args = copy.copy(self.args)
        self._output_dir = Path(self.args.output_dir)
        if transport is not None and transport.num_replicas > 1:
            self._write_as(transport.replica)
            self._name_run(transport)
        self.add_callback(_FinalExchange(self) if transport is not None else _ElasticSteps(self))  # type: ignore[attr-defined]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Wrap the trainer's optimizer; once a training."""
        if self.diloco is not None and self._is_finished:
            self.diloco = self.optimizer = None
        inner = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if self.diloco is None:
            self.diloco = self.optimizer = self._wrap(inner)
            self._is_finished = False
        return self.diloco

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and end with the final exchange; after an exception, without any exchange.

        One `resume_from_checkpoint` serves all replicas: True or "True", the folder of a run, that of one of its
        replicas, or the checkpoint of one replica. Each takes its own checkpoint of that step, or of the newest step
        that all replicas have.

        Raises:
            CheckpointError: There is no step that all replicas have, or not the given one.
            ValueError: A checkpoint to resume from is given for an elastic run.
        """
        if args:
            kwargs["resume_from_checkpoint"], args = args[0], args[1:]
        checkpoint = kwargs.get("resume_from_checkpoint")
        if self.transport is None and checkpoint:
            raise excluded(
                "resume_from_checkpoint", "an elastic run", why="a trainer goes on from the state of the others",
                remedy="to load the model of a checkpoint by from_pretrained() for a new run",
            )  # fmt: skip
        if self.transport is not None and checkpoint:
            kwargs["resume_from_checkpoint"] = str(self._checkpoint_of_all(checkpoint, self.transport))
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            if self.diloco is not None:
                self.diloco.__exit__(type(error), error, error.__traceback__)
            raise

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Make the repository on the hub, on one replica alone.

        Raises:
            ValueError: The run is elastic.
        """
        if self.transport is None:
            raise excluded("push_to_hub", "an elastic run", why="the replica that would upload may leave",
                           remedy="to upload the model of one process after the training")  # fmt: skip
        if is_lead(self.transport):
            super().init_hf_repo(*args, **kwargs)  # type: ignore[misc]

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload on one replica alone; the others return None."""
        return super().push_to_hub(*args, **kwargs) if self._is_lead() else None  # type: ignore[misc]

    def _push_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self._is_lead():
            super()._push_from_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _is_lead(self) -> bool:
        return self.transport is None or is_lead(self.transport)

    def finish(self) -> None:
        """Exchange the last steps and keep the global parameters in the model; the trainer calls it by itself."""
        if self.diloco is None or self._is_finished:
            return
        self.diloco.close(final_exchange=True)
        with self.diloco.global_parameters(may_lag=self.transport is None):  # an elastic run may be left before its end
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
        if self.transport is None or self.transport.num_replicas == 1:
            return
        number = torch.tensor([own := float(self.state.max_steps)])
        average_tensors([number], transport=self.transport, number=_NUMBER_OF_STEPS_CHECK, deadline_s=300.0)
        if number[0].item() != own:
            raise DesyncError(
                f"replica {self.transport.replica} plans {own:.0f} steps, the mean over the replicas is "
                f"{number[0].item():g}; give all the same max_steps, or shares of one size "
                f"(thinwire.integrations.data.split_dataset)"
            )

    def _wrap(self, inner: torch.optim.Optimizer) -> DistributedOptimizer:
        """Wrap an optimizer; in an elastic run, join it now.

        Raises:
            ValueError: `max_steps` is missing in an elastic run.
            DesyncError: The run ends at another step.
        """
        if self.transport is not None:
            return DistributedOptimizer(
                self.model, inner, method=self._method, transport=self.transport, **self._options
            )
        max_steps = self.args.max_steps
        if max_steps < 1:
            raise refusal("an elastic run counts steps, not epochs", got=f"max_steps={max_steps}",
                          allowed="at least 1", remedy="max_steps=1000 in TrainingArguments")  # fmt: skip
        need_pyzmq()
        from thinwire.training.elastic.own_loop import join  # needs pyzmq, which other trainers do without

        found = join(self._uri, self.model, inner, method=self._method, steps=max_steps, **self._options)
        if found.next_stop != max_steps:
            found.__exit__(DesyncError, None, None)
            raise DesyncError(
                f"the run ends at step {found.next_stop}, and this trainer at {max_steps}; give it the same max_steps"
            )
        self._write_as(found.transport.replica)
        return found

    def _write_as(self, replica: int) -> None:
        own = f"replica-{replica}"
        if self._output_dir.name != own:  # `thinwire run` has chosen the folder before the script read it
            self.args.output_dir = str(self._output_dir / own)

    def _name_run(self, transport: Transport) -> None:
        """Give this replica a run of its own in trackers, in one group."""
        folder = self._output_dir.parent if _REPLICA.fullmatch(self._output_dir.name) else self._output_dir
        given = self.args.run_name
        names = tracker_names(folder.name if given in (None, self.args.output_dir) else Path(given).name, transport)
        self.args.run_name = names["name"]
        offer_tracker_group(names["group"])

    def _checkpoint_of_all(self, given: Any, transport: Transport) -> Path:
        """Return this replica's checkpoint of the given step, or of the newest one that all replicas have."""
        own = f"replica-{transport.replica}"
        path = Path(self.args.output_dir if given is True or str(given).lower() == "true" else given)
        path = Path(*(own if _REPLICA.fullmatch(part) else part for part in path.parts))
        wanted = _CHECKPOINT.fullmatch(path.name)
        if wanted is None and (path / "trainer_state.json").exists():
            return path  # a checkpoint under a name of the user's
        folder = path.parent if wanted else path
        if transport.num_replicas > 1 and own not in folder.parts:
            folder /= own
        has = {int(found[1]) for one in folder.glob("checkpoint-*") if (found := _CHECKPOINT.fullmatch(one.name))
               and (one / "trainer_state.json").exists()}  # written last  # fmt: skip
        steps = [int(wanted[1])] if wanted else sorted(has, reverse=True)
        everywhere = gather_numbers(
            [step for step in steps if step in has], transport=transport, number=_CHECKPOINTS_CHECK, deadline_s=300.0
        )
        common = set(everywhere[0]).intersection(*everywhere)
        if not common:
            lists = "; ".join(f"replica {index}: {one or 'none'}" for index, one in enumerate(everywhere))
            raise CheckpointError(
                f"there is no step that all replicas have saved, as {given!r} asks for; found {lists} (this replica "
                f"looked in {folder}); copy the missing folder, or start without resume_from_checkpoint"
            )
        return folder / f"checkpoint-{max(common)}"

    def _load_best_model(self) -> None:
        self.finish()  # what is loaded next must not be averaged with the last steps
        super()._load_best_model()  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.transport is None:
            return  # no trainer resumes from it: it would lack the state of the run
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
            start = "to start each process by itself, without torchrun"
            raise refusal(
                "the Trainer sees ranks of other replicas, so it would average gradients at every step",
                allowed=f"the {ranks} of this replica", got=self.args.world_size,
                remedy="thinwire.connect(solo=True) before TrainingArguments is made" if self.transport else start,
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


class _ElasticSteps(TrainerCallback):
    """Counts the steps of an elastic run where the trainer counts its own, and ends the training with the run."""

    def __init__(self, trainer: DiLoCoTrainerMixin) -> None:
        self._trainer = trainer
        self._schedule: RunSchedule | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin at the step that the run has reached."""
        scheduler: Any = self._trainer.lr_scheduler
        self._schedule = RunSchedule(getattr(scheduler, "scheduler", scheduler))
        self._move_to(self._optimizer.steps_done, state)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pass over the steps that the optimizer has passed over; the trainer counts one more itself."""
        self._move_to(self._optimizer.steps_done - 1, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish after the last step, or when this replica was asked to leave."""
        if self._optimizer.is_finished:
            self._trainer.finish()
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the run where the training was stopped early."""
        self._trainer.finish()

    @property
    def _optimizer(self) -> ElasticOptimizer:
        found: Any = self._trainer.diloco
        return found  # type: ignore[no-any-return]

    def _move_to(self, step: int, state: Any) -> None:
        trainer: Any = self._trainer
        passed = step - state.global_step
        if not passed:
            return
        state.global_step = step
        # the trainer divides sums over its own steps by differences of these
        trainer._globalstep_last_logged += passed
        trainer._initial_global_step += passed
        assert self._schedule is not None
        self._schedule.move_to(step)
