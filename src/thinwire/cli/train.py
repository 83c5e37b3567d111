"""`thinwire train`: trains one model on several replicas, started here or by torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from thinwire.cli.help_text import is_help_wanted
from thinwire.cli.process_names import REPLICA, exit_with_parent
from thinwire.cli.run_watchdog import watchdog_process, watched_run
from thinwire.cli.train_options import (
    adopt_launcher,
    expand_config_file,
    expand_method_options,
    local_replicas,
    parse,
    settle,
    train_help,
    world_size,
)
from thinwire.cli.train_plan import planned
from thinwire.errors import CheckpointError, DataError, Stopped, ThinwireError, WorkerFailed, refusal
from thinwire.files import MOST_PLAN_BYTES, read_json
from thinwire.training.config import TrainConfig, command_line, has_run, validate
from thinwire.transport.secret import need_pyzmq
from thinwire.workloads.cards import LANGUAGE, card_of
from thinwire.workloads.language.sources import check_source

if TYPE_CHECKING:
    from thinwire.cli.view import LiveView
    from thinwire.planning.plan import Plan

USAGE, FAILED = 2, 1


def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire train --help`.

    Returns:
        0, 1 for what went wrong while running, 2 for wrong options, 128 + N for signal N.
    """
    if is_help_wanted(arguments):
        print(train_help())
        return 0
    try:
        adopt_launcher()
    except ValueError as error:
        return _fail(USAGE, error)
    is_told = os.environ.get("LOCAL_RANK", "0") == "0"  # the ranks of a host are given the same words
    try:
        arguments = expand_method_options(expand_config_file(arguments))
        given = parse(arguments)
        check_early(given)
        given, plan = planned(given, arguments, say=_log if is_told and "--quiet" not in arguments else _log_nothing)
        config = settle(given, arguments)
        validate(config, world_size=world_size())
        _check_secret(config)
        _check_compiler(config)
        if config.output.quiet:
            _hide_progress_bars()
        # torch, which takes seconds: what shows without it has been refused by now
        from thinwire.training.build import check

        check(config, num_local=local_replicas(config))
        if config.elastic.is_enabled:
            from thinwire.cli.elastic_train import check_elastic

            check_elastic(config)
    except ValueError as error:
        return _fail(USAGE, error, is_told=is_told)
    except ThinwireError as error:
        return _fail(FAILED, error, is_told=is_told)
    try:
        return _train_here(config) if world_size() is None else _train_under_torchrun(config, plan)
    except ValueError as error:
        return _fail(USAGE, error)
    except ThinwireError as error:
        return _fail(FAILED, error)
    except OSError as error:
        return _fail(FAILED, f"{error.strerror or error}: {error.filename}" if error.filename else error)


def check_early(given: TrainConfig) -> None:
    """Check the options of a new run, its data and its files, without torch.

    Raises:
        ValueError: An option, or there is no such data; one line a problem.
        ThinwireError: The plan cannot be read, or what reads the data is not installed.
    """
    if given.output.resume is not None:
        return  # a resumed run has options of its own
    validate(given, world_size=world_size())
    if given.run.plan is not None:
        read_json(given.run.plan, most_bytes=MOST_PLAN_BYTES, command="thinwire plan")
    if given.elastic.is_enabled:
        need_pyzmq()
    workload = card_of(given.run.workload)
    workload.check_installed()
    if workload is not LANGUAGE:
        return
    try:
        check_source(given.data.source)
    except DataError as error:
        raise ValueError(str(error)) from error


def _check_compiler(config: TrainConfig) -> None:
    # named as torch's own compiler for CPUs finds it
    name = os.environ.get("CXX") or "g++"
    if config.model.compile and config.model.device == "cpu" and shutil.which(name) is None:
        raise refusal(
            "--compile needs a C++ compiler", got=f"no {name}",
            allowed="a compiler that is installed, or one named by CXX",
            remedy="apt install g++, or leave --compile out",
        )  # fmt: skip


def _check_secret(config: TrainConfig) -> None:
    if config.run.secret is not None:
        from thinwire.transport.secret import read_secret

        need_pyzmq()
        read_secret(config.run.secret)


def _hide_progress_bars() -> None:
    # of the libraries behind hf: data and models; they ask when they are imported, which is later
    for name in ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")


