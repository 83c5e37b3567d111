"""`thinwire train`: a folder or place that holds another run is refused, with both runs named."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch

from thinwire.cli.main import main
from thinwire.elastic.global_state import GlobalState
from thinwire.runlog.run_identity import RunIdentity, new_identity, read_identity, write_identity
from thinwire.training.checkpoints.global_checkpoints import GlobalCheckpoints
from thinwire.training.config import TrainConfig, config_text, read_config, resolve
from thinwire.training.run_origin import check_corpus, check_options, keep_corpus, write_origin
from thinwire.workloads.language.workload import open_data

Output = pytest.CaptureFixture[str]


def state_of(step: int) -> GlobalState:
    return GlobalState(step=step, parameters={"w": torch.full((9,), float(step))})


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, RunIdentity]:
    """Make the folder of an elastic run with checkpoints of the steps 20 and 1740."""
    (tmp_path / "text.txt").write_text("a thin wire carries little. " * 200)
    given = TrainConfig.of(
        elastic=True, replicas=1, steps=3000, data=str(tmp_path / "text.txt"), tokenizer="bytes", batch_size=1,
        seq_len=16, out=tmp_path / "run", cache_dir=tmp_path / "cache",
    )  # fmt: skip
    config = resolve(given, world_size=None, cores=2, home=tmp_path)
    config.run_dir.mkdir()
    (config.run_dir / "config.json").write_text(config_text(config))
    identity = new_identity(config_digest=config.digest())
    write_identity(config.run_dir, identity)
    checkpoints = GlobalCheckpoints(config.run_dir / "checkpoints", run=identity)
    for step in (20, 1740):
        checkpoints.write(state_of(step))
    return config.run_dir, identity


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_checkpoint_to_another_runs_folder_is_refused_at_the_start_and_left_as_it_is(
    run: tuple[Path, RunIdentity], tmp_path: Path, capsys: Output
) -> None:
    folder, identity = run
    before = content_of(folder)
    place = str(folder / "checkpoints")
    for more in ([], ["--overwrite"]):
        new = tmp_path / "new"
        assert main(["train", "--elastic", "--replicas", "1", "--out", str(new), "--checkpoint-to", place, *more]) == 2
        told = capsys.readouterr().err
        assert f"{place} holds a checkpoint of run {identity.run}" in told
        assert re.search(r"this would be run [0-9a-f]{16}; go on with the other run", told), told
        assert content_of(folder) == before and not new.exists()


def test_resume_does_not_take_over_another_runs_step(run: tuple[Path, RunIdentity], capsys: Output) -> None:
    folder, identity = run
    mine = folder.with_name("mine")
    mine.mkdir()
    config = read_config(folder).replace(out=mine, checkpoint_to=str(folder / "checkpoints"))
    (mine / "config.json").write_text(config_text(config))
    own = dataclasses.replace(identity, run=16 * "a")
    write_identity(mine, own)
    before = content_of(mine) | content_of(folder)
    assert main(["train", "--elastic", "--resume", str(mine)]) == 1
    told = capsys.readouterr().err
    assert f"is of run {identity.run}, and this is run {own.run}" in told and "1740" in told, told
    assert content_of(mine) | content_of(folder) == before


def test_a_copied_checkpoint_of_an_incarnation_that_went_apart_is_refused(
    run: tuple[Path, RunIdentity], capsys: Output
) -> None:
    folder, identity = run
    apart = identity.next_incarnation()
    GlobalCheckpoints(folder / "checkpoints", run=apart).write(state_of(1800))
    assert main(["train", "--elastic", "--resume", str(folder)]) == 1
    told = capsys.readouterr().err
    assert f"is of incarnation {apart.incarnation} of run {identity.run}, which went on apart" in told, told


def test_a_folder_without_a_run_id_is_refused_with_the_remedy(run: tuple[Path, RunIdentity], capsys: Output) -> None:
    folder, _ = run
    (folder / "run.json").unlink()
    assert main(["train", "--elastic", "--resume", str(folder)]) == 1
    assert "holds no run id (no run.json)" in capsys.readouterr().err
    (folder / "run.json").write_text('{"run": 3}')
    assert main(["train", "--resume", str(folder)]) == 1
    assert "run.json is damaged (run must be 16 hexadecimal digits" in capsys.readouterr().err


def test_changed_options_are_refused(run: tuple[Path, RunIdentity], capsys: Output) -> None:
    folder, identity = run
    (folder / "config.json").write_text(config_text(read_config(folder).replace(seed=7)))
    assert main(["train", "--elastic", "--resume", str(folder)]) == 1
    assert f"is of run {identity.run} with options {identity.config_digest}" in capsys.readouterr().err


def test_a_folder_with_nothing_but_another_runs_checkpoints_is_no_place_for_a_new_run(
    run: tuple[Path, RunIdentity], tmp_path: Path, capsys: Output
) -> None:
    folder, _ = run
    kept = tmp_path / "kept"
    shutil.copytree(folder / "checkpoints", kept / "checkpoints")
    before = content_of(kept)
    for more in ([], ["--elastic"]):
        assert main(["train", "--out", str(kept), "--data", str(tmp_path / "text.txt"), *more]) == 2
        assert "holds a run already" in capsys.readouterr().err
        assert content_of(kept) == before


@pytest.mark.parametrize("url", ["folder", "memory"])
def test_a_run_writes_and_removes_nothing_where_another_one_keeps_its_states(url: str, tmp_path: Path) -> None:
    place = str(tmp_path / "place") if url == "folder" else f"memory://foreign-{tmp_path.name}"
    runs = [new_identity(config_digest=32 * "0") for _ in range(2)]
    first = GlobalCheckpoints(place, run=runs[0])
    first.write(state_of(10))
    second = GlobalCheckpoints(place, run=runs[1])
    for step in (10, 20):
        with pytest.raises(Exception, match=f"it is of run {runs[0].run}, and this is run {runs[1].run}"):
            second.write(state_of(step))
    with pytest.raises(Exception, match=runs[0].run):
        second.latest()
    assert first.steps() == [10] and first.problem(10) == ""
    assert first.describe(10).run == runs[0].stamp()


def test_the_next_incarnation_reads_what_the_one_before_wrote(run: tuple[Path, RunIdentity]) -> None:
    folder, identity = run
    following = identity.next_incarnation()
    checkpoints = GlobalCheckpoints(folder / "checkpoints", run=following)
    checkpoints.write(state_of(1000))
    latest = checkpoints.latest().state
    assert latest is not None and latest.step == 1000, "of the newest incarnation, though its step is not the highest"
    assert read_identity(folder) == identity


def test_an_edited_option_is_named_with_both_values_and_setting_it_back_helps(
    run: tuple[Path, RunIdentity], capsys: Output
) -> None:
    folder, _ = run
    config = read_config(folder)
    write_origin(config)
    (folder / "config.json").write_text(config_text(config.replace(seed=7, lr=0.5)))
    for more in (["--elastic"], []):
        assert main(["train", *more, "--resume", str(folder)]) == 1
        told = capsys.readouterr().err
        assert f"has other options than the run began with: seed 7 instead of {config.run.seed}, lr 0.5 in" in told
    check_options(folder, config)


def test_data_of_the_same_length_but_other_content_are_refused_and_the_first_ones_are_not(
    run: tuple[Path, RunIdentity], capsys: Output
) -> None:
    folder, _ = run
    config = read_config(folder)
    write_origin(config)
    text = Path(config.data.source)
    first = text.read_text()
    keep_corpus(config.replace(out=folder), open_data(config).sha256)
    text.write_text(first.swapcase())
    assert text.stat().st_size == len(first)
    assert main(["train", "--elastic", "--resume", str(folder)]) == 2
    told = capsys.readouterr().err
    assert f"the run in {folder} began with other data; got {text} with hash " in told
    assert "try to give it the same files again, or to begin another run with --out NEW-FOLDER" in told
    text.write_text(first)
    check_corpus(config.replace(out=folder), open_data(config).sha256)
