"""The rules of the house that a syntax tree can show: each maps one file to what breaks the rule in it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from source_tree import calls, dotted, imported, is_within

Rule = Callable[[str, ast.Module], Iterator[str]]

# Where a part of torch.distributed may be named, other than in transport/: DTensor says which shard of the model a rank
# holds. torch's launcher is used by no module: its rendezvous listens on every interface and unpickles what lies there.
LAUNCHER = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.distributed.run")
SHARDS = ("torch.distributed.tensor", "torch.distributed.device_mesh", "torch.distributed.fsdp")
# torch's checkpoints are its subject; their collectives stay among the ranks of one replica.
CHECKPOINTS = "integrations/dcp.py"
OBJECT_MODULES = ("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
OBJECT_COLLECTIVES = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)


def torch_distributed_outside_the_transport(name: str, tree: ast.Module) -> Iterator[str]:
    is_transport = name.startswith(("transport/", CHECKPOINTS))
    allowed = SHARDS if name == "compat.py" else ()
    used = [*imported(tree)]
    used += [(dotted(node), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for used_name, line in used:
        # `torch.distributed` alone is also the inner part of an allowed chain, which is judged as a whole.
        if is_transport and not is_within(used_name, LAUNCHER):
            continue
        if is_within(used_name, ("torch.distributed",)) and not is_within(used_name, allowed):
            if used_name == "torch.distributed" and allowed and not _is_imported(tree, used_name):
                continue
            yield f"{name}:{line} names {used_name}"


def _is_imported(tree: ast.Module, wanted: str) -> bool:
    return any(found == wanted for found, _ in imported(tree))


def printing_outside_the_command_line(name: str, tree: ast.Module) -> Iterator[str]:
    if not name.startswith("cli/"):
        streams = ("sys.stdout.write", "sys.stderr.write")
        yield from (f"{name}:{call.lineno} prints" for found, call in calls(tree) if found in ("print", *streams))


def environment_outside_the_command_line(name: str, tree: ast.Module) -> Iterator[str]:
    # the daemon and the launcher pass their environment on to the processes that they start
    allowed = ("transport/connect.py", "transport/job_environment.py", "lab/namespace_daemon.py", "training/launch.py")
    if name.startswith("cli/") or name in allowed:
        return
    reads = ("os.environ", "os.getenv", "os.putenv")
    used = [*imported(tree), *((dotted(node), getattr(node, "lineno", 0)) for node in ast.walk(tree))]
    yield from (f"{name}:{line} uses {found}" for found, line in used if found in reads)


def objects_from_bytes(name: str, tree: ast.Module) -> Iterator[str]:
    for found, line in imported(tree):
        if is_within(found, OBJECT_MODULES):
            yield f"{name}:{line} imports {found}"
    for found, call in calls(tree):
        last = found.rsplit(".", 1)[-1]
        if found in ("eval", "exec", "builtins.eval", "builtins.exec"):
            yield f"{name}:{call.lineno} calls {found}"
        if last in OBJECT_COLLECTIVES:
            yield f"{name}:{call.lineno} calls {found}, which unpickles what a peer sent"
        if found == "torch.load" and not _has(call, "weights_only", True):
            yield f"{name}:{call.lineno} calls torch.load without weights_only=True"
        if last == "load" and _has(call, "allow_pickle", True):
            yield f"{name}:{call.lineno} loads with allow_pickle=True"


def _has(call: ast.Call, keyword: str, value: object) -> bool:
    return any(
        given.arg == keyword and isinstance(given.value, ast.Constant) and given.value.value is value
        for given in call.keywords
    )


def the_front_door_from_inside(name: str, tree: ast.Module) -> Iterator[str]:
    """`import thinwire` from below is a cycle that import-linter cannot see."""
    if not name.startswith("cli/"):
        yield from (f"{name}:{line} imports thinwire itself" for found, line in imported(tree) if found == "thinwire")


def relative_imports(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{name}:{node.lineno} imports relatively; write where from"


def checkpoint_errors_without_a_remedy(name: str, tree: ast.Module) -> Iterator[str]:
    for found, call in calls(tree):
        if found not in ("CheckpointError", "ForeignCheckpoint") or not call.args:
            continue
        parts = call.args[0].values if isinstance(call.args[0], ast.JoinedStr) else [call.args[0]]
        texts = [part.value for part in parts if isinstance(part, ast.Constant)]
        # a text that is passed on whole was made elsewhere
        if texts and not any(";" in str(text) for text in texts) and "remedy" not in ast.unparse(call.args[0]):
            yield f"{name}:{call.lineno} raises {found} without '; ' and what to do"


RULES: tuple[Rule, ...] = (
    torch_distributed_outside_the_transport,
    printing_outside_the_command_line,
    environment_outside_the_command_line,
    checkpoint_errors_without_a_remedy,
    objects_from_bytes,
    the_front_door_from_inside,
    relative_imports,
)
