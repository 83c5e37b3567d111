"""`thinwire run`: an unmodified training script as several replicas, on this machine or under a launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from thinwire.cli.argument_parsing import FAILED, argument, command, is_help_wanted, options_of, parse_options
from thinwire.cli.output import log, print_error, printable
from thinwire.cli.process_names import process_of
from thinwire.cli.train_options import adopt_launcher, world_size
from thinwire.errors import ThinwireError, excluded, refusal

_BASIC = "replicas method data_split explain"
# The number of a process that `--replicas` has started; it starts no others.
_INDEX = "THINWIRE_RUN_INDEX"
_POLL_S, _STOP_S = 0.05, 10.0
_LAST_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions:
    """Run a training script of others as several replicas, without a changed line.

    TARGET is script.py, -m MODULE, or a command that a package has installed, such as trl; all that follows is for it.
    The script's Trainer (transformers, TRL, sentence-transformers), Accelerator or lightning.Trainer is joined to the
    others; a loop that none of them drives is refused at its first step.

    Start it with --replicas on this machine, or by torchrun, srun or mpirun with one process a replica.
    """

    target: str = argument("TARGET [ARGS]...", "")
    """Script, -m MODULE or command, and its arguments."""
    replicas: int | None = None
    """Number of replicas to start on this machine, instead of a launcher."""
    method: str = "streaming-diloco"
    """Method of the exchange; see thinwire methods."""
    method_option: tuple[str, ...] = argument("NAME=VALUE", (), is_positional=False)
    """Option of the method, such as sync_interval=20; may be given several times."""
    data_split: Literal["auto", "all", "none"] = "auto"
    """Data that replicas share out: auto is that of trainers, and loaders that shuffle; all is every loader."""
    elastic: str | None = argument("URI", None, is_positional=False)
    """Address of an elastic run, which replicas join and leave: HOST:PORT, or what thinwire secret has printed."""
    secret: Path | None = None
    """File of the job's secret, the same on all hosts; see thinwire secret."""
    out: Path | None = None
    """Folder of the replicas' logs and results. Default: runs/ and the target's name."""
    explain: bool = False
    """List every change that was made to a library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Program of others, found but not imported."""

    kind: Literal["script", "module", "command"]
    name: str
    arguments: tuple[str, ...]
    entry: EntryPoint | None = None

    def run(self) -> None:
        """Run it as Python would, in this process, as the main module."""
        sys.argv = [self.name, *self.arguments]
        if self.kind == "script":
            sys.path[0] = str(Path(self.name).resolve().parent)
            runpy.run_path(self.name, run_name="__main__")
        elif self.kind == "module":
            sys.path[0] = str(Path.cwd())
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            assert self.entry is not None
            sys.exit(self.entry.load()())


@command("run")
def main(arguments: Sequence[str]) -> int:
    """Run `thinwire run`.

    Returns:
        0, 1 where a replica failed, 2 for wrong options or a loop that is refused, 128 + N for signal N; under a
        launcher the script's own exit code.
    """
    own, rest = _divide(arguments)
    if is_help_wanted(own):
        own = ["--help"]
    options = parse_options(ScriptOptions, own, prog="thinwire run", basic=_BASIC)
    target = _find(rest)
    adopt_launcher()
    ranks, is_started = world_size(), _INDEX in os.environ
    if options.replicas is not None and ranks is not None and not is_started:
        raise excluded("--replicas", "torchrun", why=f"it has started {ranks} ranks", remedy="to leave --replicas out")
    if options.elastic is not None and ranks is not None:
        raise excluded("--elastic", "torchrun", why="its replicas come one by one", remedy="to start without torchrun")
    if options.replicas is None and ranks is None and options.elastic is None:
        raise refusal("one process alone is no replica of several", got="no --replicas, --elastic or launcher",
                      allowed="one of them", remedy="--replicas 2")  # fmt: skip
    if options.replicas is not None and not 1 <= options.replicas <= 64:
        raise refusal("--replicas is out of its range", got=options.replicas, allowed="1 to 64", remedy="--replicas 2")
    from thinwire.training.method_catalog import method_entry

    method_entry(options.method)  # refuses an unknown one before torch is imported
    out = (options.out or Path("runs") / Path(target.name).stem).absolute()  # the script may change its folder
    if options.replicas is None or is_started:
        return _run_replica(options, target, out=out)
    return _start(own, rest, replicas=options.replicas, out=out, is_elastic=options.elastic is not None)


