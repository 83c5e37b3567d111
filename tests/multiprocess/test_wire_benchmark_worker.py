"""Every contender of the benchmark in real processes: fair to all, and numbers that add up."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import free_port, run, values
from training_runs import DEADLINE_S, DOCUMENTS

from benchmarks.wire.references import REFERENCES
from thinwire.wire_benchmark.contenders import CONTENDERS

STEPS, WARMUP_STEPS, BATCH_SIZE, SEQ_LEN = 10, 2, 1, 16
MEASURED = STEPS - WARMUP_STEPS
HAS_TORCHFT = importlib.util.find_spec("torchft") is not None
RUNNING = [name for name in (*CONTENDERS, *REFERENCES) if HAS_TORCHFT or name != "torchft-diloco"]
PLACE = {"PYTHONPATH": str(Path(__file__).parents[2])}


def as_rank(lines: Sequence[Sequence[str]], ports: Sequence[int]) -> list[tuple[int, str]]:
    """Run several command lines one after the other as one rank, and return exit codes and stderr."""
    from benchmarks.wire.references import REFERENCES
    from thinwire.cli.processes import bench_host
    from thinwire.wire_benchmark.contenders import CONTENDERS

    CONTENDERS.update(REFERENCES)
    done = []
    for words, port in zip(lines, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        err = io.StringIO()
        own = [word.replace("{own seed}", os.environ["RANK"]) for word in words]
        with contextlib.redirect_stderr(err):
            code = bench_host(own)
        done.append((code, err.getvalue()))
    return done


def command(name: str, folder: Path, *more: str) -> list[str]:
    words = (
        f"--contender {name} --steps {STEPS} --warmup-steps {WARMUP_STEPS} --sync-interval 6 --overlap-steps 1 "
        f"--batch-size {BATCH_SIZE} --seq-len {SEQ_LEN} --eval-batches 2 --timeout-s 60 --tokenizer bytes --model tiny"
    )
    places = ["--data", f"{folder}/rows.jsonl", "--cache-dir", f"{folder}/.cache"]
    return [*words.split(), *places, "--result", f"{folder}/results/{name}-{{rank}}.json", *more]


def make_folder(folder: Path) -> Path:
    (folder / "results").mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the results of all contenders, two ranks each."""
    folder = make_folder(tmp_path_factory.mktemp("bench"))
    lines = [command(name, folder) for name in RUNNING]
    arguments = {"lines": lines, "ports": [free_port() for _ in lines]}
    for outcome in values(run(as_rank, num_ranks=2, arguments=arguments, environment=PLACE, deadline_s=DEADLINE_S)):
        for name, (code, stderr) in zip(RUNNING, outcome, strict=True):
            assert code == 0, f"{name}: {stderr}"
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[dict[str, Any]]]:
    def read(name: str, rank: int) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((folder / "results" / f"{name}-{rank}.json").read_text())
        return result

    return {name: [read(name, rank) for rank in (0, 1)] for name in RUNNING}


def test_each_rank_leaves_one_whole_file_and_nothing_else(folder: Path) -> None:
    names = {path.name for path in (folder / "results").iterdir()}
    assert names == {f"{name}-{rank}.json" for name in RUNNING for rank in (0, 1)}


def test_all_contenders_start_from_the_same_model(found: dict[str, list[dict[str, Any]]]) -> None:
    assert len({rank["initial_sha256"] for ranks in found.values() for rank in ranks}) == 1


