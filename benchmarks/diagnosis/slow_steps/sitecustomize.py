"""Makes each step of a replica take longer by the seconds that a file holds just now, so that many fit on a core."""

import os
import sys
import time
from pathlib import Path

_FILE = os.environ.get("LAB_STEP_FILE", "")

if _FILE and "thinwire.cli.main" in sys.orig_argv:
    from thinwire.training.loop import Training

    _plain_step = Training._plain_step

    def _slow_step(self: Training, *arguments: object) -> object:
        time.sleep(float(Path(_FILE).read_text() or 0))
        return _plain_step(self, *arguments)

    Training._plain_step = _slow_step
