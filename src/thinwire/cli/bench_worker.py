"""The process of one host in a benchmark: what `bench wire` starts everywhere. Not a command of the user's."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from thinwire.errors import ThinwireError


def main(arguments: Sequence[str]) -> int:
    """Run one contender on this host and write its file of numbers.

    Args:
        arguments: Options, see `--help`; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are read from the environment.

    Returns:
        The exit code: 0, 1 for what went wrong while running, 2 for a wrong option; the reason is on stderr.
    """
    given = vars(_parser().parse_args(arguments))
    from thinwire.lab.wire_benchmark.worker import WorkerOptions, run_worker
    from thinwire.transport.addresses import address_towards, interface_of
    from thinwire.transport.connect import GLOO_INTERFACE

    try:
        # one command line serves all hosts
        given["result"] = Path(str(given["result"]).replace("{rank}", os.environ.get("RANK", "0")))
        if given["address"] is None:
            given["address"] = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        # torchft makes a gloo group of its own, which asks this variable where to listen
        os.environ[GLOO_INTERFACE] = interface_of(given["address"])
        run_worker(WorkerOptions(**given))
    except ValueError as error:
        sys.stderr.write(f"{given['contender']}: {error}\n")
        return 2
    except (ThinwireError, OSError) as error:
        sys.stderr.write(f"{given['contender']}: {type(error).__name__}: {error}\n")
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m thinwire.cli.bench_worker", allow_abbrev=False)
    parser.add_argument("--contender", required=True)
    for name in ("--steps", "--sync-interval", "--overlap-steps", "--warmup-steps"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--result", type=Path, required=True, help="file of numbers; {rank} in it stands for the rank")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "thinwire")
    parser.add_argument("--address", help="this host's IPv4 address; by default the one MASTER_ADDR is reached from")
    optional = {"batch-size": 8, "seq-len": 128, "seed": 0, "eval-batches": 20, "threads": 1}
    for name, default in optional.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--tokenizer", default="bpe")
    parser.add_argument("--pace", action="store_true")
    parser.add_argument("--gate", type=Path, help="file to wait for in the warm-up")
    parser.add_argument("--gate-step", type=int, default=0, help="after so many steps of it")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