def _train_here(config: TrainConfig) -> int:
    from thinwire.training.launch import launch

    is_resumed = config.output.resume is not None
    if is_resumed and (config.run_dir / "summary.json").exists():
        _log(f"the run in {config.run_dir} has finished; this is its result")
        return _show(config, json.loads((config.run_dir / "summary.json").read_text()))
    config = _with_interval(config)
    with _ended_by_sigterm():
        try:
            if config.elastic.is_enabled:
                return _train_elastic(config)
            code, step = _prepare(config)
            if code:
                return code
            with (
                _view(config, replicas=config.num_replicas, after_step=step if is_resumed else None) as view,
                # what it reports goes through the view: a line from elsewhere would leave a second table behind
                watched_run(config, step=step, say=_log if view is None else _log_above(view)) as watchdog,
            ):
                summary = launch(
                    config, module=REPLICA, is_resumed=is_resumed, say=_log if view is None else _log_above(view),
                    is_saving=lambda: not watchdog.why,
                )  # fmt: skip
        except KeyboardInterrupt:
            # between the words and the first replica; from there on the launcher takes the signal
            return _fail(128 + signal.SIGINT, "stopped before training began")
        except Stopped as stop:
            if watchdog.why:
                return _fail(FAILED, f"the run was ended because of a finding: {watchdog.why}")
            _log(f"{stop}; all replicas have ended. {_how_to_go_on(config)}")
            return 128 + stop.signal_number
        except WorkerFailed as error:
            return _fail(FAILED, f"{error}. Go on with: thinwire train --resume {config.run_dir}")
    return _show(config, _report(config, summary))


def _how_to_go_on(config: TrainConfig) -> str:
    from thinwire.training.launch import step_to_resume

    try:
        step, _ = step_to_resume(config)
    except CheckpointError as error:
        return str(error)
    return (
        f"Go on {f'from step {step}' if step else 'from the beginning'} with: thinwire train --resume {config.run_dir}"
    )


def _train_elastic(config: TrainConfig) -> int:
    from thinwire.cli.elastic_run import alone_in
    from thinwire.cli.elastic_train import keep_newest, prepare, run
    from thinwire.training.run_origin import check_corpus
    from thinwire.training.worker import occupied

    if config.output.resume is None and not config.output.overwrite and has_run(config.run_dir):
        return _fail(USAGE, occupied(config.run_dir))
    with alone_in(config.run_dir):
        begun = prepare(config)
        if not config.output.quiet:
            _log(f"reading {begun.local.data or config.data.source}, writing to {config.run_dir}")
        here = begun.local.apply(config)
        try:
            data = here.workload.open_data(here)
            if config.output.resume is not None:
                check_corpus(here.replace(out=config.run_dir), data.sha256)
        except DataError as error:
            return _fail(USAGE, error)
        code, summary = run(begun)
    if code and code != FAILED:
        try:
            step = keep_newest(begun)
        except (ThinwireError, OSError) as error:
            _log(f"no checkpoint of what the replicas kept: {error}")
        else:
            _log(f"go on from step {step} with: thinwire train --resume {config.run_dir}")
    return code if summary is None else _show(config, _report(config, summary))


def _prepare(config: TrainConfig) -> tuple[int, int]:
    """Read the data and make the run's folder; return an exit code, 0 to go on, and the step to go on from."""
    from thinwire.runlog.run_identity import new_identity, read_identity
    from thinwire.training.launch import rank_folder, step_to_resume
    from thinwire.training.run_origin import check_corpus, keep_corpus
    from thinwire.training.worker import make_run_folder, occupied

    is_resumed = config.output.resume is not None
    if not is_resumed and not config.output.overwrite and has_run(config.run_dir):
        return _fail(USAGE, occupied(config.run_dir)), 0
    if not config.output.quiet:
        _log(f"reading {config.data.source}, writing to {config.run_dir}")
        for line in remarks(config):
            _log(line)
    try:
        data = config.workload.open_data(config)
        if is_resumed:
            check_corpus(config, data.sha256)
    except DataError as error:
        return _fail(USAGE, error), 0
    step, warnings = step_to_resume(config) if is_resumed else (0, [])
    for warning in warnings:
        _log(f"warning: {warning}")
    if is_resumed and not config.output.quiet:
        _log(f"going on from step {step}")
    run = read_identity(config.run_dir) if is_resumed else new_identity(config_digest=config.digest())
    plain = config.replace(resume=None, overwrite=False)
    for rank in range(config.parallel.ranks):
        own = plain.replace(out=rank_folder(config.run_dir, rank))
        make_run_folder(own, run=run, is_resumed=is_resumed)
    keep_corpus(config, data.sha256)
    return 0, step


