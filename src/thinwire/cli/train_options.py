"""The words after `thinwire train`, as options; and the run's own options where one is resumed."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.cli.argument_parsing import format_help, options_of, read_arguments
from thinwire.cli.secret import secret_file
from thinwire.errors import excluded, refusal, unknown_name
from thinwire.options import flag
from thinwire.training.config import (
    BASIC,
    FREE,
    OPTIONS,
    SECTIONS,
    TrainConfig,
    free_folder,
    read_config,
    resolve,
    workload_problems,
)
from thinwire.training.method_catalog import method_entry
from thinwire.training.run_origin import check_options
from thinwire.workloads.cards import WORKLOAD_OPTIONS

# The table of a file of options that is for readers: title, machines, expected numbers.
RECIPE = "recipe"
_OPTIONS = {section: options_of(kind) for section, kind in SECTIONS.items()}
_HEADINGS = {"sync": "Exchange", "elastic": "Elastic run", "parallel": "Ranks of a replica"}


def expand_config_file(arguments: Sequence[str]) -> list[str]:
    """Put the options of `--config FILE` before the others, without those that the command line names itself.

    The file is TOML with the sections of `config.json`; its table `recipe` is for readers.
    """
    path = _config_file(arguments)
    if path is None:
        return list(arguments)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refusal("--config cannot be read", got=f"{path}: {error.strerror}", allowed="a TOML file of options",
                      remedy="thinwire recipes cp cpu-demo") from error  # fmt: skip
    except (tomllib.TOMLDecodeError, UnicodeError) as error:
        raise refusal("--config is not TOML", got=f"{path}: {error}", allowed="a TOML file of options",
                      remedy="thinwire recipes show cpu-demo") from error  # fmt: skip
    content.pop(RECIPE, None)
    words: list[str] = []
    for section, values in content.items():
        if section not in SECTIONS or not isinstance(values, dict):
            raise unknown_name(f"section in --config {path}", section, SECTIONS)
        known = {name: option for option, (owner, name) in OPTIONS.items() if owner == section and option != "config"}
        for field, value in values.items():
            if field not in known:
                raise unknown_name(f"option of [{section}] in --config {path}", field, sorted(known))
            option = known[field]
            if not is_named(option, arguments):
                words += _arguments_of(option, value, where=f"{section}.{field} in --config {path}")
    return [*words, *arguments]


def _config_file(arguments: Sequence[str]) -> Path | None:
    found = None
    for place, word in enumerate(arguments):
        name, sign, value = word.partition("=")
        if name == "--config":
            found = value if sign else next(iter(arguments[place + 1 : place + 2]), None)
    return None if found is None else Path(found).expanduser()


def _arguments_of(option: str, value: object, *, where: str) -> list[str]:
    """Return a value of a file as the command line writes it."""
    default = TrainConfig().option(option)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise refusal(f"{where} is not true or false", got=repr(value), allowed="true, false",
                          remedy="true or false without quotes")  # fmt: skip
        name = flag(option)
        return [] if value == default else [name if value else f"--no-{name[2:]}"]
    values = value if isinstance(value, list) and isinstance(default, tuple) else [value]
    if any(isinstance(one, bool) or not isinstance(one, str | int | float) for one in values):
        kind = "a list of texts" if isinstance(default, tuple) else "a text or a number"
        raise refusal(f"{where} has the wrong type", got=repr(value), allowed=kind,
                      remedy="thinwire recipes show cpu-demo")  # fmt: skip
    return [word for one in values for word in (flag(option), str(one))]


def parse(arguments: Sequence[str]) -> TrainConfig:
    """Read options from a command line; `--NAME VALUE` of an option that only the method has is a `--method-option`."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else (word,))]
    method = [words[place + 1] for place, word in enumerate(words[:-1]) if word == "--method"][-1:]
    try:
        own = method_entry(*(method or [TrainConfig().sync.method])).kinds.keys() - OPTIONS.keys()
    except ValueError:
        own = set()  # an unknown method is reported later
    general = _OPTIONS["sync"]["method_option"]
    known = {name: dataclasses.replace(general, flag=flag(name), is_many=False) for name in sorted(own)}
    for options in _OPTIONS.values():
        known |= options
    values = read_arguments(known, arguments, prog="thinwire train")
    if chosen := [f"{name}={values.pop(name)}" for name in [*values] if name in own]:
        values["method_option"] = (*values.get("method_option", ()), *chosen)
    given = TrainConfig.of(**values)
    given = given.replace(secret=secret_file(given.run.secret))
    named = [name for name in WORKLOAD_OPTIONS if is_named(name, arguments)]
    if problems := workload_problems(given, named=named):
        raise ValueError("\n".join(map(str, problems)))
    return given


