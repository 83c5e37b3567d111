"""Answers of NCCL's RAS as its C++ writes them, text and JSON, of jobs that are described here; for tests only."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nccl_files import HASH, KINDS

WORDS = {0: "", 1: "Unhandled CUDA error", 2: "System error", 6: "Remote process error"}
ORDER = ("NOCOMM", "INIT", "RUNNING", "FINALIZE", "ABORT")


@dataclass
class Rank:
    """One rank of a communicator: what it has launched, its state, and whether RAS reaches it."""

    host: str
    pid: int
    gpu: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    status: str = "RUNNING"
    init_error: int = 0
    async_error: int = 0
    lost: str = ""

    @property
    def where(self) -> str:
        return f"GPU {self.gpu} managed by process {self.pid} on node {self.host}"


@dataclass
class Comm:
    """A communicator, with its ranks in order."""

    ranks: Sequence[Rank]
    comm_hash: int = HASH

    @property
    def answering(self) -> dict[int, Rank]:
        return {number: one for number, one in enumerate(self.ranks) if not one.lost and one.status != "NOCOMM"}

    @property
    def errors(self) -> list[str]:
        own = self.answering.values()
        found = ["INCOMPLETE"] if any(one.lost for one in self.ranks) else []
        found += ["ERROR"] if any(one.init_error or one.async_error for one in own) else []
        is_mixed = len({one.status for one in self.ranks if not one.lost}) > 1
        differs = any(len({one.counts.get(kind, 0) for one in own}) > 1 for kind in KINDS)
        return found + (["MISMATCH"] if is_mixed or differs else [])


def world(num: int, *, per_host: int = 2, counts: Mapping[int, Mapping[str, int]] | None = None,
          usual: Mapping[str, int] | None = None, **ranks: Mapping[int, Any]) -> Comm:  # fmt: skip
    """Return a communicator of so many ranks; `lost={3: "dead"}` and the like set a field of single ranks."""
    made = []
    for rank in range(num):
        own = {name: values[rank] for name, values in ranks.items() if rank in values}
        told = {**(usual or {"AllReduce": 640}), **(counts or {}).get(rank, {})}
        made.append(Rank(f"10.0.0.{rank // per_host}", 500 + rank, rank % per_host, told, **own))
    return Comm(made)


def _is_outlier(num: int, total: int, verbose: bool) -> bool:
    if num == 1:
        return True
    return num < 0.5 * total if verbose else num <= 10 and num <= 0.25 * total


def _named(comm: Comm, values: Mapping[int, Any], many: str, one: str, verbose: bool) -> list[str]:
    """Return groups of ranks with the same value, the largest first, as the writer prints them."""
    groups: dict[Any, list[int]] = {}
    for rank, value in sorted(values.items(), key=lambda pair: pair[0]):
        groups.setdefault(value, []).append(rank)
    said = []
    for value, ranks in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        none = value == 0
        if len(ranks) > 1:
            said.append(f"  {len(ranks)} ranks " + ("have not launched any operations" if none else many.format(value)))
        if _is_outlier(len(ranks), len(comm.ranks), verbose):
            for rank in ranks:
                what = "" if len(ranks) > 1 else " has not launched any operations" if none else " " + one.format(value)
                said.append(f"  Rank {rank}{what} -- {comm.ranks[rank].where}")
    return said


def text(comms: Sequence[Comm], *, verbose: bool = True, took: float = 0.01) -> str:
    """Return the answer to `verbose status`, or to `status`."""
    said = ["NCCL version 2.30.7 compiled with CUDA 13.0", "CUDA runtime version 13000, driver version 13000", ""]
    said += ["Job summary", "===========", "", "  Nodes  Processes         GPUs  Processes     GPUs",
             "(total)   per node  per process    (total)  (total)",
             "      4          2            1          8        8", "",
             f"Communicators... ({took:.3f}s)", "=============", ""]  # fmt: skip
    said += ["Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors",
             "    #  in group  per comm  per node  per comm  in group"]  # fmt: skip
    for number, comm in enumerate(comms):
        status = max((one.status for one in comm.ranks if not one.lost), key=ORDER.index, default="RUNNING")
        size, errors = len(comm.ranks), ",".join(comm.errors) or "OK"
        said.append(f"{number:5d}  {1:8d}  {2:8d}  {'1-2':>8}  {size:8d}  {size:8d}  {status:>8}  {errors:>6}")
    said += ["", "Errors", "======", ""]
    for state, many, one in (
        ("unresponsive", "INCOMPLETE", "  Missing communicator data from {} job process{}"),
        ("dead", "DEAD", "  {} job process{} considered dead (unreachable via the RAS network)"),
    ):
        gone = {(own.host, own.pid): own for comm in comms for own in comm.ranks if own.lost == state}
        if gone:
            plural = ("es are" if len(gone) > 1 else " is") if state == "dead" else "es" * (len(gone) > 1)
            said += [many, one.format(len(gone), plural)]
            said += [f"  Process {own.pid} on node {own.host} managing GPU {own.gpu}" for own in gone.values()]
            said.append("")
    for number, comm in enumerate(comms):
        said += _errors(number, comm, verbose)
    said += ["Warnings", "========", ""]
    for number, comm in enumerate(comms):
        said += _mismatch(number, comm, verbose)
    return "\n".join(said) + "\n"


def _errors(number: int, comm: Comm, verbose: bool) -> list[str]:
    name, said = f"#{number}-0 ({comm.comm_hash:016x})", []
    lost = {rank: own for rank, own in enumerate(comm.ranks) if own.lost}
    if lost:
        said += [f"{name} INCOMPLETE", f"  Missing communicator data from {len(lost)} rank{'s' * (len(lost) > 1)}"]
        said += [f"  Rank {rank} -- {own.where}" for rank, own in lost.items()] + [""]
    if "ERROR" in comm.errors:
        said.append(f"{name} ERROR")
        for what, field_ in (("Initialization", "init_error"), ("Asynchronous", "async_error")):
            own = {rank: getattr(one, field_) for rank, one in comm.answering.items() if getattr(one, field_)}
            if own:
                said.append(f"  {what} error{'s' * (len(own) > 1)} on {len(own)} rank{'s' * (len(own) > 1)}")
                words = {rank: WORDS[code] for rank, code in own.items()}
                said += _named(comm, words, "reported {}", "reported {}", True)
        said.append("")
    return said


def _mismatch(number: int, comm: Comm, verbose: bool) -> list[str]:
    if "MISMATCH" not in comm.errors:
        return []
    said = [f"#{number}-0 ({comm.comm_hash:016x}) MISMATCH"]
    states = {rank: own.status for rank, own in enumerate(comm.ranks) if not own.lost}
    if len(set(states.values())) > 1:
        said.append("  Communicator ranks have different status")
        said += _named(comm, states, "have status {}", "has status {}", verbose)
    for kind in KINDS:
        counts = {rank: own.counts.get(kind, 0) for rank, own in comm.answering.items()}
        if len(set(counts.values())) > 1:
            said.append(f"  Communicator ranks have different {kind} operation counts")
            up_to = "launched up to operation {}"
            said += [*_named(comm, counts, f"have {up_to}", f"has {up_to}", verbose), ""]
    return said


def answer(comms: Sequence[Comm], *, at_s: float = 1_790_000_000.0) -> str:
    """Return the answer in JSON, asked for at some time."""
    told = {
        "nccl_version": "2.30.7", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_s)), "communicators_count": len(comms),
        "communicators": [_comm(one) for one in comms], "ras": {"collection_time_sec": 0.001, "timeouts_count": 0},
    }  # fmt: skip
    return json.dumps(told, indent=2) + "\n"


def _comm(comm: Comm) -> dict[str, Any]:
    gone = {rank: own for rank, own in enumerate(comm.ranks) if rank not in comm.answering}
    return {
        "hash": f"0x{comm.comm_hash:x}", "secondary_hash": "0x1:0x2", "size": len(comm.ranks),
        "ranks_count": len(comm.answering), "missing_ranks_count": len(gone),
        "ranks": [
            _seat(rank, own)
            | {
                "status": {
                    "init_state": own.init_error or (7 if own.status == "INIT" else 0), "async_error": own.async_error,
                    "finalize_called": own.status == "FINALIZE", "destroy_flag": False,
                    "abort_flag": own.status == "ABORT",
                },
                "collective_counts": {kind: own.counts.get(kind, 0) for kind in KINDS},
            }
            for rank, own in comm.answering.items()
        ],
        "missing_ranks": [
            _seat(rank, own) | {"status": {"unresponsive": bool(own.lost), "considered_dead": own.lost == "dead"}}
            for rank, own in gone.items()
        ],
    }  # fmt: skip


def _seat(rank: int, own: Rank) -> dict[str, Any]:
    return {"rank": rank, "host": own.host, "pid": own.pid, "cuda_dev": own.gpu, "nvml_dev": own.gpu}
