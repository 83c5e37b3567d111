"""`thinwire train`: trains one model on several replicas, started here or by torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from thinwire.cli.argument_parsing import FAILED, USAGE, file_error, is_help_wanted
from thinwire.cli.output import ReaderGone, log, log_nothing, print_error
from thinwire.cli.process_names import exit_with_parent, process_of
from thinwire.cli.run_watchdog import watchdog_process, watched_run
from thinwire.cli.train_options import (
    adopt_launcher,
    expand_config_file,
    local_replicas,
    parse,
    settle,
    train_help,
    world_size,
)
from thinwire.cli.train_plan import planned
from thinwire.codec_specs import delta_memory_bytes
from thinwire.errors import CheckpointError, DataError, Stopped, ThinwireError, WorkerFailed, refusal
from thinwire.files import MOST_PLAN_BYTES, read_json
from thinwire.training.config import TrainConfig, command_line, has_run, validate
from thinwire.training.parallel_config import EXPERIMENTAL_SKIP
from thinwire.transport.secret import need_pyzmq, read_secret
from thinwire.workloads.cards import LANGUAGE, card_of
from thinwire.workloads.language.sources import check_source

if TYPE_CHECKING:
    from thinwire.planning.plan import Plan


def main(arguments: Sequence[str]) -> int:
    """Run `thinwire train`.

    Returns:
        0, 1 for what went wrong while running, 2 for wrong options, 128 + N for signal N.
    """
    if is_help_wanted(arguments):
        print(train_help())
        return 0
    has_begun = False
    try:
        adopt_launcher()
        config, plan = _settled(arguments)
        has_begun = True
        return _train_here(config) if world_size() is None else _train_under_torchrun(config, plan)
    except ReaderGone:
        raise
    except (ValueError, ThinwireError, OSError) as error:
        # the ranks of a host are given the same arguments: the first one reports what is wrong with them
        if has_begun or os.environ.get("LOCAL_RANK", "0") == "0":
            print_errors(file_error(error) if isinstance(error, OSError) else error)
        return USAGE if isinstance(error, ValueError) else FAILED


def _settled(arguments: Sequence[str]) -> tuple[TrainConfig, Plan | None]:
    """Return the options of the run, checked, and the plan where one was made just now."""
    arguments = expand_config_file(arguments)
    given = parse(arguments)
    check_early(given)
    is_quiet = os.environ.get("LOCAL_RANK", "0") != "0" or "--quiet" in arguments
    given, plan = planned(given, arguments, say=log_nothing if is_quiet else log)
    config = settle(given, arguments)
    validate(config, world_size=world_size())
    if config.parallel.skip and not is_quiet:
        log(f"warning: {EXPERIMENTAL_SKIP}")
    if config.run.secret is not None:
        need_pyzmq()
        read_secret(config.run.secret)
    # named as torch's own compiler for CPUs finds it
    compiler = os.environ.get("CXX") or "g++"
    if config.model.compile and config.model.device == "cpu" and shutil.which(compiler) is None:
        raise refusal(
            "--compile needs a C++ compiler", got=f"no {compiler}",
            allowed="a compiler that is installed, or one named by CXX",
            remedy="apt install g++, or leave --compile out",
        )  # fmt: skip
    if config.output.quiet:
        # of the libraries behind hf: data and models; they ask when they are imported, which is later
        for name in ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    # torch, which takes seconds: what shows without it has been refused by now
    from thinwire.training.build import check

    check(config, num_local=local_replicas(config))
    if config.elastic.is_enabled:
        from thinwire.cli.elastic_train import check_elastic

        check_elastic(config)
    if config.parallel.activation_memory is not None and world_size() is not None:
        _open_data(config, is_resumed=config.output.resume is not None)
    return config, plan


def print_errors(errors: object) -> None:
    """Print errors on stderr, a line each."""
    for line in str(errors).splitlines() or [""]:
        print_error("train", line)


def check_early(given: TrainConfig) -> None:
    """Check the options of a new run, its data and its files, without torch."""
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


def _train_here(config: TrainConfig) -> int:
    from thinwire.cli.view import LiveView
    from thinwire.training.launch import launch, step_to_resume

    is_resumed = config.output.resume is not None
    if is_resumed and (config.run_dir / "summary.json").exists():
        log(f"the run in {config.run_dir} has finished; this is its result")
        return _show(config, json.loads((config.run_dir / "summary.json").read_text()))
    config = _with_interval(config)
    with _ended_by_sigterm():
        try:
            if config.elastic.is_enabled:
                return _train_elastic(config)
            step = _prepare(config)
            with (
                LiveView(
                    config.run_dir, replicas=config.num_replicas, total_steps=config.run.steps,
                    after_step=step if is_resumed else None, quiet=config.output.quiet,
                ) as view,
                # what it reports goes through the view: a line from elsewhere would leave a second table behind
                watched_run(config, step=step, say=view.log) as watchdog,
            ):  # fmt: skip
                summary = launch(
                    config, module=process_of("replica"), is_resumed=is_resumed, say=view.log,
                    is_saving=lambda: not watchdog.why,
                )  # fmt: skip
        except KeyboardInterrupt:
            # between the words and the first replica; from there on the launcher takes the signal
            return _fail(128 + signal.SIGINT, "stopped before training began")
        except Stopped as stop:
            if watchdog.why:
                return _fail(FAILED, f"the run was ended because of a finding: {watchdog.why}")
            try:
                step, _ = step_to_resume(config)
                where = f"from step {step}" if step else "from the beginning"
                how = f"Go on {where} with: thinwire train --resume {config.run_dir}"
            except CheckpointError as error:
                how = str(error)
            log(f"{stop}; all replicas have ended. {how}")
            return 128 + stop.signal_number
        except WorkerFailed as error:
            return _fail(FAILED, f"{error}. Go on with: thinwire train --resume {config.run_dir}")
    return _finish(config, summary)


def _train_elastic(config: TrainConfig) -> int:
    from thinwire.cli.elastic_run import alone_in
    from thinwire.cli.elastic_train import keep_newest, prepare, run

    _check_folder(config)
    with alone_in(config.run_dir):
        begun = prepare(config)
        if not config.output.quiet:
            log(f"reading {begun.local.data or config.data.source}, writing to {config.run_dir}")
        _open_data(begun.local.apply(config).replace(out=config.run_dir), is_resumed=config.output.resume is not None)
        code, summary = run(begun)
    if code and code != FAILED:
        try:
            step = keep_newest(begun)
        except (ThinwireError, OSError) as error:
            log(f"no checkpoint of what the replicas kept: {error}")
        else:
            log(f"go on from step {step} with: thinwire train --resume {config.run_dir}")
    return code if summary is None else _finish(config, summary)


def _check_folder(config: TrainConfig) -> None:
    """Refuse to replace a run without --overwrite."""
    from thinwire.training.worker import occupied

    if config.output.resume is None and not config.output.overwrite and has_run(config.run_dir):
        raise ValueError(occupied(config.run_dir))


def _open_data(config: TrainConfig, *, is_resumed: bool) -> str:
    """Read the data, which must be that of the run, and return its hash."""
    from thinwire.training.run_origin import check_corpus

    try:
        data: Any = config.workload.open_data(config)
        if is_resumed:
            check_corpus(config, data.sha256)
    except DataError as error:
        raise ValueError(str(error)) from error
    if config.parallel.activation_memory is not None:
        _check_memory(config, num_tokens=len(data.train))
    return str(data.sha256)


def _check_memory(config: TrainConfig, *, num_tokens: int) -> None:
    """Print what the copies of all windows take at each border, or refuse it."""
    from thinwire.units import format_bytes
    from thinwire.workloads.language import preset

    assert config.model.seq_len is not None and config.data.batch_size is not None, "they are resolved"
    width = preset(config.model.name, max_seq_len=config.model.seq_len).dim
    count = (num_tokens - 1) // config.model.seq_len
    num_bytes = delta_memory_bytes(count + config.data.batch_size, config.model.seq_len * width)
    most = config.parallel.most_memory_bytes
    if num_bytes > most:
        raise refusal("--activation-memory does not hold the copies of all windows", got=format_bytes(most),
                      allowed=f"{format_bytes(num_bytes)} for {count:,} windows",
                      remedy=f"--activation-memory {num_bytes}, or less text")  # fmt: skip
    if not config.output.quiet and os.environ.get("RANK", "0") == "0":
        log(f"differences to the last visit of {count:,} windows take {format_bytes(num_bytes)} on each side of each "
            f"border")  # fmt: skip


def _prepare(config: TrainConfig) -> int:
    """Read the data and make the run's folder; return the step to go on from."""
    from thinwire.runlog.run_identity import new_identity, read_identity
    from thinwire.training.launch import rank_folder, step_to_resume
    from thinwire.training.run_origin import keep_corpus
    from thinwire.training.worker import make_run_folder

    _check_folder(config)
    is_resumed = config.output.resume is not None
    if not config.output.quiet:
        log(f"reading {config.data.source}, writing to {config.run_dir}")
        for line in remarks(config):
            log(line)
    corpus = _open_data(config, is_resumed=is_resumed)
    step, warnings = step_to_resume(config) if is_resumed else (0, [])
    for warning in warnings:
        log(f"warning: {warning}")
    if is_resumed and not config.output.quiet:
        log(f"going on from step {step}")
    run = read_identity(config.run_dir) if is_resumed else new_identity(config_digest=config.digest())
    plain = config.replace(resume=None, overwrite=False)
    for rank in range(config.parallel.ranks):
        own = plain.replace(out=rank_folder(config.run_dir, rank))
        make_run_folder(own, run=run, is_resumed=is_resumed)
    keep_corpus(config, corpus)
    return step