def _divide(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of `thinwire run`, and the target with its own arguments."""
    known = {option.flag: option for option in options_of(ScriptOptions).values()}
    place = 0
    while place < len(arguments) and arguments[place].startswith("-") and arguments[place] != "-m":
        head, sign, _ = arguments[place].partition("=")
        option = known.get(head.replace("_", "-"))
        place += 1 if sign or option is None or option.kind is bool else 2
    return list(arguments[:place]), list(arguments[place:])


def _find(words: Sequence[str]) -> Target:
    """Find what is to be run.

    Raises:
        ValueError: It is neither a script, nor a module, nor an installed command.
    """
    allowed = "script.py, -m MODULE, or a command of an installed package"
    if not words or words == ["-m"]:
        raise refusal("nothing to run", got="no TARGET", allowed=allowed, remedy="thinwire run --replicas 2 train.py")
    if words[0] == "-m":
        try:
            found = importlib.util.find_spec(words[1].partition(".")[0])
        except ValueError:
            found = None
        if found is None:
            raise refusal("no such module", got=words[1], allowed=allowed, remedy="to install it into this Python")
        return Target(kind="module", name=words[1], arguments=tuple(words[2:]))
    name, rest = words[0], tuple(words[1:])
    if Path(name).is_file():
        return Target(kind="script", name=name, arguments=rest)
    entries = [] if os.sep in name else list(entry_points(group="console_scripts", name=name))
    if not entries:
        raise refusal("nothing of that name can be run", got=name, allowed=allowed, remedy="the path of the script")
    return Target(kind="command", name=name, arguments=rest, entry=entries[0])


def _run_replica(options: ScriptOptions, target: Target, *, out: Path) -> int:
    """Run the target in this process, as one replica."""
    import thinwire.methods as methods
    from thinwire.integrations.scripts import ScriptReplica
    from thinwire.transport.connect import connect

    recipe = methods.recipe(options.method)
    chosen = methods.parse_options(recipe, options.method_option)
    transport = None if options.elastic is not None else connect(solo=True, secret=options.secret)
    number = int(os.environ.get(_INDEX, "0")) if transport is None else transport.replica
    one = ScriptReplica(
        method=lambda: recipe(**chosen), transport=transport, uri=options.elastic, begin_with=options.replicas,
        data_split=options.data_split, out=out,
        report=(lambda text: log(text, command="run")) if number == 0 else (lambda text: None),
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    one.install()
    try:
        code = _exit_code(target.run)
        if code == 0:
            result = one.finish()
            (out / f"replica-{number}.json").write_text(json.dumps(asdict(result)))
    except BaseException:
        one.abandon()
        raise
    finally:
        if options.explain and number == 0:
            for patch in one.patches:
                log(f"changed {patch}", command="run")
    if code:
        one.abandon()
    if transport is not None:
        transport.close()
    return code


def _exit_code(run: Callable[[], Any]) -> int:
    """Run a program to its end; return the exit code that it asks for."""
    try:
        run()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _start(own: Sequence[str], rest: Sequence[str], *, replicas: int, out: Path, is_elastic: bool) -> int:
    """Run the replicas as processes of this machine; the first one prints here, the others into files."""
    from thinwire.training.elastic.launch import noted_signals
    from thinwire.transport.addresses import RENDEZVOUS_FILE

    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("replica-*.json"):
        old.unlink()
    command = [sys.executable, "-m", *process_of("run-replica").split(), str(os.getpid()), *own]
    command += ["--out", str(out), *rest]
    processes: list[subprocess.Popen[bytes]] = []
    threads = max(1, (os.cpu_count() or 1) // replicas)
    with (
        tempfile.TemporaryDirectory(prefix="thinwire-rendezvous-", ignore_cleanup_errors=True) as folder,
        noted_signals() as signals,
    ):
        # one order of sets, so that scripts number their labels alike
        shared = {"OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": "0", **os.environ}
        if not is_elastic:
            shared |= {"WORLD_SIZE": str(replicas), "LOCAL_WORLD_SIZE": str(replicas)}
            shared[RENDEZVOUS_FILE] = str(Path(folder) / "store")
        try:
            for number in range(replicas):
                ranks = () if is_elastic else ("RANK", "LOCAL_RANK")
                environment = shared | dict.fromkeys([_INDEX, *ranks], str(number))
                with (out / f"replica-{number}.log").open("wb") as file:
                    stream = file if number else None
                    processes.append(
                        subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
                    )
            failed = _wait(processes, signals)
        finally:
            _stop(processes)
    if signals:
        return 128 + signals[0]
    if failed is not None:
        return _report_failure(failed, processes[failed].returncode, out=out)
    return _report_end(out, replicas=replicas)


def _wait(processes: Sequence[subprocess.Popen[bytes]], signals: Sequence[int]) -> int | None:
    """Wait until all have ended well, or a signal came; return the first that has failed."""
    while not signals:
        codes = [process.poll() for process in processes]
        if failed := [number for number, code in enumerate(codes) if code]:
            return failed[0]
        if all(code == 0 for code in codes):
            return None
        time.sleep(_POLL_S)
    return None


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, number)
        until_s = time.monotonic() + _STOP_S
        while any(process.poll() is None for process in processes) and time.monotonic() < until_s:
            time.sleep(_POLL_S)


def _report_failure(number: int, code: int, *, out: Path) -> int:
    path = out / f"replica-{number}.log"
    if number:
        for line in path.read_text(errors="replace").splitlines()[-_LAST_LINES:]:
            log(f"replica {number}: {printable(line)}", command="run")
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    see = f"; see {path}" if number else ""
    print_error("run", f"replica {number} {how}; the other replicas were stopped{see}")
    return code if code > 0 else FAILED


def _report_end(out: Path, *, replicas: int) -> int:
    """Compare the results of the replicas, and print one line."""
    found = [out / f"replica-{number}.json" for number in range(replicas)]
    if missing := [path.stem for path in found if not path.exists()]:
        print_error("run", f"{missing[0]} wrote no result, though its script ended well")
        return FAILED
    results = [json.loads(path.read_text()) for path in found]
    hashes = {result["sha256"] for result in results}
    if len(hashes) > 1:
        listed = ", ".join(f"replica {r['replica']}: {r['sha256'][:16]} after {r['steps']} steps" for r in results)
        raise ThinwireError(f"the replicas ended with unequal parameters ({listed}); report this with the script")
    first = results[0]
    log(f"{replicas} replicas ended equal after {first['steps']} steps, sha256 {first['sha256'][:16]}", command="run")
    sent, others = (max(result[name] for result in results) for name in ("sent_bytes", "num_collectives"))
    log(f"sent: {sent:,} bytes each; collectives of other libraries: {others}", command="run")
    return 0
