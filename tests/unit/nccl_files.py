"""Files as NCCL's own tools write them, key for key, for the tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HASH = 0x7F8C496AE9F661A3
KINDS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
START_US = 1_790_000_000_000_000


def cut(comm_hash: int = HASH) -> str:
    """Return a communicator's hash as the Inspector's buffer of 17 bytes leaves it."""
    return f"0x{comm_hash:x}"[:16]


def line(perf: dict[str, Any], *, rank: int, num_ranks: int, host: str, pid: int, written_us: int,
         comm_hash: int = HASH, version: str = "v4.0", num_nodes: int = 2) -> str:  # fmt: skip
    """Return one line of the Inspector, of a `coll_perf` or a `p2p_perf`."""
    told = {
        "header": {
            "id": cut(comm_hash), "comm_name": "unknown", "rank": rank, "n_ranks": num_ranks, "nnodes": num_nodes
        },
        "metadata": {
            "inspector_output_format_version": version, "git_rev": "", "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": written_us, "hostname": host, "pid": pid,
        },
        "coll_perf" if "coll" in perf else "p2p_perf": perf,
    }  # fmt: skip
    return json.dumps(told, separators=(",", ":"))


def perf(name: str, kind: str, sequence: int, num_bytes: int, time_s: float, *, peer: int | None = None,
         source: str = "kernel_gpu", begun_us: int | None = None, num_channels: int = 2) -> dict[str, Any]:  # fmt: skip
    """Return the object of one collective (`coll`) or message (`p2p`); with `begun_us` as a verbose dump has it."""
    told: dict[str, Any] = {name: kind, f"{name}_sn": sequence}
    if peer is not None:
        told["p2p_peer"] = peer
    told |= {
        f"{name}_msg_size_bytes": num_bytes, f"{name}_exec_time_us": int(time_s * 1e6), f"{name}_timing_source": source,
        f"{name}_algobw_gbs": 1.5, f"{name}_busbw_gbs": 2.5,
    }  # fmt: skip
    if begun_us is not None:
        ended_us = begun_us + int(time_s * 1e6)
        for what, begin, end in (("sn", 1, 2), ("ts", begun_us - 90, begun_us - 80)):
            told[f"event_trace_{what}"] = {
                f"{name}_start_{what}": begin, f"{name}_stop_{what}": end,
                "kernel_events": [
                    {
                        "channel_id": channel,
                        f"kernel_start_{what}": begun_us + channel if what == "ts" else 3 + channel,
                        f"kernel_stop_{what}": ended_us if what == "ts" else 9 + channel,
                        f"kernel_record_{what}": ended_us if what == "ts" else 6 + channel,
                    }
                    for channel in range(num_channels)
                ],
            }  # fmt: skip
    return told


@dataclass
class Fleet:
    """Ranks of one communicator that write files of the Inspector.

    Attributes:
        folder: Where.
        hosts: The host of each rank.
        every: Operations between two dumps.
        period_s: Seconds from one operation to the next.
    """

    folder: Path
    hosts: Sequence[str]
    comm_hash: int = HASH
    verbose: bool = False
    every: int = 5
    period_s: float = 0.5
    clocks_s: Mapping[str, float] = field(default_factory=dict)
    lines: dict[int, list[str]] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)

    def add(self, rank: int, number: int, perf_of: Any) -> None:
        """Write one line of a rank, for the `number`-th operation of the job."""
        host, pid = self.hosts[rank], self.pids.get(rank, 1000 + rank)
        clock_us = int(self.clocks_s.get(host, 0.0) * 1e6)
        begun_us = START_US + clock_us + int(number * self.period_s * 1e6)
        written_us = START_US + clock_us + int((number // self.every + 1) * self.every * self.period_s * 1e6)
        own = perf_of(begun_us if self.verbose else None)
        self.lines.setdefault(rank, []).append(line(
            own, rank=rank, num_ranks=len(self.hosts), host=host, pid=pid, written_us=written_us,
            comm_hash=self.comm_hash, num_nodes=len(set(self.hosts)),
        ))  # fmt: skip

    def collective(self, number: int, times_s: Mapping[int, float], *, kind: str = "AllReduce",
                   num_bytes: int = 1 << 22, sequence: int | None = None) -> None:  # fmt: skip
        """Write one collective, of the ranks that have a time."""
        for rank, time_s in times_s.items():
            sn = number if sequence is None else sequence
            self.add(rank, number, lambda us, sn=sn, t=time_s: perf("coll", kind, sn, num_bytes, t, begun_us=us))

    def message(self, number: int, source: int, destination: int, times_s: tuple[float, float], *,
                num_bytes: int = 1 << 20) -> None:  # fmt: skip
        """Write both ends of one message."""
        ends = ((source, "Send", destination, times_s[0]), (destination, "Recv", source, times_s[1]))
        for rank, kind, peer, time_s in ends:
            sn = len(self.lines.get(rank, ())) + 1
            self.add(rank, number, lambda us, k=kind, p=peer, sn=sn, t=time_s: perf(
                "p2p", k, sn, num_bytes, t, peer=p, begun_us=us))  # fmt: skip

    def write(self, ranks: Iterable[int] | None = None) -> list[Path]:
        """Write the files of these ranks, or of all, and return them."""
        paths = []
        for rank in sorted(self.lines) if ranks is None else ranks:
            path = self.folder / f"{self.hosts[rank]}-pid{self.pids.get(rank, 1000 + rank)}.log"
            path.write_text("".join(one + "\n" for one in self.lines[rank]))
            paths.append(path)
        return paths
