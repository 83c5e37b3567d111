from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.errors import DataError
from thinwire.runlog.records import Communicator, TransferEnd, header_line, to_line
from thinwire.traffic import Fabric
from thinwire.traffic.method_rounds import flows_of_run

FABRIC = Fabric(spines=2, uplink_bits_per_s=1e7, port_bits_per_s=1e8, hosts={"a": (0,), "b": (1,)})


def write_transfers(path: Path, *, peer: int, sizes: list[int]) -> None:
    ends = [
        TransferEnd(
            communicator="replicas", rank=0, peer=peer, direction=direction, operation=number, num_bytes=size,
            posted_s=1.0, done_s=2.0,
        )
        for number, size in enumerate(sizes)
        for direction in ("sent", "received")
    ]  # fmt: skip
    group = Communicator(communicator="replicas", ranks=(0, 1, 2), hosts=("x", "y", "z"))
    path.write_text("\n".join([header_line(), to_line(group), *map(to_line, ends)]) + "\n")


def test_a_run_gives_a_flow_for_each_pair_with_what_was_sent(tmp_path: Path) -> None:
    write_transfers(tmp_path / "records-rank-0.jsonl", peer=1, sizes=[1000, 500])
    (flow,) = flows_of_run(tmp_path, FABRIC)
    assert (flow.source, flow.destination, flow.num_bytes, flow.job) == ("a", "b", 1500, tmp_path.name)


def test_a_rank_without_a_host_and_a_run_without_messages_are_refused(tmp_path: Path) -> None:
    write_transfers(tmp_path / "records-rank-0.jsonl", peer=2, sizes=[1])
    with pytest.raises(ValueError, match="rank 2 and 2 hosts"):
        flows_of_run(tmp_path, FABRIC)
    write_transfers(tmp_path / "records-rank-0.jsonl", peer=1, sizes=[])
    with pytest.raises(DataError, match="no sent messages"):
        flows_of_run(tmp_path, FABRIC)