def remarks(config: TrainConfig) -> list[str]:
    """Return a line about options that leave little to exchange, and one about what anyone between sites can read."""
    return [*_open_border(config), *_little_exchange(config)]


def _open_border(config: TrainConfig) -> list[str]:
    if config.run.secret is not None or len(set(config.parallel.sites or ())) < 2:
        return []
    return ["warning: activations and gradients cross between sites in the clear; give --secret FILE, or use a VPN"]


def _little_exchange(config: TrainConfig) -> list[str]:
    interval, steps = config.sync.sync_interval, config.run.steps
    if config.num_replicas == 1 and config.parallel.ranks == 1:
        return ["one replica trains alone and exchanges nothing; try --replicas 2, or torchrun on several hosts"]
    if config.num_replicas > 1 and interval is not None and interval > steps:
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
        log(f"a checkpoint every {config.output.checkpoint_every} steps, until it is known what one costs")
        return config
    log(chosen[1])
    return config.replace(checkpoint_every=chosen[0])


def _train_under_torchrun(config: TrainConfig, plan: Plan | None = None) -> int:
    from thinwire.cli.view import LiveView
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
    for line in _open_border(config) if is_first else ():
        log(line)
    # until the hosts agree on a step, all that is there is of an earlier part of the run
    with (
        watchdog_process(config),
        LiveView(
            config.run_dir, replicas=1, total_steps=config.run.steps,
            after_step=config.run.steps if is_resumed else None, quiet=config.output.quiet or not is_first,
        ) as view,
    ):  # fmt: skip

        def go_on(step: int) -> None:
            if is_resumed:
                view.after_step = step
            if plan is not None and is_first:
                save_plan(plan, config.run_dir / "plan.json")

        try:
            summary = run_replica(
                plain, place=place, warn=lambda text: log(f"warning: {text}"), on_start=go_on, stop=stop
            )
        except Stopped:
            if is_first:
                log(
                    f"stopped by a signal after step {stop.step}, which all replicas have saved. Go on with the same "
                    f"launcher and: thinwire train --resume {config.run_dir}"
                )
            return 128 + (stop.signal_number or signal.SIGTERM)
    return 0 if summary is None else _finish(config, summary)


def _finish(config: TrainConfig, summary: dict[str, Any]) -> int:
    """Write `report.html`, and show the result; a run whose report fails has still succeeded."""
    from thinwire.monitor.report.report import write_report

    try:
        write_report(config.run_dir, command=command_line(config))
    except (ThinwireError, OSError) as error:
        log(f"warning: no report.html: {error}")
    return _show(config, summary)


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


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """While no launcher takes it, SIGTERM unwinds as Ctrl-C does, so that no temporary file is left."""

    def stop(number: int, frame: object) -> NoReturn:
        log("stopped by SIGTERM")
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(code: int, error: object) -> int:
    print_errors(error)
    return code