def remarks(config: TrainConfig) -> list[str]:
    """Return a line about options that leave little to exchange."""
    interval, steps = config.sync.sync_interval, config.run.steps
    if config.num_replicas == 1:
        return ["one replica trains alone and exchanges nothing; try --replicas 2, or torchrun on several hosts"]
    if interval is not None and interval > steps:
        when = "once, at the end" if config.sync.final_exchange else "never"
        return [f"--sync-interval {interval} is above --steps {steps}: replicas exchange {when}"]
    return []


def _with_interval(config: TrainConfig) -> TrainConfig:
    """Return the options with the steps between checkpoints that earlier parts of the run speak for."""
    from thinwire.runlog.attempts import chosen_interval

    if not config.output.checkpoint_auto:
        return config
    chosen = chosen_interval(config.run_dir) if config.output.resume is not None else None
    if chosen is None:
        _log(f"a checkpoint every {config.output.checkpoint_every} steps, until it is known what one costs")
        return config
    _log(chosen[1])
    return config.replace(checkpoint_every=chosen[0])


def _train_under_torchrun(config: TrainConfig, plan: Plan | None = None) -> int:
    from thinwire.planning.plan import save_plan
    from thinwire.training.agreed_stop import NetworkStop
    from thinwire.training.worker import ReplicaStart, run_replica

    stop = NetworkStop()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop.request)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent is the parent; other launchers may come and go
        exit_with_parent(os.getppid())
    is_resumed = config.output.resume is not None
    place = ReplicaStart(local_rank=int(os.environ.get("LOCAL_RANK", "0")), is_resumed=is_resumed)
    plain = config.replace(resume=None)
    is_first = os.environ["RANK"] == "0"  # ranks that share a replica get other numbers as they join
    replicas = 1 if is_first else 0
    # until the hosts agree on a step, all that is there is of an earlier part of the run
    with (
        watchdog_process(config),
        _view(config, replicas=replicas, after_step=config.run.steps if is_resumed else None) as view,
    ):

        def go_on(step: int) -> None:
            if view is not None and is_resumed:
                view.after_step = step
            if plan is not None and is_first:
                save_plan(plan, config.run_dir / "plan.json")

        try:
            summary = run_replica(
                plain, place=place, warn=lambda text: _log(f"warning: {text}"), on_start=go_on, stop=stop
            )
        except Stopped:
            if is_first:
                _log(
                    f"stopped by a signal after step {stop.step}, which all replicas have saved. Go on with the same "
                    f"launcher and: thinwire train --resume {config.run_dir}"
                )
            return 128 + (stop.signal_number or signal.SIGTERM)
    return 0 if summary is None else _show(config, _report(config, summary))


def _report(config: TrainConfig, summary: dict[str, Any]) -> dict[str, Any]:
    """Write `report.html`; a run whose report fails has still succeeded."""
    from thinwire.monitor.report.report import write_report

    try:
        write_report(config.run_dir, command=command_line(config))
    except (ThinwireError, OSError) as error:
        _log(f"warning: no report.html: {error}")
    return summary


def _show(config: TrainConfig, summary: dict[str, Any]) -> int:
    from rich.console import Console

    from thinwire.cli.tables import final_table, plain, sample_lines

    console = Console(stderr=config.output.json, soft_wrap=True)
    console.print(final_table(summary))
    for line in sample_lines(config.run_dir) if config.output.samples else ():
        console.print(plain(line))
    if config.output.json:
        print(json.dumps(summary), flush=True)
    return 0


def _view(config: TrainConfig, *, replicas: int, after_step: int | None) -> contextlib.AbstractContextManager[Any]:
    from thinwire.cli.view import LiveView

    if config.output.quiet or not replicas:
        return contextlib.nullcontext()
    return LiveView(config.run_dir, replicas=replicas, total_steps=config.run.steps, after_step=after_step)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """While no launcher takes it, SIGTERM unwinds as Ctrl-C does, so that no temporary file is left."""

    def stop(number: int, frame: object) -> NoReturn:
        _log("stopped by SIGTERM")
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _log_above(view: LiveView) -> Callable[[str], None]:
    return lambda text: view.print(f"thinwire: {text}")


def _log_nothing(text: str) -> None:
    """Print nothing: a quiet run, or a rank of a host that is not its first."""


def _log(text: str) -> None:
    print(f"thinwire: {text}", file=sys.stderr, flush=True)


def _fail(code: int, error: object, *, is_told: bool = True) -> int:
    if is_told:
        for line in str(error).splitlines() or [""]:
            print(f"thinwire train: error: {' '.join(line.split())}", file=sys.stderr, flush=True)
    return code
