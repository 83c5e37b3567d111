"""`thinwire train`: trains one model on several replicas, started here or by torchrun."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tyro

from thinwire.errors import DataError, Stopped, ThinwireError, WorkerFailed
from thinwire.training.config import FREE, TrainConfig, check_values, read_config, resolve

USAGE, FAILED = 2, 1


def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire train --help`.

    Returns:
        0, 1 for what went wrong while running, 2 for wrong options, 128 + N for signal N.
    """
    is_told = os.environ.get("LOCAL_RANK", "0") == "0"  # the ranks of a host are given the same words
    try:
        config = settle(parse(arguments), arguments)
        check_values(config)
        from thinwire.training.assembly import check

        check(config)
    except ValueError as error:
        return _fail(USAGE, error, is_told=is_told)
    except ThinwireError as error:
        return _fail(FAILED, error, is_told=is_told)
    try:
        return _train_under_torchrun(config) if _world_size() is not None else _train_here(config)
    except ValueError as error:
        return _fail(USAGE, error)
    except ThinwireError as error:
        return _fail(FAILED, error)
    except OSError as error:
        return _fail(FAILED, f"{error.strerror or error}: {error.filename}" if error.filename else error)


def parse(arguments: Sequence[str]) -> TrainConfig:
    """Turn words into options.

    Raises:
        ValueError: The words are no options of this command; in one line.
        SystemExit: After `--help`.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                TrainConfig, prog="thinwire train", args=list(arguments), config=(tyro.conf.FlagCreatePairsOff,)
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_one_line(said.getvalue())) from None


def settle(given: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """Fill in defaults, from the run that is resumed where there is one.

    Raises:
        ValueError: Options contradict each other, torchrun, or the run that is resumed.
        CheckpointError: There is no run to resume.
    """
    world_size = _world_size()
    if given.resume is None:
        return resolve(given, world_size=world_size, cores=os.cpu_count() or 1, home=Path.home())
    saved = read_config(given.resume)
    named = {name for field in dataclasses.fields(given) if _is_named(name := field.name, arguments)}
    for name in sorted(named - set(FREE)):
        if getattr(given, name) != getattr(saved, name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} is {getattr(given, name)!r}, but {given.resume} was started with {getattr(saved, name)!r}; a "
                f"run goes on with its own options: leave {flag} out, or start a new run"
            )
    if given.overwrite or (given.out is not None and given.out != given.resume):
        raise ValueError("--resume goes on in its own folder; leave --out and --overwrite out")
    if world_size not in (None, saved.replicas):
        raise ValueError(f"{given.resume} has {saved.replicas} replicas, but torchrun starts {world_size} ranks")
    own = {name: getattr(given, name) for name in named & set(FREE)}
    fresh = {"quiet": given.quiet, "json": given.json, "overwrite": False, "out": given.resume, "resume": given.resume}
    return dataclasses.replace(saved, **{**own, **fresh})


def _train_here(config: TrainConfig) -> int:
    from thinwire.training.launch import launch

    is_resumed = config.resume is not None
    if is_resumed and (config.run_dir / "summary.json").exists():
        _say(f"the run in {config.run_dir} has finished; this is its result")
        return _show(config, json.loads((config.run_dir / "summary.json").read_text()))
    with _ended_by_sigterm():
        try:
            code = _prepare(config)
            if code:
                return code
            with _view(config, replicas=config.num_replicas):
                summary = launch(config, module="thinwire.cli.worker", is_resumed=is_resumed)
        except KeyboardInterrupt:
            # between the words and the first replica; from there on the launcher takes the signal
            return _fail(128 + signal.SIGINT, "stopped before training began")
        except Stopped as stop:
            _say(f"{stop}; all replicas have ended. Go on with: thinwire train --resume {config.run_dir}")
            return 128 + stop.signal_number
        except WorkerFailed as error:
            return _fail(FAILED, f"{error}. Go on with: thinwire train --resume {config.run_dir}")
    return _show(config, _report(config, summary))


def _prepare(config: TrainConfig) -> int:
    """Read the data and make the run's folder; return an exit code, 0 to go on."""
    from thinwire.training.launch import step_to_resume
    from thinwire.training.worker import check_data, make_run_folder, occupied, open_data

    is_resumed = config.resume is not None
    if not is_resumed and not config.overwrite and (config.run_dir / "config.json").exists():
        return _fail(USAGE, occupied(config.run_dir))
    if not config.quiet:
        _say(f"reading {config.data}")
    try:
        check_data(config, open_data(config))
    except DataError as error:
        return _fail(USAGE, error)
    step, warnings = step_to_resume(config) if is_resumed else (0, [])
    for warning in warnings:
        _say(f"warning: {warning}")
    if is_resumed and not config.quiet:
        _say(f"going on from step {step}")
    make_run_folder(dataclasses.replace(config, resume=None, overwrite=False), is_resumed=is_resumed)
    return 0


