"""Training scripts of others as replicas, without a changed line: the part of `thinwire run` inside each process.

The libraries that a script imports are changed as it imports them, so that their loops use thinwire's integrations:
transformers' `Trainer`, from which those of TRL and sentence-transformers inherit, `accelerate.Accelerator`, and
`lightning.Trainer`. The script sees one process with a smaller data set and a folder of its own. A loop that none of
these drives is refused at its first step, since it would train alone.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import random
import re
import runpy
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from safetensors.torch import save_model
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset, Subset

from thinwire.compat import group_operators, intercept
from thinwire.errors import refusal
from thinwire.integrations.data import split_dataset
from thinwire.integrations.import_hooks import ImportHooks
from thinwire.sync.method import Method
from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.transport.base import Transport

DataSplit = Literal["auto", "all", "none"]
PAGE = "docs/use-in-scripts.md"
# thinwire itself sends and receives; whatever else a process group does is a library's averaging or gathering.
_OWN_OPERATORS = ("send", "recv_", "recv_any_source_")
# Strategies of Lightning that stand for one process with one device, or for DDP between several.
_LIGHTNING_STRATEGIES = ("auto", "single_device", "ddp", "ddp_find_unused_parameters_true")

_REPLICA = re.compile(r"replica-\d+")


class _EveryNth(IterableDataset[Any]):
    """A replica's share of a stream: of every `step` examples one."""

    def __init__(self, stream: Any, *, first: int, step: int) -> None:
        self._stream, self._first, self._step = stream, first, step

    def __iter__(self) -> Iterator[Any]:
        for place, example in enumerate(self._stream):
            if place % self._step == self._first:
                yield example


@dataclass(slots=True, kw_only=True)
class Loop:
    """A training loop that a library drives, and the optimizer that thinwire has put into it."""

    name: str
    optimizers: Callable[[], Sequence[DistributedOptimizer]]
    closes_itself: bool = True
    model: torch.nn.Module | None = None


@dataclass(slots=True, kw_only=True)
class ScriptResult:
    """End of a script on one replica; the parameters are the global ones, after the final exchange."""

    replica: int
    loops: list[str]
    steps: int
    sha256: str
    sent_bytes: int
    num_collectives: int


