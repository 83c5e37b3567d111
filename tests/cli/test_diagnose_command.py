"""`thinwire diagnose`: files in, findings out."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.synthetic_jobs import InjectedFault, Scene, synthesize
from thinwire.cli.diagnose import FOUND, DiagnoseOptions, main
from thinwire.monitor.findings import Place
from thinwire.runlog.records import Beat, Communicator, Span, header_line, to_line

HOSTS = ("a", "b", "c")


def _files(folder: Path, *faults: InjectedFault) -> list[str]:
    """Write a file a rank, as recorders do."""
    found = synthesize(Scene(hosts=HOSTS, rounds=60, seed=4, faults=faults))
    paths = []
    for rank in range(len(HOSTS)):
        own = [one for one in found if isinstance(one, Communicator) or one.rank == rank]
        path = folder / f"rank-{rank}.jsonl"
        path.write_text("\n".join([header_line(), *map(to_line, own)]) + "\n")
        paths.append(str(path))
    return paths


def test_the_options_are_those_that_were_agreed_on() -> None:
    options = sorted("--" + field.name for field in dataclasses.fields(DiagnoseOptions) if field.name != "files")
    frozen = Path(__file__).with_name("options_of_diagnose.txt").read_text().splitlines()
    assert options == frozen, "an option is a promise: change tests/cli/options_of_diagnose.txt and CHANGELOG.md too"


def test_a_slow_link_is_named_from_the_files_of_its_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = InjectedFault(kind="slow link", place=Place(kind="link", ranks=(0, 2)), begin=30, severity=5.0)
    assert main(_files(tmp_path, slow)) == FOUND
    told = capsys.readouterr()
    assert told.out.startswith("communication slow: link 0 -> 2") and "remedy: " in told.out
    assert "0 lines refused" in told.err


def test_a_healthy_job_is_no_finding_and_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = _files(tmp_path)
    with Path(files[1]).open("a") as file:
        file.write('{"record":"beat","rank":1,"at')
    assert main([*files, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["findings"] == [] and told["num_refused"] == 1
    assert told["refused"][0].startswith("rank-1.jsonl:")


def test_a_folder_whose_ranks_were_all_killed_does_not_count_as_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "the run did not end here: the records of ranks 1, 2 stop without a goodbye; they were killed, or go on"
    for is_last in (False, True):
        files = _files(tmp_path)[1:]
        for rank, file in zip((1, 2), files, strict=True):
            beats = [Beat(rank=rank, at_s=0.5 * number) for number in range(40)]
            beats += [Beat(rank=rank, at_s=20.0, is_last=True)] if is_last and rank == 1 else []
            Path(file).write_text(Path(file).read_text() + "".join(to_line(beat) + "\n" for beat in beats))
        main([*files, "--json"])
        told = capsys.readouterr()
        assert json.loads(told.out)["unended"] == ([] if is_last else [1, 2])
        main(files)
        assert (said in capsys.readouterr().err) != is_last


def test_a_name_in_a_file_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = _files(
        tmp_path, InjectedFault(kind="slow link", place=Place(kind="host", hosts=("b",)), begin=30, severity=5.0)
    )
    for path in map(Path, paths):
        path.write_text(path.read_text().replace('"hosts":["a","b","c"]', '"hosts":["a","\\u001b[2Jb","c"]'))
    assert main(paths) == FOUND
    told = capsys.readouterr().out
    assert "communication slow: host \ufffd[2Jb" in told and "\x1b" not in told


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (b"\x80\x02}q\x00.", 1, "no list of entries"),
        (b"\x80\x02cposix\nsystem\nq\x00.", 1, "is no pickle of data: instruction b'c' is none of data: it could run"),
        (b"\x80\x02}q\x00(X\xff\xff\xff\xff", 1, "bytes are announced"),
        (b'{"entries": 3}', 1, "no list of entries"),
        (b'{"entries": [', 1, "is no JSON"),
        (b"hello\n", 1, "no file of records"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(
    tmp_path: Path, content: bytes, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace_0"
    path.write_bytes(content)
    assert main([str(path)]) == code
    told = capsys.readouterr()
    assert said in told.err and len(told.err.splitlines()) == 1 and told.out == ""


def test_no_files_and_unknown_words_are_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and main(["--jsn"]) == 2
    assert main([str(tmp_path / "none")]) == 1
    assert "cannot read" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    assert "holds no records-rank-N.jsonl, transfers-replica-N.jsonl" in capsys.readouterr().err


def _entry(sequence: int, *, name: str = "gloo:all_reduce", size: int = 5, retired: bool = True) -> dict[str, Any]:
    """Return an entry as torch 2.13 writes it on gloo: no times of the end, the state always scheduled."""
    return {
        "collective_seq_id": sequence, "input_dtypes": ["Float"], "input_sizes": [[size]], "is_p2p": False,
        "op_id": sequence, "output_dtypes": ["Float"], "output_sizes": [[size]], "p2p_seq_id": 0, "pg_id": 0,
        "process_group": ["0", "default_pg"], "profiling_name": name, "retired": retired, "state": "scheduled",
        "time_created_ns": 1_700_000_000_000_000_000 + sequence * 10_000_000, "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0, "timeout_ms": 1_800_000,
    }  # fmt: skip


def _dump(path: Path, entries: list[Any]) -> str:
    config = {"": {"desc": "", "name": "", "ranks": "[0, 1, 2]"}}
    path.write_text(json.dumps({"version": "2.10", "pg_config": config, "entries": entries}))
    os.utime(path, (1_700_000_060, 1_700_000_060))
    return str(path)


def test_dumps_of_the_flight_recorder_name_the_rank_that_has_not_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        _dump(
            tmp_path / f"trace_{rank}.json",
            [*map(_entry, (1, 2, 3)), *([] if rank == 1 else [_entry(4, retired=False)])],
        )
        for rank in range(3)
    ]
    assert main([*files, "--json"]) == FOUND
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["kind"] == "non-communication hang" and finding["where"] == "rank 1"


def test_a_collective_that_failed_and_is_called_retired_has_not_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        _dump(tmp_path / f"trace_{rank}.json", [*map(_entry, (1, 2, 3)), *([] if rank == 1 else [_entry(4)])])
        for rank in range(3)
    ]
    assert main(files) == FOUND
    assert "non-communication hang: rank 1" in capsys.readouterr().out


def test_dumps_of_the_flight_recorder_name_the_rank_that_brings_another_size_or_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for odd, said in ((_entry(3, size=7), "brings 7 elements"), (_entry(3, name="gloo:broadcast"), "calls broadcast")):
        files = [
            _dump(
                tmp_path / f"{rank}.json",
                [_entry(1), _entry(2), odd if rank == 2 else _entry(3), "junk", {"is_p2p": 1}],
            )
            for rank in range(3)
        ]
        assert main(files) == FOUND
        told = capsys.readouterr()
        assert "desync: rank 2" in told.out and said in told.out and "3 lines refused" in told.err


def test_dumps_of_a_job_that_ended_well_are_no_finding(tmp_path: Path) -> None:
    assert main([_dump(tmp_path / f"{rank}.json", [*map(_entry, (1, 2, 3))]) for rank in range(3)]) == 0


def _run_files(folder: Path, *, slow: float, loss: float = 3.0) -> None:
    """Write the folder of a run of three replicas whose clocks begin at different times."""
    begins = (0.0, 2.5, -1.25)
    for rank in range(3):
        transfers, metrics = [], []
        for round in range(60):
            at_s = 1.0 + round * 0.5
            for peer in range(3):
                for source, direction in ((rank, "sent"), (peer, "received")):
                    if peer == rank:
                        continue
                    is_slow = (rank, peer) == (2, 0) if direction == "sent" else (peer, rank) == (2, 0)
                    time_s = 0.02 * (slow if is_slow and round >= 30 else 1.0) + 0.0001 * ((round * 7 + source) % 5)
                    transfers.append({
                        "direction": direction, "peer": peer, "kind": "round", "round_id": round, "fragment": 0,
                        "phase": 0, "payload_bytes": 1000, "wire_bytes": 1040, "started_s": at_s + begins[rank],
                        "finished_s": at_s + begins[rank] + time_s, "error": "",
                    })  # fmt: skip
            metrics.append({
                "kind": "step", "step": round + 1, "time_s": 0.5 * (round + 1), "compute_fraction": 0.9,
                "loss": loss if rank == 1 and round > 40 else 3.0,
            })  # fmt: skip
        for name, lines in (("transfers", transfers), ("metrics", metrics)):
            (folder / f"{name}-replica-{rank}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def test_the_folder_of_a_run_names_the_slow_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run_files(tmp_path, slow=6.0)
    assert main([str(tmp_path)]) == FOUND
    assert capsys.readouterr().out.startswith("communication slow: link 2 -> 0")


def test_the_folder_of_a_run_tells_of_a_loss_that_is_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run_files(tmp_path, slow=1.0, loss=math.nan)
    assert main([str(tmp_path)]) == FOUND
    told = capsys.readouterr().out
    assert told.startswith("non-finite loss: rank 1") and "step 42" in told


def test_the_folder_of_a_healthy_run_is_no_finding(tmp_path: Path) -> None:
    _run_files(tmp_path, slow=1.0)
    assert main([str(tmp_path)]) == 0


def test_the_timeline_is_written_as_a_trace_and_a_folder_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, path = _files(tmp_path), tmp_path / "trace.json"
    assert main([*files, "--trace", str(path)]) == 0
    assert "events in" in capsys.readouterr().err
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2} and {"X", "s", "f", "M"} == {event["ph"] for event in events}
    assert main([*files, "--trace", str(tmp_path / "none" / "trace.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_the_heat_map_is_one_page_that_needs_nothing_from_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, path = _files(tmp_path), tmp_path / "heat.html"
    assert main([*files, "--heat", str(path)]) == 0
    assert "compute: " in capsys.readouterr().err
    page = path.read_text()
    assert page.count('<th scope="row">rank ') == 3 and "://" not in page and "<script" not in page
    assert main([*files, "--heat", str(tmp_path / "none" / "heat.html")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_the_heat_map_is_of_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, heat = tmp_path / "records-rank-0.jsonl", tmp_path / "heat.html"
    spans = [Span(rank=rank, kind="compute", step=1, started_s=0.0, done_s=2.0, forward_s=0.5) for rank in (0, 1)]
    path.write_text("\n".join([header_line(), *map(to_line, spans)]) + "\n")
    assert main([str(path), "--heat", str(heat), "--heat-of", "forward"]) == 0
    assert heat.read_text().count("<h2") == 1 and "500 ms" in heat.read_text()
    assert main([str(path), "--heat", str(heat)]) == 0
    assert heat.read_text().count("<h2") == 2
    capsys.readouterr()
    assert main([str(path), "--heat", str(heat), "--heat-of", "backward"]) == 1
    assert "--heat-of backward: no rank timed that; timed were: compute, forward; give" in capsys.readouterr().err
    assert main([str(path), "--heat-of", "backward"]) == 2
    assert "--heat-of needs a file that the heat map goes to; got --heat-of backward alone" in capsys.readouterr().err


def test_metrics_are_written_whole_and_a_run_without_a_fault_says_none(tmp_path: Path) -> None:
    files, path = _files(tmp_path), tmp_path / "thinwire.prom"
    path.write_text("old")
    assert main([*files, "--prometheus", str(path)]) == 0
    assert "thinwire_findings 0\n" in path.read_text() and "old" not in path.read_text()
    assert [one.name for one in tmp_path.glob("*.prom*")] == ["thinwire.prom"]
    assert main([*files, "--prometheus", str(tmp_path / "none" / "x.prom")]) == 1
