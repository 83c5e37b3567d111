"""`thinwire COMMAND ...`: finds the command's module, so that only what it needs is imported."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from thinwire.cli.output import finish_output, protect_output
from thinwire.version import __version__

COMMANDS = {
    "train": "train one model on several replicas",
    "compare": "put several runs side by side",
    "checkpoints": "list an elastic run's checkpoints, and check whether they are whole",
    "methods": "list the methods",
    "bench": "compare methods on real sockets over thin wires",
    "probe": "measure the wires between hosts and what each can compute, as cluster.json",
    "simulate": "run methods in virtual time on machines and wires",
    "plan": "find the method and settings that fit these machines and wires",
    "diagnose": "name the link, host or rank that is slow, stuck or out of step, from what a job wrote down",
    "watch": "show in the terminal how a run goes, and what is wrong with it",
    "dashboard": "show on one page how a run goes: replicas, links, rounds, and what is wrong",
    "doctor": "look for what keeps a run from starting on this host, and on the way to another",
    "secret": "make the secret with which replicas prove who they are and encrypt what they send",
    "join": "add this host to a running job that is elastic",
    "status": "tell how an elastic job goes, and who takes part",
    "pause": "let replicas of an elastic job rest",
    "resume": "let replicas of an elastic job go on",
    "leave": "let replicas of an elastic job leave",
    "lab": "run a command on hosts that are joined by thin wires, all on this machine",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The words after `thinwire`; those of this process by default, whose output is then protected from a
            full disk.

    Returns:
        The exit code: 0, 1 for what went wrong while running, 2 for a wrong command line.
    """
    if arguments is not None:
        return _run(arguments)
    protect_output()
    code = _run(sys.argv[1:])
    if not finish_output():
        print("thinwire: error: output was lost: no room where stdout goes; make room there", file=sys.stderr)
        return code or 1
    return code


def _run(arguments: Sequence[str]) -> int:
    words = list(arguments)
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    if name == "--version":
        print(f"thinwire {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=2, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        print(f"thinwire: unknown command {name!r}{hint} There are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"thinwire.cli.{name}")
    try:
        code: int = module.main(words[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader of our output has gone, as `| head` does; nothing can be said to it any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {about}" for name, about in COMMANDS.items()]
    return "\n".join(
        ["usage: thinwire COMMAND [options]", "", *lines, "", "thinwire COMMAND --help tells a command's options."]
    )


if __name__ == "__main__":
    sys.exit(main())