def test_a_rank_sees_the_same_data_with_every_contender_and_no_other_rank_s(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    first = {ranks[0]["data_sha256"] for ranks in found.values()}
    second = {ranks[1]["data_sha256"] for ranks in found.values()}
    assert len(first) == len(second) == 1 and first != second


def test_the_ranks_end_with_the_same_global_parameters(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, ranks in found.items():
        assert ranks[0]["global_sha256"] == ranks[1]["global_sha256"] != ranks[0]["initial_sha256"], name


def test_ddp_and_our_all_reduce_train_the_same(found: dict[str, list[dict[str, Any]]]) -> None:
    losses = {name: found[name][0]["val_loss"] for name in found}
    assert losses["ddp"] == pytest.approx(losses["all-reduce"], abs=1e-4)
    # or the test could not fail: what trains otherwise ends elsewhere
    others = {name: loss for name, loss in losses.items() if name not in ("ddp", "all-reduce", "all-reduce-bf16")}
    assert all(abs(loss - losses["all-reduce"]) > 1e-4 for loss in others.values()), losses


def test_only_rank_0_evaluates(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, (first, second) in found.items():
        assert 0 < first["val_loss"] < math.log(257) + 0.5 and second["val_loss"] is None, name


def test_the_measured_steps_are_those_after_the_warm_up(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, ranks in found.items():
        for rank in ranks:
            assert rank["contender"] == name and rank["world_size"] == 2
            assert len(rank["step_s"]) == MEASURED and rank["tokens"] == MEASURED * BATCH_SIZE * SEQ_LEN
            assert 0 < sum(rank["step_s"]) <= rank["wall_s"] + 1e-3
            unix_s = [rank[f"{when}_unix_s"] for when in ("started", "ended", "close_started", "close_ended")]
            assert unix_s == sorted(unix_s)
            assert unix_s[1] - unix_s[0] == pytest.approx(rank["wall_s"], abs=0.05)
            assert unix_s[3] - unix_s[2] == pytest.approx(rank["close_s"], abs=0.05)


def test_all_ranks_start_their_clocks_together(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, (first, second) in found.items():
        assert abs(first["started_unix_s"] - second["started_unix_s"]) < 0.5, name


def test_our_bytes_are_counted_and_others_are_not_known(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, ranks in found.items():
        for rank in ranks:
            assert (rank["payload_bytes_sent"] is None) == (rank["stalled_s"] is None) == (name in REFERENCES)
    dense_bytes = 4 * found["all-reduce"][0]["num_parameters"]
    assert found["all-reduce"][0]["payload_bytes_sent"] == pytest.approx(MEASURED * dense_bytes, rel=1e-3)
    # one round and the final exchange, both of the whole model
    diloco = found["diloco"][0]
    assert diloco["payload_bytes_sent"] == pytest.approx(dense_bytes, rel=1e-3)
    assert diloco["close_payload_bytes_sent"] == pytest.approx(dense_bytes, rel=1e-3)


def test_a_code_of_four_bits_sends_an_eighth(found: dict[str, list[dict[str, Any]]]) -> None:
    def sent(name: str) -> int:
        rank = found[name][0]
        total: int = rank["payload_bytes_sent"] + rank["close_payload_bytes_sent"]
        return total

    for dense, coded in (("diloco", "diloco-e3m0"), ("streaming-dense", "streaming-e3m0")):
        assert sent(dense) / sent(coded) == pytest.approx(32 / 4.125, rel=0.01)


def test_settings_are_written_as_they_were_in_effect(found: dict[str, list[dict[str, Any]]]) -> None:
    def settings(name: str) -> tuple[int, int, int]:
        rank = found[name][0]
        return rank["num_fragments"], rank["sync_interval"], rank["overlap_steps"]

    expected = {
        "all-reduce": (1, 1, 0), "all-reduce-bf16": (1, 1, 0), "diloco": (1, 6, 0),
        "diloco-e3m0": (1, 6, 0), "overlap-only": (1, 6, 1),
        "fragments-only": (3, 6, 0), "streaming-dense": (3, 6, 1),
        "streaming-e3m0": (3, 6, 1), "streaming-sparse": (3, 6, 1), "iso-e3m0": (3, 6, 1),
        "iso-2bit": (3, 6, 1),
        "ddp": (1, 1, 0), "ddp-powersgd": (1, 1, 0), "torchft-diloco": (3, 6, 1),
    }  # fmt: skip
    assert {name: settings(name) for name in found} == {name: expected[name] for name in RUNNING}


def test_hosts_with_different_options_are_refused_on_both(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    lines = [command("diloco", folder, "--seed", "{own seed}")]
    for code, stderr in (
        done[0]
        for done in values(
            run(as_rank, num_ranks=2, arguments={"lines": lines, "ports": [free_port()]}, environment=PLACE)
        )
    ):
        assert code == 1
        assert "DesyncError: replica 1 has seed 1, replica 0 has 0" in stderr
    assert not list((folder / "results").iterdir())


def test_a_host_that_never_comes_ends_the_wait_in_words(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    lines = [command("diloco", folder, "--timeout-s", "1"), command("diloco", folder, "--warmup-steps", "10")]
    arguments = {"lines": lines, "ports": [free_port(), free_port()]}
    alone = values(run(as_rank, num_ranks=2, ranks=[0], arguments=arguments, environment=PLACE))[0]
    assert alone[0][0] == 1 and alone[0][1].startswith("diloco: ConnectError: ")
    assert alone[1][0] == 2 and alone[1][1].startswith("diloco: warmup_steps must be in [0, 10)")
