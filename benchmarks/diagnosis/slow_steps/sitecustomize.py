"""Makes the steps of a replica take longer by what a file holds just now, so that many fit on a core.

The file holds up to four numbers: seconds more a step, how many times as long all of it takes (1), and that every so
many steps (0: never) one takes so many times as long.
"""

import itertools
import os
import sys
import time
from pathlib import Path

_FILE = os.environ.get("LAB_STEP_FILE", "")
_REPLICAS = {"thinwire.cli.main", "replica", "elastic-replica", "standby-replica"}

if _FILE and _REPLICAS.intersection(sys.orig_argv[2:4]):
    from thinwire.training.loop import LocalPasses

    _backward = LocalPasses.backward
    _steps = itertools.count()

    def _slow_backward(self: LocalPasses, *arguments: object, **rest: float) -> object:
        begun_s = time.monotonic()
        done = _backward(self, *arguments, **rest)
        told = [float(word) for word in Path(_FILE).read_text().split()]
        step_s, times, every, longer = [*told, *(0.0, 1.0, 0.0, 1.0)[len(told) :]]
        if every and next(_steps) % every == 0:
            times *= longer
        time.sleep(times * step_s + (times - 1) * (time.monotonic() - begun_s))
        return done

    LocalPasses.backward = _slow_backward
