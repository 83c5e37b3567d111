"""The words after `thinwire train`, as options; and the run's own options where one is resumed."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from thinwire.cli.argument_parsing import parse_options
from thinwire.training.config import FREE, TrainConfig, read_config, resolve


def parse(arguments: Sequence[str]) -> TrainConfig:
    """Turn words into options.

    Raises:
        ValueError: The words are no options of this command; in one line.
        SystemExit: After `--help`.
    """
    shown = parse_options(_as_shown(), arguments, prog="thinwire train")
    return TrainConfig(**{field.name: getattr(shown, field.name) for field in dataclasses.fields(TrainConfig)})


def settle(given: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """Fill in defaults, from the run that is resumed where there is one.

    Raises:
        ValueError: Options contradict each other, torchrun, or the run that is resumed.
        CheckpointError: There is no run to resume.
    """
    ranks = world_size()
    if given.resume is None:
        return resolve(given, world_size=ranks, cores=os.cpu_count() or 1, home=Path.home())
    saved = read_config(given.resume)
    named = {name for field in dataclasses.fields(given) if is_named(name := field.name, arguments)}
    for name in sorted(named - set(FREE)):
        if getattr(given, name) != getattr(saved, name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} is {getattr(given, name)!r}, but {given.resume} was started with {getattr(saved, name)!r}; a "
                f"run goes on with its own options: leave {flag} out, or start a new run"
            )
    if given.overwrite or (given.out is not None and given.out != given.resume):
        raise ValueError("--resume goes on in its own folder; leave --out and --overwrite out")
    if ranks not in (None, saved.replicas):
        raise ValueError(f"{given.resume} has {saved.replicas} replicas, but torchrun starts {ranks} ranks")
    own = {name: getattr(given, name) for name in named & set(FREE)}
    fresh: dict[str, Any] = {
        "quiet": given.quiet,
        "json": given.json,
        "overwrite": False,
        "out": given.resume,
        "resume": given.resume,
    }
    if saved.elastic:  # whoever goes on with it waits for its own replicas, unless told to wait for more
        fresh["begin_with"] = given.begin_with
    return dataclasses.replace(saved, **{**own, **fresh})


def world_size() -> int | None:
    """Return how many ranks torchrun starts, None where it does not run."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    text = os.environ["WORLD_SIZE"]
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"WORLD_SIZE must be a whole number of at least 1, got {text!r}")
    return int(text)


def _as_shown() -> type[Any]:
    """Return the configuration as the help shall show it: without the parser's words for "may be left out"."""
    hints = typing.get_type_hints(TrainConfig)
    fields = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    for name, default in fields.items():
        if default is None:
            kind = next(part for part in typing.get_args(hints[name]) if part is not type(None))
            # the help text itself says what stands in for it
            hints[name] = Annotated[hints[name], tyro.conf.arg(metavar=kind.__name__.upper(), help_behavior_hint="")]
    hints["method_option"] = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    members = {"__annotations__": hints, "__doc__": TrainConfig.__doc__, **fields}
    # a subclass, so that the parser finds the help texts beside the fields
    return dataclasses.dataclass(frozen=True, kw_only=True)(type("TrainConfig", (TrainConfig,), members))


def is_named(name: str, arguments: Sequence[str]) -> bool:
    """Tell whether the words name an option."""
    flag = name.replace("_", "-")
    heads = {word.split("=", 1)[0].replace("_", "-") for word in arguments if word.startswith("--")}
    return f"--{flag}" in heads or f"--no-{flag}" in heads
