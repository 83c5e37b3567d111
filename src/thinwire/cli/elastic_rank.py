"""The process of a replica's rank that does not lead: what the one that leads starts. Not a command of the user's."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from thinwire.cli.launcher_end import end_with
from thinwire.cli.output import finish_output, protect_output


def main(arguments: Sequence[str]) -> int:
    """Serve a replica as one of its ranks.

    Args:
        arguments: The run's folder, the leading rank's process id, which of the host's replicas this is, its number of
            ranks, this rank, and the file by which the ranks meet.

    Returns:
        0 when the leading rank says that this is the end, else 1.
    """
    run_dir, leader, index, num_ranks = Path(arguments[0]), int(arguments[1]), int(arguments[2]), int(arguments[3])
    rank, meeting = int(arguments[4]), Path(arguments[5])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    end_with(leader)
    import torch

    from thinwire.training.elastic.job import LocalSettings
    from thinwire.training.elastic.replica_ranks import follow, join_ranks

    try:
        torch.set_num_threads(LocalSettings.load(run_dir).threads)
        follow(join_ranks(meeting, index=index, rank=rank, num_ranks=num_ranks))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    protect_output()
    code = main(sys.argv[1:])
    finish_output()
    os._exit(code)
