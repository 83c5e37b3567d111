"""Dumps of records: torch's own analyser reads them, and names whoever did not come or called something else."""

from __future__ import annotations

import logging
import pickle
import pickletools
from pathlib import Path

import pytest
from torch.distributed.flight_recorder import fr_trace

from thinwire.runlog.flight_recorder import pickled, read_dump, write_dumps
from thinwire.runlog.reader import Records, from_records
from thinwire.runlog.records import Beat, Communicator, Operation, Record
from thinwire.runlog.run_folder import read_files

WORLD = "0 default_pg"
PAIR = "1 pair"
RECORDED = Path(__file__).parents[2] / "recorded"


def job(*, kinds: dict[int, list[str]], counts: dict[tuple[int, int], int] | None = None) -> Records:
    """Return the records of three ranks that call these operations; the last of each is not done."""
    made: list[Record] = [
        Communicator(communicator=WORLD, ranks=(0, 1, 2), hosts=("a", "a", "b")),
        Communicator(communicator=PAIR, ranks=(0, 2), hosts=("a", "b")),
        Communicator(communicator=f"{PAIR} 0->2", ranks=(0, 2), hosts=("a", "b")),
    ]
    for rank, own in kinds.items():
        for sequence, kind in enumerate(own):
            made.append(Operation(
                communicator=WORLD, rank=rank, sequence=sequence, kind=kind, dtype="float32",
                count=(counts or {}).get((rank, sequence), 12), posted_s=10.0 + sequence,
                done_s=None if sequence == len(own) - 1 else 10.5 + sequence,
            ))  # fmt: skip
        if rank != 1:
            made.append(Operation(
                communicator=f"{PAIR} 0->2", rank=rank, sequence=0, kind="message", dtype="int64", count=3,
                posted_s=9.0, done_s=9.5,
            ))  # fmt: skip
    return from_records([*made, *(Beat(rank=rank, at_s=15.0) for rank in range(3))])


def verdict(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.INFO, logger="Flight Recorder"):
        fr_trace.main([str(folder)])
    return caplog.text


def test_torchs_analyser_names_the_rank_that_did_not_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usual = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "all_to_all", "all_reduce"]
    write_dumps(job(kinds={0: usual, 1: usual[:-1], 2: usual}), tmp_path)
    told = verdict(tmp_path, caplog)
    assert "Not all ranks joining collective, sequence number: 7" in told
    assert "missing ranks: {1}" in told


@pytest.mark.parametrize(
    ("kinds", "counts", "said"),
    [
        ({0: ["all_reduce"], 1: ["barrier"], 2: ["all_reduce"]}, {}, "COLLECTIVE_TYPE_MISMATCH"),
        ({rank: ["all_reduce"] for rank in range(3)}, {(1, 0): 13}, "SIZE_OR_SYNTAX_MISMATCH"),
    ],
)
def test_torchs_analyser_names_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kinds: dict[int, list[str]],
    counts: dict[tuple[int, int], int], said: str,
) -> None:  # fmt: skip
    write_dumps(job(kinds=kinds, counts=counts), tmp_path)
    told = verdict(tmp_path, caplog)
    assert "Culprit rank 1" in told and said in told


def test_torchs_analyser_finds_nothing_in_a_job_that_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_dumps(job(kinds={rank: ["all_reduce", "all_gather"] for rank in range(3)}), tmp_path)
    told = verdict(tmp_path, caplog)
    assert "rror" not in told.replace("error msg: None", "") and "Not all ranks" not in told


def test_the_json_beside_the_pickles_is_read_back(tmp_path: Path) -> None:
    records = job(kinds={rank: ["all_reduce", "broadcast"] for rank in range(3)})
    write_dumps(records, tmp_path)
    read = read_files(sorted(tmp_path.glob("rank_*.json")))
    wanted = {(one.communicator, one.rank, one.sequence + 1, one.kind, one.count, one.done_s)
              for one in records.operations if one.communicator == WORLD}  # fmt: skip
    found = {(one.communicator, one.rank, one.sequence, one.kind, one.count, one.done_s) for one in read.operations}
    assert found == wanted and not read.num_refused


def test_a_dump_is_a_pickle_of_plain_values_and_calls_nothing() -> None:
    value = {"text": "ä", "numbers": [0, -1, 1 << 40, -(1 << 70)], "pair": ("0", "x"), "more": [True, False, None, {}]}
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(pickled(value))}
    assert not opcodes & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "PERSID", "BINPERSID"}
    assert pickle.loads(pickled(value)) == value
    with pytest.raises(TypeError, match="plain values only, got float"):
        pickled(1.5)


def test_the_dump_of_a_real_time_out_of_nccl_is_read() -> None:
    """Written by torch 2.11 on an H200: one rank whose second all-reduce did not begin within 3 s."""
    records = read_files([RECORDED / "nccl_dump" / "dump_0"])
    assert records.num_refused == 0
    assert [(one.communicator, one.sequence, one.kind) for one in records.operations] == [
        (WORLD, 1, "all_reduce"), (WORLD, 2, "all_reduce"),
    ]  # fmt: skip
    assert records.operations[0].done_s is not None and records.operations[1].done_s is None
    assert records.communicators[WORLD].ranks == (0,)


@pytest.mark.parametrize("name", ["profiling_name", "process_group", "input_dtypes"])
def test_a_list_in_place_of_a_text_is_refused_before_it_is_written_out(name: str, tmp_path: Path) -> None:
    doubled: list[object] = ["a"]
    for _ in range(16):
        doubled = [doubled, doubled]
    endless: list[object] = []
    endless.append(endless)
    whole = {"process_group": ["0", "all"], "collective_seq_id": 1, "profiling_name": "nccl:all_reduce",
             "time_created_ns": 10**18, "input_sizes": [[2]], "input_dtypes": ["Float"]}  # fmt: skip
    entries = [whole, *({**whole, name: value} for value in (doubled, endless))]
    path = tmp_path / "trace_0"
    path.write_bytes(pickle.dumps({"entries": entries}, protocol=2))
    records = Records()
    read_dump(records, path)
    assert (len(records.operations), records.num_refused) == (1, 2)
