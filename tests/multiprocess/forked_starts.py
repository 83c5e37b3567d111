"""Starts of thinwire, torchrun and scripts by fork: interpreter and torch are there, which an exec loads for seconds.

A child is what exec would make of it: a process of its own parent, with the arguments, environment, folder, open files,
signal handlers and exit code that it asked for; `/proc` shows them too. Only its memory begins as a copy.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import inspect
import itertools
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_EXECUTE = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_PARAMETERS = list(inspect.signature(_EXECUTE).parameters)
# What a fork here does not imitate: whoever asks for any of it gets an exec.
_PLAIN = {
    "executable": None, "close_fds": True, "shell": False, "gid": None, "gids": None, "uid": None,
    "umask": -1, "process_group": -1,
}  # fmt: skip
_FIRST_FREE = 3
TORCHRUN = "torch.distributed.run"
# `python -c` is forked where its code holds this comment: others ask for a start with nothing loaded.
FORKED = "# begins with torch loaded"
_UNBUFFERED = "-u"  # torchrun gives it to its workers

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_shown: list[Any] = []  # the kernel reads these buffers as long as the process lives


def module_of(words: Sequence[str]) -> str:
    """Return the module of `[python, "-m", module, ...]`; "" for another command line."""
    rest = _after_python(words)
    return rest[1] if rest[:1] == ["-m"] and len(rest) > 1 else ""


def _script_of(words: Sequence[str]) -> str:
    return next((word for word in _after_python(words)[:1] if word.endswith(".py")), "")


def _code_of(words: Sequence[str]) -> str:
    rest = _after_python(words)
    return rest[1] if rest[:1] == ["-c"] and len(rest) > 1 else ""


def _after_python(words: Sequence[str]) -> list[str]:
    return list(words[2:] if words[1:2] == [_UNBUFFERED] else words[1:])


class Start:
    """What a call of `subprocess.Popen` asked for.

    Attributes:
        words: The command line, without what enters a network namespace.
        module: The module that Python runs; "" where it runs none.
        namespace: Name of the network namespace that `ip netns exec` was to enter; "" for none.
        files: stdin, stdout and stderr of the child; -1 for its parent's.
        environment: All variables of the child.
        folder: Its working directory.
        is_new_session: Whether it leads a session of its own.
        kept: Its other open files, which have the same numbers in its parent.
        enter: What it calls before it begins, such as a move onto a host; None for nothing.
    """

    def __init__(self, self_and_arguments: Sequence[Any]) -> None:
        given = dict(zip(_PARAMETERS, self_and_arguments, strict=True))
        line = given["args"]
        self.words = [] if isinstance(line, str | bytes | os.PathLike) else list(map(os.fsdecode, line))
        is_elsewhere = self.words[:3] == ["ip", "netns", "exec"]
        self.namespace = "".join(self.words[3:4]) if is_elsewhere else ""
        self.words = self.words[4:] if is_elsewhere else self.words
        is_plain = all(given.get(name, value) == value for name, value in _PLAIN.items())
        # an interpreter's own start is what these command lines are not about; any other is
        self.module = module_of(self.words)
        self.environment = dict(os.environ if given["env"] is None else given["env"])
        is_known = self.module.startswith("thinwire.") or self.module == TORCHRUN or self._is_of_a_test()
        self.can_fork = is_plain and self.words[:1] == [sys.executable] and is_known
        self.files = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        self.pipes = [given[f"{pipe}{end}"] for pipe in ("p2c", "c2p", "err") for end in ("read", "write")]
        self.folder = os.path.realpath(given["cwd"] or ".")
        self.is_new_session = bool(given["start_new_session"])
        self.kept = sorted(given["pass_fds"])
        self.enter: Callable[[], object] | None = given["preexec_fn"]

    def _is_of_a_test(self) -> bool:
        """Whether this runs a script, a module in a folder that a test named, or code that allows the fork."""
        folders = self.environment.get("PYTHONPATH", "").split(os.pathsep)
        return (
            _script_of(self.words) != ""
            or FORKED in _code_of(self.words)
            or (bool(self.module) and any(Path(folder, f"{self.module}.py").is_file() for folder in folders if folder))
        )


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` in a process that has imported torch: what it starts of thinwire is forked from itself."""

    def _execute_child(self, *arguments: Any) -> None:
        start = Start((self, *arguments))
        if not start.can_fork or start.namespace:
            _EXECUTE(self, *arguments)
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        became, becomes = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _live_as(start)
        self._child_created = True
        os.close(becomes)
        os.read(became, 1)  # whoever looks at the child from here on sees what it is to be
        os.close(became)
        self._close_pipe_fds(*start.pipes)  # type: ignore[attr-defined]