def _train_under_torchrun(config: TrainConfig) -> int:
    from thinwire.training.worker import Place, run_replica

    is_resumed = config.resume is not None
    place = Place(local_rank=int(os.environ.get("LOCAL_RANK", "0")), is_resumed=is_resumed)
    plain = dataclasses.replace(config, resume=None)
    with _view(config, replicas=1 if os.environ["RANK"] == "0" else 0):
        summary = run_replica(plain, place=place, warn=lambda text: _say(f"warning: {text}"))
    return 0 if summary is None else _show(config, _report(config, summary))


def _report(config: TrainConfig, summary: dict[str, Any]) -> dict[str, Any]:
    """Write `report.html`; a run whose report fails has still succeeded."""
    from thinwire.training.reporting.report import write_report

    try:
        write_report(config.run_dir)
    except (ThinwireError, OSError) as error:
        _say(f"warning: no report.html: {error}")
    return summary


def _show(config: TrainConfig, summary: dict[str, Any]) -> int:
    from rich.console import Console

    from thinwire.cli.tables import final_table

    Console(stderr=config.json, soft_wrap=True).print(final_table(summary))
    if config.json:
        print(json.dumps(summary), flush=True)
    return 0


def _view(config: TrainConfig, *, replicas: int) -> contextlib.AbstractContextManager[Any]:
    from thinwire.cli.view import LiveView

    if config.quiet or not replicas:
        return contextlib.nullcontext()
    return LiveView(config.run_dir, replicas=replicas, total_steps=config.steps)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """While no launcher takes it, SIGTERM unwinds as Ctrl-C does, so that no temporary file is left."""

    def stop(number: int, frame: object) -> NoReturn:
        _say("stopped by SIGTERM")
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _world_size() -> int | None:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    text = os.environ["WORLD_SIZE"]
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"WORLD_SIZE must be a whole number of at least 1, got {text!r}")
    return int(text)


def _is_named(name: str, arguments: Sequence[str]) -> bool:
    flag = name.replace("_", "-")
    heads = {word.split("=", 1)[0].replace("_", "-") for word in arguments if word.startswith("--")}
    return f"--{flag}" in heads or f"--no-{flag}" in heads


def _one_line(text: str) -> str:
    """Press the parser's panel into one line: what is wrong, and what was meant perhaps."""
    lines = [re.sub(r"^[│|]?\s*(.*?)\s*[│|]?$", r"\1", line) for line in text.splitlines()]
    parts = "\n".join(line for line in lines if not line.startswith(("╭", "╰"))).split("───")
    problem = " ".join(parts[0].split())
    meant = re.search(r"Perhaps you meant:\s*(--[\w-]+)", text.replace("│", " "))
    hint = f"; did you mean {meant.group(1)}?" if meant else ""
    return f"{problem}{hint}; see thinwire train --help"


def _say(text: str) -> None:
    print(f"thinwire: {text}", file=sys.stderr, flush=True)


def _fail(code: int, error: object, *, is_told: bool = True) -> int:
    text = " ".join(str(error).split())
    if is_told:
        print(f"thinwire train: error: {text}", file=sys.stderr, flush=True)
    return code