def train_help() -> str:
    """Return the text of `thinwire train --help`: the basic options, then the others by subject."""
    groups = {"Basic options": [_OPTIONS[OPTIONS[name][0]][name] for name in BASIC]}
    for section, options in _OPTIONS.items():
        others = [option for name, option in options.items() if name not in BASIC]
        groups[f"{_HEADINGS.get(section, section.capitalize())} options"] = others
    return format_help("thinwire train", TrainConfig.__doc__ or "", groups=groups)


def settle(given: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """Fill in defaults, from the run that is resumed where there is one."""
    ranks = world_size()
    if given.output.resume is None:
        fresh_run = resolve(given, world_size=ranks, cores=os.cpu_count() or 1, home=Path.home())
        if given.output.out is None and not given.output.overwrite:
            return fresh_run.replace(out=free_folder(fresh_run.run_dir))
        return fresh_run
    saved = read_config(given.output.resume)
    check_options(given.output.resume, saved)
    named = {name for name in OPTIONS if is_named(name, arguments)}
    named |= {"method_option"} if given.sync.method_option else set()  # also those that were named by themselves
    for name in sorted(named - set(FREE)):
        if given.option(name) != saved.option(name):
            raise refusal(
                f"{flag(name)} differs from the run in {given.output.resume}, which goes on with its own options",
                got=repr(given.option(name)), allowed=repr(saved.option(name)),
                remedy=f"to leave {flag(name)} out, or a new run",
            )  # fmt: skip
    if given.output.overwrite or (given.output.out is not None and given.output.out != given.output.resume):
        why = "a run goes on in its own folder"
        raise excluded("--resume", "--out or --overwrite", why=why, remedy="to leave the latter out")
    wanted = (saved.run.replicas or 1) * saved.parallel.ranks
    if ranks not in (None, wanted):
        each = "replicas" if saved.parallel.ranks == 1 else "ranks of replicas"
        raise refusal(f"torchrun starts another number of ranks than {given.output.resume} has {each}", got=ranks,
                      allowed=wanted, remedy=f"torchrun with {wanted} ranks")  # fmt: skip
    own = {name: given.option(name) for name in named & set(FREE)}
    fresh: dict[str, Any] = {
        "quiet": given.output.quiet, "json": given.output.json, "overwrite": False, "out": given.output.resume,
        "resume": given.output.resume,
    }  # fmt: skip
    if saved.elastic.is_enabled:  # whoever goes on with it waits for its own replicas, unless told to wait for more
        fresh["begin_with"] = given.elastic.begin_with
    return saved.replace(**{**own, **fresh})


def adopt_launcher() -> None:
    """Set torchrun's variables as srun or mpirun state them, so that one command line serves all launchers."""
    from thinwire.transport.job_environment import launcher_variables

    os.environ.update(launcher_variables(os.environ))


def world_size() -> int | None:
    """Return how many ranks torchrun starts, None where it does not run."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    text = os.environ["WORLD_SIZE"]
    if not text.isdecimal() or int(text) < 1:
        raise refusal("WORLD_SIZE is no number of ranks", got=repr(text), allowed="1 or more",
                      remedy="torchrun, which sets it")  # fmt: skip
    return int(text)


def local_replicas(config: TrainConfig) -> int:
    """Return how many replicas start on this host: all, or torchrun's ranks of this host."""
    if world_size() is None:
        return config.num_replicas
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = int(text) if text.isdecimal() and int(text) else 1
    return max(1, ranks // config.parallel.ranks)


def is_named(name: str, arguments: Sequence[str]) -> bool:
    """Return whether the command line names an option."""
    flag = name.replace("_", "-")
    heads = {word.split("=", 1)[0].replace("_", "-") for word in arguments if word.startswith("--")}
    return f"--{flag}" in heads or f"--no-{flag}" in heads