@dataclass(kw_only=True)
class ScriptReplica:
    """One replica of an unmodified script.

    Args:
        method: Makes the method of a loop.
        transport: Joins the replicas; None for an elastic run.
        uri: Address of the elastic run, see `thinwire.join`.
        begin_with: Replicas that an elastic run waits for before its first step.
        data_split: `auto` shares the training data: that of trainers, and loaders that shuffle; `all` shares every
            loader, `none` nothing.
        out: Folder of the models of loops that save before the final exchange.
        report: Takes the lines that describe what was done, once.

    Attributes:
        patches: What was changed, in order: one text each.
    """

    method: Callable[[], Method]
    transport: Transport | None
    data_split: DataSplit
    out: Path
    report: Callable[[str], None]
    uri: str | None = None
    begin_with: int | None = None
    patches: list[str] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    _data: list[str] = field(default_factory=list)
    _files: list[str] = field(default_factory=list)
    _resumed: str = ""
    _shares: list[Any] = field(default_factory=list)
    _depth: int = 0
    _has_stepped: bool = False
    _num_collectives: int = 0

    @property
    def replica(self) -> int:
        """The number of this replica; 0 in an elastic run, where each has its own terminal."""
        return 0 if self.transport is None else self.transport.replica

    @property
    def num_replicas(self) -> int:
        """The number of replicas; 1 in an elastic run, where it changes."""
        return 1 if self.transport is None else self.transport.num_replicas

    def install(self) -> None:
        """Change libraries from now on, and seed this process as all replicas are."""
        random.seed(0)
        torch.manual_seed(0)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        collectives = sorted(group_operators() - set(_OWN_OPERATORS))
        intercept(collectives, self._count)
        self._patch(DataLoader, "__init__", self._split_loader)
        ImportHooks(
            {
                "transformers.trainer": self._patch_trainer,
                "transformers.training_args": self._patch_arguments,
                "transformers.modeling_utils": self._patch_saving,
                "accelerate.accelerator": self._patch_accelerator,
                "accelerate.commands.launch": self._patch_launcher,
                "lightning.pytorch.trainer.trainer": self._patch_lightning,
            }
        ).install()

    def joining(self) -> dict[str, Any]:
        """Return the arguments by which the integrations join the other replicas."""
        options = {"replicas": self.begin_with} if self.transport is None and self.begin_with else {}
        return {"method": self.method(), "transport": self.transport, "uri": self.uri, "options": options}

    def finish(self) -> ScriptResult:
        """End the loops of a script that has ended well.

        Raises:
            ValueError: No loop was found.
        """
        if not self.loops:
            raise self._unknown_loop("the script ended, and no training loop was seen that thinwire knows")
        self.close_loops()
        for number, model in enumerate(loop.model for loop in self.loops if loop.model is not None):
            if not self.replica:  # what the script has saved may lack the last exchange
                path = self.out / f"model{number or ''}.safetensors"
                save_model(model, str(path))
                self.report(f"model: {path} holds the parameters after the final exchange")
        return self._result()

    def abandon(self) -> None:
        """End the loops of a script that has failed, without any exchange."""
        for loop in self.loops:
            for optimizer in loop.optimizers():
                optimizer.abandon()

    def close_loops(self) -> None:
        """Exchange the last steps of loops that do not do so themselves, and keep the global values in their models."""
        for optimizer in [one for loop in self.loops if not loop.closes_itself for one in loop.optimizers()]:
            optimizer.close(final_exchange=True)
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            with optimizer.global_parameters():
                kept = [p.detach().clone() for p in trained]
            with torch.no_grad():
                for parameter, value in zip(trained, kept, strict=True):
                    parameter.copy_(value)

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Put the global parameters into the models of loops that do not do so themselves."""
        with ExitStack() as stack:
            for loop in self.loops:
                for optimizer in () if loop.closes_itself else loop.optimizers():
                    stack.enter_context(optimizer.global_parameters(may_lag=True))
            yield

    def _result(self) -> ScriptResult:
        found, steps, replica, log = hashlib.sha256(), 0, self.replica, getattr(self.transport, "log", None)
        for optimizer in [one for loop in self.loops for one in loop.optimizers()]:
            steps, replica = steps + optimizer.steps_done, optimizer.transport.replica
            with optimizer.global_parameters(may_lag=True):
                for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
                    found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            log = getattr(optimizer.transport, "log", log)
        return ScriptResult(
            replica=replica, loops=[loop.name for loop in self.loops], steps=steps, sha256=found.hexdigest(),
            sent_bytes=0 if log is None else log.totals("sent").wire_bytes, num_collectives=self._num_collectives,
        )  # fmt: skip

    # steps

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            self._depth += 1
            if not self._has_stepped:
                self._has_stepped = True
                self._describe(optimizer)
        elif not self._depth:
            kind = type(optimizer).__name__
            raise self._unknown_loop(f"a loop steps an optimizer ({kind}) that thinwire has not joined")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            self._depth -= 1

    def _count(self, name: str, arguments: Any, go_on: Callable[[], Any]) -> Any:
        self._num_collectives += 1
        return go_on()

    def _describe(self, optimizer: DistributedOptimizer) -> None:
        """Report the five lines, or refuse a loop whose replicas would all train on the same examples."""
        if self.data_split == "auto" and self.num_replicas > 1 and not self._data:
            raise refusal(
                "no training data of this script was shared, so all replicas would train on the same examples",
                got="--data-split auto, and no loader that shuffles", allowed="all, none",
                remedy=f"--data-split all, or none where the script shares its data itself; see {PAGE}",
            )  # fmt: skip
        count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        loops = " and ".join(dict.fromkeys(loop.name for loop in self.loops))
        several = f"elastic run at {self.uri}" if self.transport is None else f"{self.num_replicas} replicas"
        self.report(f"{several}, {optimizer.method.name}, every replica seeded alike")
        self.report(f"loop: {loops}; {type(optimizer.inner).__name__} over {count:,} parameters")
        self.report(f"data: {'; '.join(self._data) or 'all examples on every replica (--data-split none)'}")
        self.report(f"files: {'; '.join(dict.fromkeys(self._files)) or 'as the script names them, on every replica'}")
        self.report(f"start: {self._resumed or 'from the first step'}")

    def _unknown_loop(self, what: str) -> ValueError:
        return refusal(
            what, got="no patch was used" if not self.loops else f"beside {self.loops[-1].name}",
            allowed="one optimizer of a transformers Trainer, an Accelerator or a lightning.Trainer",
            remedy=f"{PAGE}#your-own-loop: five lines in the script",
        )  # fmt: skip

    # data

    def share(self, dataset: Any, *, name: str) -> Any:
        """Return this replica's share of a data set of any kind; the shares have one size where it is known.

        Replicas of an elastic run, whose number changes, get all examples, each in an order of its own.

        Raises:
            ValueError: It has fewer examples than there are replicas, or is a stream that cannot be shuffled.
        """
        is_one = self.transport is not None and self.num_replicas == 1
        if self.data_split == "none" or is_one or any(dataset is one for one in self._shares):
            return dataset
        if isinstance(dataset, dict):
            return type(dataset)({key: self.share(one, name=f"{name}[{key}]") for key, one in dataset.items()})
        if self.transport is None:
            return self._in_own_order(dataset, name=name)
        number, replica = self.num_replicas, self.replica
        is_hub = type(dataset).__module__.partition(".")[0] == "datasets"
        size = len(dataset) if isinstance(dataset, Sized) else None
        if size is not None and size < number:
            raise refusal("the data set has fewer examples than there are replicas", got=size,
                          allowed=f"{number} or more", remedy="fewer replicas")  # fmt: skip
        if is_hub:
            found = split_dataset(dataset, self.transport, equal=size is not None)
        elif size is None:
            found = _EveryNth(dataset, first=replica, step=number)
        else:
            found = Subset(dataset, range(replica, size // number * number, number))
        self._shares.append(found)
        self._data.append(
            f"{len(found)} of {size} examples of {name}" if size else f"one of {number} examples of {name}"
        )
        return found

    def _in_own_order(self, dataset: Any, *, name: str) -> Any:
        seed = secrets.randbelow(1 << 31)
        if type(dataset).__module__.partition(".")[0] == "datasets":
            found = dataset.shuffle(seed=seed)
        elif isinstance(dataset, Sized):
            order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
            sized: Any = dataset
            found = Subset(sized, order.tolist())
        else:
            raise refusal("replicas of an elastic run would all read this stream alike", got=type(dataset).__name__,
                          allowed="a data set with a length, or of the datasets package",
                          remedy="--data-split none where the script shuffles it without a seed")  # fmt: skip
        self._shares.append(found)
        self._data.append(f"all examples of {name}, in another order on each replica")
        return found

    def _split_loader(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        is_own_order = given.get("sampler") is not None or given.get("batch_sampler") is not None
        if not is_own_order and (given.get("shuffle") or self.data_split == "all"):
            given["dataset"] = self.share(given["dataset"], name="a loader")
        original(given.pop("self"), given.pop("dataset"), **given)

    # files

    def folder_of(self, folder: Any) -> str:
        """Return this replica's folder below one that the script names."""
        own = f"replica-{self.replica}"
        path = Path(folder)
        if self.num_replicas == 1 or own in path.parts:
            return str(folder)
        self._files.append(f"{path / 'replica-N'}")
        return str(path / own)

    def describe_files(self, text: str) -> None:
        """Add to the line on files."""
        self._files.append(text)

    def own_checkpoint(self, given: Any) -> Any:
        """Return this replica's checkpoint for one that the script names, which may be another replica's.

        Example:
            `out/checkpoint-8` and `out/replica-0/checkpoint-8` are `out/replica-1/checkpoint-8` of replica 1.
        """
        if self.num_replicas == 1 or not isinstance(given, str | Path):
            return given
        own, path = f"replica-{self.replica}", Path(given)
        if any(_REPLICA.fullmatch(part) for part in path.parts):
            path = Path(*(own if _REPLICA.fullmatch(part) else part for part in path.parts))
        else:  # trainers save in FOLDER/replica-N/checkpoint-8, loops of Accelerate in FOLDER/step_8/replica-N
            path = next((p for p in (path.parent / own / path.name, path / own) if p.exists()), path)
        self._resumed = f"from {path}"
        return str(path)

    def is_for_lead(self, path: Any) -> bool:
        """Return whether a file is left to replica 0: it is for all, and every replica would write the same."""
        return bool(self.replica) and f"replica-{self.replica}" not in Path(path).parts

    # libraries

    def _patch(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Let a function stand around a method; it gets the original, then the call's arguments.

        Raises:
            ValueError: The library has no such method.
        """
        original = getattr(owner, name, None)
        place = owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__name__}"
        where = f"{place}.{name}"
        if original is None:
            raise refusal(f"this version of {place.partition('.')[0]} has no {name}", got=f"no {where}",
                          allowed="a version of the table", remedy=PAGE)  # fmt: skip

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, patched)
        self.patches.append(where)

    def _patch_arguments(self, module: ModuleType) -> None:
        def adapt(original: Callable[[Any], None], arguments: Any) -> None:
            if self.transport is not None:
                arguments.output_dir = self.folder_of(arguments.output_dir or "trainer_output")
                if self.replica:
                    arguments.report_to, arguments.push_to_hub = "none", False
            else:  # the trainer moves its folder once it has joined
                self._files.append(f"{Path(arguments.output_dir or 'trainer_output') / 'replica-N'}")
            original(arguments)

        self._patch(module.TrainingArguments, "__post_init__", adapt)

    def _patch_trainer(self, module: ModuleType) -> None:
        from thinwire.integrations.hf import DiLoCoTrainerMixin

        replica, original = self, module.Trainer

        class ReplicaTrainer(DiLoCoTrainerMixin, original):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                given = inspect.signature(original.__init__).bind(self, *args, **kwargs).arguments
                del given["self"]
                if given.get("train_dataset") is not None:
                    given["train_dataset"] = replica.share(given["train_dataset"], name="train_dataset")
                super().__init__(**given, **replica.joining())
                replica.loops.append(
                    Loop(name=type(self).__name__, optimizers=lambda: [one for one in [self.diloco] if one is not None])
                )

            def train(self, *args: Any, **kwargs: Any) -> Any:
                if checkpoint := kwargs.get("resume_from_checkpoint") or next(iter(args), None):
                    replica._resumed = f"from {checkpoint}, each replica from its own"
                return super().train(*args, **kwargs)

        functools.update_wrapper(ReplicaTrainer.__init__, original.__init__)
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(ReplicaTrainer, name, getattr(original, name))
        module.Trainer = ReplicaTrainer  # type: ignore[attr-defined]
        self.patches.append("transformers.trainer.Trainer")

    def _patch_accelerator(self, module: ModuleType) -> None:
        around = _AcceleratorCalls(self)
        for name in ("prepare", "save_state", "load_state", "get_state_dict", "save", "init_trackers", "end_training"):
            self._patch(module.Accelerator, name, getattr(around, name))

    def _patch_saving(self, module: ModuleType) -> None:
        def save(original: Callable[..., Any], model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_for_lead(save_directory):
                return None
            with self.global_parameters():
                return original(model, save_directory, *args, **kwargs)

        self._patch(module.PreTrainedModel, "save_pretrained", save)

    def _patch_launcher(self, module: ModuleType) -> None:
        def launch(original: Callable[..., None], args: Any) -> None:
            """Run the script in this process, which is the replica already."""
            sys.argv = [args.training_script, *args.training_script_args]
            if args.module:
                runpy.run_module(args.training_script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(args.training_script, run_name="__main__")

        self._patch(module, "launch_command", launch)

    def _patch_lightning(self, module: ModuleType) -> None:
        def init(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
            from thinwire.integrations.lightning import DiLoCoStrategy  # imports this module's package

            given = kwargs.get("strategy", "auto")
            if given not in _LIGHTNING_STRATEGIES:
                raise refusal("thinwire takes the place of the Trainer's strategy", got=f"strategy={given!r}",
                              allowed=", ".join(_LIGHTNING_STRATEGIES), remedy=PAGE)  # fmt: skip
            strategy = DiLoCoStrategy(**self.joining())
            kwargs["default_root_dir"] = self.folder_of(kwargs.get("default_root_dir") or ".")
            if self.replica and not isinstance(kwargs.get("logger"), bool | None):
                kwargs["logger"] = False
            original(trainer, *args, **{**kwargs, "strategy": strategy, "devices": 1, "num_nodes": 1})
            self.loops.append(Loop(name="lightning.Trainer", optimizers=lambda: strategy.wrapped))

        def fit(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            if checkpoint := given.get("ckpt_path"):
                given["ckpt_path"] = self.own_checkpoint(checkpoint)
            original(given.pop("self"), **given)

        self._patch(module.Trainer, "__init__", init)
        self._patch(module.Trainer, "fit", fit)


class _AcceleratorCalls:
    """Calls of a loop to its `Accelerator`, each with the original method first."""

    def __init__(self, replica: ScriptReplica) -> None:
        self._replica = replica
        self._models: list[torch.nn.Module] = []
        self._is_saving_state = False

    def prepare(self, original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        self._models += [one for one in args if isinstance(one, torch.nn.Module)]
        return original(accelerator, *(self._joined(accelerator, one) for one in args), **kwargs)

    def save_state(
        self, original: Callable[..., Any], accelerator: Any, output_dir: Any = None, **kwargs: Any
    ) -> Any:  # fmt: skip
        if output_dir is not None:
            output_dir = self._replica.folder_of(output_dir)
        self._move_project(accelerator)
        self._is_saving_state = True  # a checkpoint holds this replica's own parameters; the optimizer the global ones
        try:
            return original(accelerator, output_dir, **kwargs)
        finally:
            self._is_saving_state = False

    def load_state(self, original: Callable[..., Any], accelerator: Any, input_dir: Any = None, **kwargs: Any) -> Any:
        if input_dir is not None:
            input_dir = self._replica.own_checkpoint(input_dir)
        self._move_project(accelerator)
        return original(accelerator, input_dir, **kwargs)

    def _move_project(self, accelerator: Any) -> None:
        """Give checkpoints that the accelerator names itself a folder of this replica."""
        if accelerator.project_dir is not None and accelerator.project_configuration.automatic_checkpoint_naming:
            accelerator.project_configuration.set_directories(self._replica.folder_of(accelerator.project_dir))

    def get_state_dict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_saving_state:
            return original(*args, **kwargs)
        with self._replica.global_parameters():
            found = original(*args, **kwargs)
            return {name: value.clone() if torch.is_tensor(value) else value for name, value in found.items()}

    def save(self, original: Callable[..., Any], accelerator: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        return None if self._replica.is_for_lead(f) else original(accelerator, obj, f, *args, **kwargs)

    def init_trackers(self, original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        if self._replica.replica:
            accelerator.log_with = []
        return original(accelerator, *args, **kwargs)

    def end_training(self, original: Callable[..., Any], accelerator: Any) -> Any:
        self._replica.close_loops()
        return original(accelerator)

    def _joined(self, accelerator: Any, one: Any) -> Any:
        """Wrap an optimizer that a loop gives to `prepare`, once its model is on the device.

        Raises:
            ValueError: No model that was prepared has its parameters.
        """
        from accelerate.optimizer import AcceleratedOptimizer

        if not isinstance(one, torch.optim.Optimizer) or isinstance(one, DistributedOptimizer | AcceleratedOptimizer):
            return one
        if self._replica.transport is None:
            raise refusal("a loop of its own does not know the steps of an elastic run", got="an Accelerator",
                          allowed="a Trainer with max_steps", remedy="--replicas, or a launcher")  # fmt: skip
        own = {id(p) for group in one.param_groups for p in group["params"]}
        model = next((m for m in reversed(self._models) if own <= {id(p) for p in m.parameters()}), None)
        if model is None:
            raise refusal("the optimizer's model was not given to accelerator.prepare", got=type(one).__name__,
                          allowed="prepare(model, optimizer), or the model before", remedy=PAGE)  # fmt: skip
        if accelerator.device_placement:
            model.to(accelerator.device)
        self._replica.describe_files("save_state to replica-N below its folder, saved models by replica 0")
        joined = DistributedOptimizer(model, one, method=self._replica.method(), transport=self._replica.transport)
        self._replica.loops.append(
            Loop(name="Accelerator", optimizers=lambda: [joined], closes_itself=False, model=model)
        )
        return joined
