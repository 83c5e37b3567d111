"""`thinwire COMMAND ...`: imports the command's module, and nothing that it does not need."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from thinwire.cli.output import ReaderGone, finish_output, print_error, protect_output
from thinwire.errors import unknown_name
from thinwire.version import __version__

COMMANDS = {
    "demo": "train a small model on this machine in two minutes, as a first run",
    "train": "train one model on several replicas",
    "run": "run a training script of others as several replicas, unmodified",
    "generate": "continue a text with the model of a run",
    "eval": "compute loss and further numbers of the model of a run",
    "export": "write the model of a run for transformers, or as safetensors",
    "publish": "publish a model's weights as a small patch of the version before",
    "follow": "keep a folder at the newest version of published weights",
    "fetch": "fetch published weights by their hash, from several sources",
    "experts": "combine experts that were trained apart",
    "compare": "compare runs",
    "checkpoints": "list a run's checkpoints, and verify them",
    "methods": "list the methods",
    "recipes": "list, show and copy complete configurations for common networks",
    "bench": "compare methods on real sockets over thin wires; profile a step",
    "probe": "measure the wires between hosts and each host's speed, as cluster.json",
    "simulate": "run methods in virtual time on machines and wires",
    "plan": "find the method and settings that fit these machines and wires",
    "traffic": "plan the paths of flows over the spines of a cluster",
    "diagnose": "name the link, host or rank that is slow, stuck or out of step, from a job's records",
    "watch": "show a run's progress and findings in the terminal",
    "dashboard": "show a run on a web page: replicas, links, rounds and findings",
    "doctor": "check what keeps a run from starting on this host, and on the way to another",
    "relay": "join hosts of elastic jobs that can only dial out",
    "secret": "make the secret that authenticates and encrypts the traffic of a job",
    "join": "add this host to a running elastic job",
    "invite": "print a one-time invitation to an elastic job, on its first host",
    "status": "show the state and the members of an elastic job",
    "pause": "pause replicas of an elastic job",
    "resume": "resume paused replicas of an elastic job",
    "leave": "remove replicas from an elastic job",
    "store": "serve a part of a store on this host, for runs without a bucket",
    "split": "serve the middle layers of a model to those who keep texts and labels",
    "lab": "run a command on hosts joined by thin wires, all on this machine",
}
# Commands whose module has another name; the function has the command's.
_MODULES = {
    **dict.fromkeys(("join", "invite", "status", "pause", "resume", "leave"), "elastic_commands"),
    **dict.fromkeys(("generate", "eval", "export"), "model_commands"),
    **dict.fromkeys(("publish", "follow", "fetch"), "publish_commands"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The arguments after `thinwire`; those of this process by default, whose output is then protected
            from a full disk.

    Returns:
        The exit code: 0, 1 for an error while running, 2 for a wrong command line, 141 where the reader of stdout has
        gone.
    """
    if arguments is not None:
        return _run(arguments)
    protect_output()
    try:
        code = _run(sys.argv[1:])
        print(end="", flush=True)
    except ReaderGone:
        # the reader of our output has gone, as `| head` does: end like a program that SIGPIPE ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    if not finish_output():
        print_error("", "output was lost: no room where stdout goes; make room there")
        return code or 1
    return code


def _run(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name.ljust(width)}  {about}" for name, about in COMMANDS.items()]
        print("usage: thinwire COMMAND [options]", "", *lines, "", sep="\n")
        print("thinwire COMMAND --help lists a command's options.")
        return 0 if arguments else 2
    if name == "--version":
        print(f"thinwire {__version__}")
        return 0
    if name not in COMMANDS:
        print_error("", unknown_name("command", name, COMMANDS))
        return 2
    module = importlib.import_module(f"thinwire.cli.{_MODULES.get(name, name)}")
    code: int = getattr(module, name if name in _MODULES else "main")(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
