"""The process of one rank of `thinwire diagnose test --replicas N`. Not a command of the user's."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from thinwire.cli.launcher_end import end_with
from thinwire.cli.output import protect_output


def main(arguments: Sequence[str]) -> int:
    """Run one rank.

    Args:
        arguments: The launcher's process id, and the words of the command without `--replicas`.

    Returns:
        The exit code of the command.
    """
    # the launcher decides when to stop, and how to say so
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # before torch, whose import takes seconds
    end_with(int(arguments[0]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from thinwire.cli.diagnose_test import main as test

    return test(arguments[1:])


if __name__ == "__main__":
    protect_output()
    sys.exit(main(sys.argv[1:]))
