"""The process of an elastic run's coordinator: what the launcher starts. Not a command of the user's."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from thinwire.cli.launcher_end import end_with
from thinwire.cli.output import protect_output


def main(arguments: Sequence[str]) -> int:
    """Be the coordinator.

    Args:
        arguments: The run's folder, the launcher's process id, the secret's file, the address and the port.

    Returns:
        The exit code.
    """
    run_dir, launcher, secret_path = Path(arguments[0]), int(arguments[1]), Path(arguments[2])
    address, port = arguments[3], int(arguments[4])
    until = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: until.set())
    end_with(launcher)
    from thinwire.errors import ThinwireError
    from thinwire.training.elastic.coordinator_process import coordinate
    from thinwire.training.elastic.launch import REFUSED

    try:
        coordinate(run_dir, secret_path=secret_path, address=address, port=port, say=_say, until=until)
    except (ThinwireError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return REFUSED
    return 0


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    protect_output()
    sys.exit(main(sys.argv[1:]))
