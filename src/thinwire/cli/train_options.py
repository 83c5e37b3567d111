"""The words after `thinwire train`, as options; and the run's own options where one is resumed."""

from __future__ import annotations

import dataclasses
import os
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from thinwire.cli.argument_parsing import parse_options
from thinwire.cli.help_text import OptionHelp, format_help, options_of_dataclass
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
_HEADINGS = {"sync": "Exchange", "elastic": "Elastic run", "parallel": "Ranks of a replica"}


def expand_method_options(arguments: Sequence[str]) -> list[str]:
    """Rewrite `--NAME VALUE` of an option that only the chosen method has as `--method-option NAME=VALUE`.

    Example:
        >>> expand_method_options(["--method", "dgc", "--density", "0.01", "--steps", "3"])
        ['--method', 'dgc', '--method-option', 'density=0.01', '--steps', '3']
    """
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else (word,))]
    heads = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    if heads <= {*OPTIONS, "help", *(f"no_{name}" for name in OPTIONS)}:
        return list(arguments)
    own = _method_only(arguments)
    expanded: list[str] = []
    rest = iter(arguments)
    for word in rest:
        name, sign, value = word.partition("=")
        name = name[2:].replace("-", "_") if name.startswith("--") else ""
        expanded += ["--method-option", f"{name}={value if sign else next(rest, '')}"] if name in own else [word]
    return expanded


def _method_only(arguments: Sequence[str]) -> set[str]:
    """Return the options that only the chosen method has; none where it is unknown, which is reported later."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else (word,))]
    places = [place for place, word in enumerate(words[:-1]) if word == "--method"]
    try:
        return set(method_entry(words[places[-1] + 1] if places else TrainConfig().sync.method).kinds) - set(OPTIONS)
    except ValueError:
        return set()


def expand_config_file(arguments: Sequence[str]) -> list[str]:
    """Put the options of `--config FILE` before the others, without those that the command line names itself.

    The file is TOML with the sections of `config.json`; its table `recipe` is for readers.

    Raises:
        ValueError: The file cannot be read, or holds something that is no option.
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
        for field, value in values.items():
            option = _option_of(section, field, path)
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


def _option_of(section: str, field: str, path: Path) -> str:
    fields = {name: option for option, (owner, name) in OPTIONS.items() if owner == section}
    if field in fields and fields[field] != "config":
        return fields[field]
    raise unknown_name(f"option of [{section}] in --config {path}", field, sorted(fields.keys() - {"config"}))


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
    """Read options from a command line.

    Raises:
        ValueError: The words are no options of this command; in one line.
    """
    also = [flag(name) for name in sorted(_method_only(arguments))]
    shown: Any = parse_options(_as_shown(), arguments, prog="thinwire train", also=also)
    values = {name: getattr(getattr(shown, section), field) for name, (section, field) in OPTIONS.items()}
    given = TrainConfig.of(**{**values, "secret": secret_file(values["secret"])})
    named = [name for name in WORKLOAD_OPTIONS if is_named(name, arguments)]
    if problems := workload_problems(given, named=named):
        raise ValueError("\n".join(map(str, problems)))
    return given


def train_help() -> str:
    """Return the text of `thinwire train --help`: the basic options, then the others by subject."""
    sections: dict[str, dict[str, OptionHelp]] = {}
    for section, kind in SECTIONS.items():
        names = {field: name for name, (owner, field) in OPTIONS.items() if owner == section}
        sections[section] = options_of_dataclass(kind, names=names)
    groups = {"Basic options": [sections[OPTIONS[name][0]][name] for name in BASIC]}
    for section in SECTIONS:
        others = [option for name, option in sections[section].items() if name not in BASIC]
        groups[f"{_HEADINGS.get(section, section.capitalize())} options"] = others
    return format_help("thinwire train", TrainConfig.__doc__ or "", groups=groups)


def settle(given: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """Fill in defaults, from the run that is resumed where there is one.

    Raises:
        ValueError: Options contradict each other, torchrun, or the run that is resumed.
        CheckpointError: There is no run to resume.
    """
    ranks = world_size()
    if given.output.resume is None:
        fresh_run = resolve(given, world_size=ranks, cores=os.cpu_count() or 1, home=Path.home())
        if given.output.out is None and not given.output.overwrite:
            return fresh_run.replace(out=free_folder(fresh_run.run_dir))
        return fresh_run
    saved = read_config(given.output.resume)
    check_options(given.output.resume, saved)
    named = {name for name in OPTIONS if is_named(name, arguments)}
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
    """Set torchrun's variables as srun or mpirun state them, so that one command line serves all launchers.

    Raises:
        ValueError: This process is one rank of several, and where they meet is not stated.
    """
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


def _as_shown() -> Any:
    """Return the configuration as the help shows it: option names without sections, no "None" in metavars."""
    members: dict[str, Any] = {name: _section_as_shown(name, kind) for name, kind in SECTIONS.items()}
    fields = {name: kind() for name, kind in members.items()}
    shown = type("TrainConfig", (), {"__annotations__": members, "__doc__": TrainConfig.__doc__, **fields})
    return Annotated[dataclasses.dataclass(frozen=True, kw_only=True)(shown), tyro.conf.OmitArgPrefixes]


def _section_as_shown(section: str, kind: type[Any]) -> type[Any]:
    hints = typing.get_type_hints(kind)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for option, (owner, name) in OPTIONS.items():
        if owner != section:
            continue
        # the help text itself says what replaces a missing value
        named: dict[str, Any] = {"name": option.replace("_", "-")} if option != name else {}
        if defaults[name] is None:
            value = next(part for part in typing.get_args(hints[name]) if part is not type(None))
            hidden = tyro.conf.arg(metavar=value.__name__.upper(), help_behavior_hint="", **named)
            hints[name] = Annotated[hints[name], hidden]
        elif named:
            hints[name] = Annotated[hints[name], tyro.conf.arg(**named)]
    if "method_option" in hints:
        hints["method_option"] = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    members = {"__annotations__": hints, "__doc__": kind.__doc__, **defaults}
    # a subclass, so that the parser finds the help texts beside the fields
    return dataclasses.dataclass(frozen=True, kw_only=True)(type(kind.__name__, (kind,), members))


def is_named(name: str, arguments: Sequence[str]) -> bool:
    """Return whether the command line names an option."""
    flag = name.replace("_", "-")
    heads = {word.split("=", 1)[0].replace("_", "-") for word in arguments if word.startswith("--")}
    return f"--{flag}" in heads or f"--no-{flag}" in heads
