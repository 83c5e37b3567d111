"""Files of NCCL's Inspector: who comes late, what is slow on all ranks, which link, whose files end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from nccl_files import HASH, Fleet, cut, line, perf

from thinwire.errors import DataError
from thinwire.monitor.detect.diagnose import diagnose
from thinwire.monitor.findings import Finding
from thinwire.runlog.reader import Records
from thinwire.runlog.run_folder import read_files

FOUR = ("a", "a", "b", "b")


def run(fleet: Fleet, *, num: int = 80, late: Callable[[int, int], float] | None = None,
        takes: Callable[[int], float] = lambda number: 0.004, seed: int = 1) -> Fleet:  # fmt: skip
    """Write collectives: each rank waits from when it has come until the last one has, then all take the same time."""
    draw = random.Random(seed)
    for number in range(num):
        came = {
            rank: draw.uniform(0.0, 0.0004) + (late(rank, number) if late is not None else 0.0)
            for rank in range(len(fleet.hosts))
        }
        end = max(came.values()) + takes(number) * draw.uniform(0.95, 1.05)
        fleet.collective(number, {rank: end - at for rank, at in came.items()})
    return fleet


def found(fleet: Fleet, **which: object) -> list[Finding]:
    records = read_files(fleet.write(**which))  # type: ignore[arg-type]
    assert records.num_refused == 0, records.refusals
    return diagnose(records)


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_job_that_is_well_is_no_finding(tmp_path: Path, seed: int, verbose: bool) -> None:
    assert found(run(Fleet(tmp_path, FOUR, verbose=verbose), num=200, seed=seed)) == []


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "b", "c"), FOUR, tuple("aaaabbbbccccdddd")])
def test_the_rank_that_waits_least_is_named_and_since_when(
    tmp_path: Path, hosts: tuple[str, ...], verbose: bool
) -> None:
    fleet = Fleet(tmp_path, hosts, verbose=verbose, clocks_s={"b": 3600.0})
    slow = len(hosts) - 1
    (finding,) = found(run(fleet, late=lambda rank, number: 0.02 if rank == slow and number >= 40 else 0.0))
    assert finding.kind == "non-communication slow" and finding.where == f"rank {slow}"
    assert 38 <= finding.since_round <= 41 and finding.until_s is None
    assert finding.evidence["late_s"] == pytest.approx(0.02, rel=0.1)
    assert finding.evidence["operation_takes_s"] == pytest.approx(0.004, rel=0.1)
    assert set(finding.evidence["waiting"]) == set(range(slow)) and finding.confidence > 0.8
    assert hosts[slow] in finding.evidence["locations"][0] and str(1000 + slow) in finding.evidence["locations"][0]


def test_a_rank_that_is_late_from_the_start_is_named_with_less_confidence(tmp_path: Path) -> None:
    (finding,) = found(run(Fleet(tmp_path, FOUR), late=lambda rank, number: 0.02 if rank == 1 else 0.0))
    assert finding.where == "rank 1" and "since the files begin" in finding.text and finding.confidence == 0.5


def test_a_rank_that_was_late_for_a_while_is_told_with_the_end(tmp_path: Path) -> None:
    fleet = run(Fleet(tmp_path, FOUR), num=160, late=lambda rank, n: 0.02 if rank == 1 and 40 <= n < 80 else 0.0)
    (finding,) = found(fleet)
    assert finding.where == "rank 1" and finding.until_s is not None and finding.since_s < finding.until_s


def test_a_host_whose_ranks_are_all_late_is_named_as_one(tmp_path: Path) -> None:
    hosts = ("a", "a", "b", "b", "c", "c")
    (finding,) = found(
        run(Fleet(tmp_path, hosts), late=lambda rank, n: 0.02 if hosts[rank] == "b" and n >= 40 else 0.0)
    )
    assert finding.where == "host b"


def test_little_beside_the_time_between_operations_is_not_told(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, FOUR, period_s=5.0, verbose=True)
    assert found(run(fleet, late=lambda rank, number: 0.02 if rank == 1 and number >= 40 else 0.0)) == []


def test_one_late_operation_means_nothing(tmp_path: Path) -> None:
    assert found(run(Fleet(tmp_path, FOUR), late=lambda rank, n: 3.0 if rank == 1 and n in (30, 60) else 0.0)) == []


def test_a_slow_network_is_slow_for_all_ranks_and_no_rank_is_blamed(tmp_path: Path) -> None:
    (finding,) = found(run(Fleet(tmp_path, FOUR), takes=lambda number: 0.004 if number < 40 else 0.012))
    assert finding.kind == "communication slow" and finding.places[0].kind == "communicator"
    assert 38 <= finding.since_round <= 41 and finding.evidence["times_longer"] == pytest.approx(3.0, rel=0.1)
    assert "thinwire diagnose test" in finding.probe and finding.confidence <= 0.6


def test_larger_operations_are_no_slower_network(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, FOUR)
    for number in range(120):
        size = 1 << (24 if number >= 60 else 20)
        fleet.collective(number, dict.fromkeys(range(4), size / 1e9), num_bytes=size)
    assert found(fleet) == []


def test_each_kind_is_counted_by_itself(tmp_path: Path) -> None:
    """FSDP gathers and reduces in turns: number 7 of one kind is not number 7 of the other."""
    fleet = Fleet(tmp_path, FOUR)
    for number in range(120):
        kind, takes = (("AllGather", 0.002), ("ReduceScatter", 0.05))[number % 2]
        late = 0.03 if number >= 60 else 0.0
        times = {rank: takes if rank == 2 else takes + late for rank in range(4)}
        fleet.collective(number, times, kind=kind, sequence=number // 2)
    (finding,) = found(fleet)
    assert finding.where == "rank 2" and finding.evidence["kinds"] == ["AllGather", "ReduceScatter"]


def test_a_rank_that_is_late_because_it_waits_elsewhere_is_not_blamed(tmp_path: Path) -> None:
    """Ranks 0, 1 of one host are one tensor-parallel group; 0 with 2 and 1 with 3 are two data-parallel ones."""
    world = run(Fleet(tmp_path / "w", FOUR), num=3)
    pair = Fleet(tmp_path / "p", ("a", "a"), comm_hash=0x1111111111111111)
    groups = [
        Fleet(
            tmp_path / str(one),
            ("a", "b"),
            comm_hash=0x2222222222222200 + (one << 12),
            pids={0: 1000 + one, 1: 1002 + one},
        )
        for one in (0, 1)
    ]
    for number in range(80):
        late = 0.03 if number >= 40 else 0.0
        pair.collective(number, {0: 0.002, 1: 0.002 + late})
        for group in groups:  # what 1 has waited for 0, 3 waits for 1
            group.collective(number, {0: 0.004, 1: 0.004 + late})
    paths = []
    for fleet in (world, pair, *groups):
        fleet.folder.mkdir()
        paths += fleet.write()
    (finding,) = diagnose(read_files(paths))
    assert finding.where == "rank 0" and len(finding.evidence["communicators"]) == 2


def test_a_rank_without_a_file_is_told_and_others_are_blamed_less(tmp_path: Path) -> None:
    fleet = run(Fleet(tmp_path, FOUR), late=lambda rank, number: 0.02 if rank == 1 and number >= 40 else 0.0)
    late, absent = found(fleet, ranks=(0, 1, 2))
    assert late.where == "rank 1" and late.confidence < 0.7
    assert absent.kind == "no records" and absent.where == "rank 3" and absent.confidence <= 0.3
    assert found(fleet, ranks=(0,)) == []


def test_a_slow_operation_beside_a_rank_without_a_file_is_ambiguous(tmp_path: Path) -> None:
    fleet = run(Fleet(tmp_path, FOUR), late=lambda rank, number: 0.02 if rank == 3 and number >= 40 else 0.0)
    slow = next(one for one in found(fleet, ranks=(0, 1, 2)) if one.kind == "communication slow")
    assert slow.is_ambiguous and slow.where == "ambiguous: communicator or rank 3"


def test_a_rank_whose_file_ends_while_others_go_on_is_told(tmp_path: Path) -> None:
    fleet = run(Fleet(tmp_path, FOUR))
    fleet.lines[2] = fleet.lines[2][:40]
    (finding,) = found(fleet)
    assert finding.kind == "no records" and finding.where == "rank 2" and finding.since_round == 39
    assert finding.evidence["others_went_on_s"] == pytest.approx(20.0, rel=0.15)


def test_a_file_that_ends_a_little_sooner_is_no_fault(tmp_path: Path) -> None:
    fleet = run(Fleet(tmp_path, FOUR, period_s=0.05))
    fleet.lines[2] = fleet.lines[2][:40]
    assert found(fleet) == []


def test_files_whose_ends_differ_by_one_dump_and_gaps_are_no_fault(tmp_path: Path) -> None:
    fleet = run(Fleet(tmp_path, FOUR))
    fleet.lines[2] = fleet.lines[2][:-9]
    del fleet.lines[1][20:40]
    assert found(fleet) == []


def talk(fleet: Fleet, *, slow: Callable[[int, int, int], float], num: int = 60, seed: int = 1) -> Fleet:
    """Write messages between all pairs: both ends are in it while it takes, and one waits besides."""
    draw = random.Random(seed)
    for number in range(num):
        for source in range(len(fleet.hosts)):
            for destination in range(len(fleet.hosts)):
                if source != destination:
                    takes = 0.001 * draw.uniform(0.95, 1.05) * slow(source, destination, number)
                    waits = draw.uniform(0.0, 0.05)
                    times = (takes + waits, takes) if draw.random() < 0.5 else (takes, takes + waits)
                    fleet.message(number, source, destination, times)
    return fleet


@pytest.mark.parametrize(
    ("slow", "where"),
    [
        (lambda source, destination, n: 1.0, None),
        (lambda source, destination, n: 4.0 if (source, destination) == (0, 2) and n >= 30 else 1.0, "link 0 -> 2"),
        (lambda source, destination, n: 4.0 if source == 1 and n >= 30 else 1.0, "sender rank 1"),
        (lambda source, destination, n: 5.0 if (source, destination) == (3, 1) else 1.0, "link 3 -> 1"),
    ],
)
def test_a_slow_pair_of_messages_is_named_whichever_end_waits(
    tmp_path: Path, slow: Callable[[int, int, int], float], where: str | None
) -> None:
    told = found(talk(Fleet(tmp_path, ("a", "b", "c", "d")), slow=slow))
    assert [one.where for one in told] == ([] if where is None else [where])
    assert all(one.kind == "communication slow" for one in told)


@pytest.mark.parametrize("lost", [slice(0, 6), slice(90, 91)])
def test_messages_are_not_paired_where_an_end_has_lost_some(tmp_path: Path, lost: slice) -> None:
    fleet = talk(
        Fleet(tmp_path, ("a", "b", "c", "d")), slow=lambda s, d, n: 4.0 if (s, d) == (0, 2) and n >= 30 else 1.0
    )
    del fleet.lines[2][lost]
    assert not [one for one in found(fleet) if one.kind == "communication slow"]


def test_a_folder_is_read_by_what_its_files_hold(tmp_path: Path) -> None:
    fleet = run(Fleet(tmp_path, FOUR), late=lambda rank, number: 0.02 if rank == 1 and number >= 40 else 0.0)
    for number, path in enumerate(fleet.write()):
        path.rename(tmp_path / f"what-{number}.txt")
    (tmp_path / "notes.txt").write_text("hello\n")
    (tmp_path / "empty.log").write_text("")
    (finding,) = diagnose(read_files([tmp_path]))
    assert finding.where == "rank 1"


def test_two_files_of_one_rank_are_read_as_one(tmp_path: Path) -> None:
    fleet = run(Fleet(tmp_path, FOUR), late=lambda rank, number: 0.02 if rank == 1 and number >= 40 else 0.0)
    paths = fleet.write()
    lines = paths[1].read_text().splitlines(keepends=True)
    paths[1].write_text("".join(lines[50:]))
    more = tmp_path / "z-earlier.log"
    more.write_text("".join(lines[:50]))
    (finding,) = diagnose(read_files([*paths, more]))
    assert finding.where == "rank 1" and 38 <= finding.since_round <= 41


def test_times_by_the_cpu_around_the_call_are_left_out(tmp_path: Path) -> None:
    fleet = run(Fleet(tmp_path, FOUR), late=lambda rank, number: 0.02 if rank == 1 and number >= 40 else 0.0)
    for rank, lines in fleet.lines.items():
        fleet.lines[rank] = [one.replace("kernel_gpu", "collective_cpu") for one in lines]
    assert found(fleet) == []


def _read(tmp_path: Path, content: bytes) -> Records:
    path = tmp_path / "x.log"
    path.write_bytes(content)
    return read_files([path])


GOOD = line(
    perf("coll", "AllReduce", 3, 4096, 0.01, begun_us=10**15), rank=1, num_ranks=2, host="a", pid=7, written_us=10**15
)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("header", "rank"), 2, "rank is no whole number from 0 to 1: 2"),
        (("header", "rank"), True, "rank is no whole number"),
        (("header", "n_ranks"), 1 << 40, "n_ranks is no whole number"),
        (("header", "n_ranks"), 0, "n_ranks is no whole number"),
        (("header", "id"), "x" * 501, "id is no text"),
        (("header",), [], "header is no JSON object"),
        (("metadata", "dump_timestamp_us"), -1, "dump_timestamp_us is no whole number"),
        (("metadata", "dump_timestamp_us"), 1e15, "dump_timestamp_us is no whole number"),
        (("metadata", "hostname"), None, "hostname is no text"),
        (("metadata", "pid"), 1 << 60, "pid is no whole number"),
        (("metadata", "inspector_output_format_version"), "v5.0", "another version than v4: 'v5.0'"),
        (("metadata", "inspector_output_format_version"), 4, "another version than v4: 4"),
        (("coll_perf", "coll_sn"), -1, "coll_sn is no whole number"),
        (("coll_perf", "coll_exec_time_us"), 10**30, "coll_exec_time_us is no whole number"),
        (("coll_perf", "coll_msg_size_bytes"), "1", "coll_msg_size_bytes is no whole number"),
        (("coll_perf", "coll_timing_source"), 1, "coll_timing_source is no text"),
        (("coll_perf", "event_trace_ts", "kernel_events"), {}, "kernel_events is no list"),
        (("coll_perf", "event_trace_ts", "kernel_events"), [{}] * 2000, "kernel_events is no list of at most"),
        (("coll_perf", "event_trace_ts", "kernel_events"), [3], "an event of a kernel is no JSON object"),
        (("coll_perf", "event_trace_ts", "coll_start_ts"), "now", "coll_start_ts is no whole number"),
        (("coll_perf",), None, "coll_perf is no JSON object"),
    ],
)
def test_a_forged_line_is_refused_and_named(tmp_path: Path, path: tuple[str, ...], value: object, said: str) -> None:
    told = json.loads(GOOD)
    place = told
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    records = _read(tmp_path, f"{GOOD}\n{json.dumps(told)}\n{GOOD}\n".encode())
    assert len(records.nccl) == 2 and records.num_refused == 1
    assert records.refusals[0].line == 2 and said in records.refusals[0].reason


SPARED = ("comm_name", "nnodes", "git_rev", "rec_mechanism", "coll_timing_source", "coll_algobw_gbs", "coll_busbw_gbs",
          "event_trace_sn", "event_trace_ts")  # fmt: skip


def test_a_line_without_a_field_is_refused(tmp_path: Path) -> None:
    for part in ("header", "metadata", "coll_perf"):
        for name in json.loads(GOOD)[part]:
            told = json.loads(GOOD)
            del told[part][name]
            records = _read(tmp_path, f"{GOOD}\n{json.dumps(told)}\n".encode())
            assert records.num_refused == (0 if name in SPARED else 1), name


def test_a_file_of_another_version_is_refused_with_its_version(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"format 'v5.0'; this thinwire reads v4"):
        _read(tmp_path, GOOD.replace('"v4.0"', '"v5.0"').encode() + b"\n")


def test_a_file_cut_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    content = f"{GOOD}\n{GOOD}\n".encode()
    for length in range(len(GOOD) + 1, len(content)):
        records = _read(tmp_path, content[:length])
        is_whole = length >= 2 * len(GOOD) + 1
        assert len(records.nccl) == 1 + is_whole
        assert records.num_refused == (0 if is_whole or length == len(GOOD) + 1 else 1)


def test_random_bytes_end_no_reading(tmp_path: Path) -> None:
    draw = random.Random(5)
    for _ in range(300):
        content = bytearray(f"{GOOD}\n{GOOD}\n".encode())
        for _ in range(draw.randrange(1, 30)):
            content[draw.randrange(60 + len(GOOD), len(content))] = draw.randrange(256)
        records = _read(tmp_path, bytes(content))
        diagnose(records)
        assert len(records.nccl) + records.num_refused >= 1


def test_a_line_too_long_and_one_nested_too_deep_are_refused(tmp_path: Path) -> None:
    deep = '{"coll_perf":' * 5000
    records = _read(tmp_path, f"{GOOD}\n{'x' * 300_000}\n{deep}\n{GOOD}\n".encode())
    assert len(records.nccl) == 2 and records.num_refused == 2


def test_lines_in_another_order_say_the_same(tmp_path: Path) -> None:
    fleet = run(Fleet(tmp_path, FOUR), late=lambda rank, number: 0.02 if rank == 1 and number >= 40 else 0.0)
    for lines in fleet.lines.values():
        random.Random(2).shuffle(lines)
    assert [one.where for one in found(fleet)] == ["rank 1"]


def test_the_hash_is_cut_as_the_inspector_cuts_it() -> None:
    assert cut(HASH) == "0x7f8c496ae9f661" and cut(0x12) == "0x12"
