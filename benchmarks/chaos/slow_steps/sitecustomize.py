"""Faults in the steps of a replica, by environment variables.

CHAOS_STEP_S: seconds that each step takes longer, so that many replicas fit on a core.
CHAOS_SLOWER_WHILE: a file; while it exists each step takes ten times that, so that a run does not end too early.
CHAOS_HELD_AT: a file with the number of a step; while it exists, no replica begins this step, unless the launcher stops
the run.
CHAOS_KILLED_AT: a file with the numbers of a stage and a step: a process of that stage removes it and kills itself in
its second pass of the step.
CHAOS_NAN: a folder; as long as it holds a file named by an elastic replica's process id, its gradients are NaN.
CHAOS_SHORT: such a folder for replicas whose parts are 8 bytes too short.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path

# Python loads the first sitecustomize of its path alone; one behind it, such as that of the tests, shall count too.
_HERE = Path(__file__).resolve()
_OTHERS = (Path(folder, "sitecustomize.py").resolve() for folder in sys.path)
_NEXT = next((file for file in _OTHERS if file != _HERE and file.is_file()), None)
if _NEXT is not None:
    runpy.run_path(str(_NEXT))

_ELASTIC = {"elastic-replica", "standby-replica"}
_STATIC = {"replica"}


def _sleep(training: Training) -> None:
    """Sleep before a step, for as long as it is held or is to take longer."""
    while _is_held(training):
        time.sleep(0.02)
    slower = os.environ.get("CHAOS_SLOWER_WHILE")
    is_slower = slower is not None and Path(slower).exists()
    time.sleep(float(os.environ.get("CHAOS_STEP_S", "0")) * (10 if is_slower else 1))


def _is_held(training: Training) -> bool:
    if isinstance(training.stop, AgreedStop) and training.stop._read(_STOP):
        return False
    try:
        return training.step >= int(Path(os.environ["CHAOS_HELD_AT"]).read_text())
    except (KeyError, OSError, ValueError):
        return False


_KIND = set(sys.orig_argv[3:4]) if "thinwire.cli.processes" in sys.orig_argv else set()

if _ELASTIC & _KIND and {"CHAOS_STEP_S", "CHAOS_NAN", "CHAOS_SHORT"} & set(os.environ):
    import torch

    from thinwire.elastic.round_driver import RoundDriver
    from thinwire.training.agreed_stop import _STOP, AgreedStop
    from thinwire.training.loop import LocalPasses, Training

    _plain_step, _clip, _begin = Training._plain_step, LocalPasses.clip, RoundDriver.__init__

    def _is_named_in(variable: str) -> bool:
        folder = os.environ.get(variable)
        return bool(folder) and (Path(folder) / str(os.getpid())).exists()

    def _slow_step(self: Training, *arguments: object) -> object:
        _sleep(self)
        return _plain_step(self, *arguments)

    def _spoilt_clip(self: LocalPasses) -> None:
        _clip(self)
        if _is_named_in("CHAOS_NAN"):
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))

    def _begin_short(self: RoundDriver, *, part: torch.Tensor | None, **others: object) -> None:
        is_short = part is not None and _is_named_in("CHAOS_SHORT")
        _begin(self, part=part[:-8].clone() if is_short else part, **others)

    Training._plain_step, LocalPasses.clip, RoundDriver.__init__ = _slow_step, _spoilt_clip, _begin_short

# A rank that torchrun started is no process of a launcher of thinwire.
_IS_RANK = "thinwire.cli.main" in sys.orig_argv and "RANK" in os.environ

if (_STATIC & _KIND or _IS_RANK) and "CHAOS_STEP_S" in os.environ:
    from thinwire.training.agreed_stop import _STOP, AgreedStop
    from thinwire.training.loop import Training

    _train_step = Training._train_step

    def _slow_train_step(self: Training) -> None:
        _sleep(self)
        _train_step(self)

    Training._train_step = _slow_train_step

if _STATIC & _KIND and "CHAOS_KILLED_AT" in os.environ:
    from thinwire.transport.path_runner import PathRunner, PathStep

    _pass, _passes = PathRunner._pass, list[int]()

    def _last_pass(self: PathRunner, step: PathStep, *arguments: object) -> None:
        _passes.append(step.number)
        file = Path(os.environ["CHAOS_KILLED_AT"])
        place = [self._transport.replica, step.number]
        if _passes.count(step.number) == 2 and file.exists() and file.read_text().split() == list(map(str, place)):
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        _pass(self, step, *arguments)

    PathRunner._pass = _last_pass