def become(
    words: Sequence[str], *, environment: Mapping[str, str], folder: str, is_new_session: bool,
    enter: Callable[[], object] | None = None,
) -> None:  # fmt: skip
    """Take over what a new process has of its own, besides its open files.

    Args:
        words: The command line, `[python, "-m", module, ...]`.
        environment: All its variables.
        folder: Its working directory.
        is_new_session: Whether it leads a session of its own.
        enter: What it calls in that folder.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_new_session:
        os.setsid()
    os.chdir(folder)
    if enter is not None:
        enter()
    os.environ.clear()
    os.environ.update(environment)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    if not _show(words, environment):
        os.execvpe(words[0], list(words), dict(environment))  # where the kernel does not let it: slower, and the same
    # torch asks for the compiler when it is imported, which was before there was this environment
    if "torch._inductor" in sys.modules:
        sys.modules["torch"]._inductor.config.cpp.cxx = (None, environment.get("CXX", "g++"))


def run_program(words: Sequence[str]) -> None:
    """Run `[python, "-m", module, ...]`, a script or `-c` as Python does; raises SystemExit where it does."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.orig_argv[:] = words
    module, script = module_of(words), _script_of(words)
    folder = Path(script).resolve().parent if script else Path.cwd()
    sys.path[:] = [str(folder), *paths, *(path for path in sys.path[1:] if path not in paths)]
    first = next((file for path in paths if (file := Path(path, "sitecustomize.py")).is_file()), None)
    loaded = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    if first is not None and str(first) != loaded:
        runpy.run_path(str(first))
    if words[1:2] == [_UNBUFFERED]:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if script:
        sys.argv[:] = _after_python(words)
        runpy.run_path(script, run_name="__main__")
        return
    sys.argv[:] = _after_python(words)[1:]
    if _code_of(words):
        sys.argv[0] = "-c"
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(_code_of(words), "<string>", "exec"), vars(main))
        return
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _live_as(start: Start) -> NoReturn:
    def live() -> None:
        gc.freeze()  # objects of the parent own numbers of files that belong to others soon
        atexit._clear()
        getattr(threading, "_threading_atexits", []).clear()
        copies = [os.dup(own if file == -1 else file) for own, file in enumerate(start.files)]
        for number, copy in enumerate(_moved(copies)):
            os.dup2(copy, number)
        _open_streams()
        become(
            start.words, environment=start.environment, folder=start.folder, is_new_session=start.is_new_session,
            enter=start.enter,
        )  # fmt: skip
        for low, high in itertools.pairwise([_FIRST_FREE - 1, *start.kept, os.sysconf("SC_OPEN_MAX")]):
            os.closerange(low + 1, high)
        run_program(start.words)

    run_to_the_end(live)


def run_to_the_end(live: Callable[[], object]) -> NoReturn:
    """Run what a forked process is for, and all that runs at an interpreter's end.

    Memory is not cleared object by object: nearly all of it is a copy, and that would take a third of a second.
    """
    code: Any = 1
    try:
        try:
            code = live()
        except SystemExit as end:
            code = end.code
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        if isinstance(code, str):
            print(code, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _moved(files: Sequence[int]) -> list[int]:
    """Return copies with numbers above those of stdin, stdout and stderr."""
    return [file if file >= _FIRST_FREE else _moved([os.dup(file)])[0] for file in files]


def _open_streams() -> None:
    for root in logging.root.handlers[:]:
        logging.root.removeHandler(root)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        is_error = name == "stderr"
        stream = open(  # noqa: SIM115 - open to the end, and no path
            number, "w" if number else "r", encoding="utf-8", closefd=False,
            buffering=1 if is_error else -1, errors="backslashreplace" if is_error else "strict",
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _Map(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack", "arg_start",
            "arg_end", "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32), ("exe_fd", ctypes.c_uint32),
    ]  # fmt: skip


def _show(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Let `/proc` show a command line and an environment; return whether the kernel allows it."""
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    # numbers as in proc(5), which counts from 1; the second field may hold blanks
    fields = [0, 0, 0, *Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()]
    texts = [
        os.fsencode("\0".join(lines)) for lines in (words, [f"{name}={environment[name]}" for name in environment])
    ]
    buffers = [ctypes.create_string_buffer(text) for text in texts]  # each ends with a zero
    places = [(ctypes.addressof(buffer), ctypes.addressof(buffer) + len(buffer)) for buffer in buffers]
    code, data = (int(fields[26]), int(fields[27])), (int(fields[45]), int(fields[46]))
    wanted = _Map(
        *code, *data, int(fields[47]), libc.sbrk(0), int(fields[28]), *places[0], *places[1], 0, 0, 0xFFFFFFFF
    )
    _shown[:] = buffers
    return libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(wanted), ctypes.sizeof(wanted), 0) == 0
