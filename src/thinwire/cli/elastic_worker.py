"""The process of one replica of an elastic run: what the launcher starts. Not a command of the user's."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from thinwire.cli.watch import end_with


def main(arguments: Sequence[str]) -> int:
    """Run one replica.

    Args:
        arguments: The run's folder, the launcher's process id, and which of the host's replicas this is.

    Returns:
        0 at the end or after leaving, `launch.REFUSED` for what another attempt would not mend, 1 for all else.
    """
    run_dir, launcher, index = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    signal.signal(signal.SIGTERM, _leave)
    end_with(launcher)
    from thinwire.errors import ConnectError, ThinwireError
    from thinwire.training.elastic.job import LocalSettings
    from thinwire.training.elastic.launch import REFUSED
    from thinwire.training.elastic.replica import run_replica

    try:
        run_replica(LocalSettings.load(run_dir), tell=_tell, device_index=index)
    except ConnectError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except (ThinwireError, ValueError) as error:
        traceback.print_exc()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return REFUSED
    except SystemExit:
        return 0
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    # unwinds the stack, so that the replica says goodbye
    raise SystemExit(0)


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads of rounds in flight must not keep a process that has left
