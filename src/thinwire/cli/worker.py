"""The process of one replica of a local run: started by `thinwire.training.launch`. Not a user command."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from thinwire.cli.launcher_end import end_with
from thinwire.cli.output import protect_output


def main(arguments: Sequence[str]) -> int:
    """Run one replica.

    Args:
        arguments: The run's folder, the launcher's process id, and `resume` or `start`.

    Returns:
        The exit code: 0, or 1 with the reason in the replica's last words.
    """
    run_dir, launcher, mode = Path(arguments[0]), int(arguments[1]), arguments[2]
    # the launcher decides when to stop, and how to say so
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # before torch, whose import takes seconds
    end_with(launcher)
    from thinwire.training.config import read_config
    from thinwire.training.launch import leave_last_words
    from thinwire.training.worker import ReplicaStart, run_replica

    try:
        place = ReplicaStart(local_rank=int(os.environ["LOCAL_RANK"]), is_prepared=True, is_resumed=mode == "resume")
        run_replica(read_config(run_dir), place=place)
    except Exception as error:
        traceback.print_exc()
        leave_last_words(run_dir, int(os.environ["RANK"]), error)
        return 1
    return 0


if __name__ == "__main__":
    protect_output()
    sys.exit(main(sys.argv[1:]))
