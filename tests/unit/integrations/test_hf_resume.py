"""One `resume_from_checkpoint` for all replicas of a trainer: paths, folders, True; refusals name what is there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import thinwire
from thinwire.errors import CheckpointError, ThinwireError

pytest.importorskip("transformers", reason="needs transformers: pip install 'thinwire[hf]'")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Make the folder of a run whose replica 1 was killed while it wrote step 20."""
    for replica, steps in ((0, (5, 10, 20)), (1, (5, 10))):
        for step in steps:
            folder = tmp_path / f"replica-{replica}" / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            (folder / "trainer_state.json").write_text("{}")
    (tmp_path / "replica-1" / "checkpoint-20").mkdir()
    return tmp_path


def found(run_folder: Path, given: Any, num_replicas: int = 2) -> list[str]:
    from thinwire.integrations.hf import DiLoCoTrainerMixin

    def replica(transport: Any) -> str:
        args = SimpleNamespace(output_dir=str(run_folder / f"replica-{transport.replica}"))
        path = DiLoCoTrainerMixin._checkpoint_of_all(SimpleNamespace(args=args), given, transport)  # type: ignore[arg-type]
        return str(path.relative_to(run_folder))

    return thinwire.run_replicas(num_replicas, replica)


@pytest.mark.parametrize("given", [True, "True", "DIR", "DIR/replica-0", "DIR/replica-1/checkpoint-10"])
def test_all_take_the_newest_step_that_all_have_or_the_given_one(run_folder: Path, given: Any) -> None:
    value = given.replace("DIR", str(run_folder)) if isinstance(given, str) else given
    assert found(run_folder, value) == ["replica-0/checkpoint-10", "replica-1/checkpoint-10"]


def test_an_older_step_is_taken_where_it_is_named_and_one_replica_needs_no_folder(run_folder: Path) -> None:
    assert found(run_folder, f"{run_folder}/replica-1/checkpoint-5") == [
        "replica-0/checkpoint-5", "replica-1/checkpoint-5",
    ]  # fmt: skip
    assert found(run_folder, f"{run_folder}/replica-0", num_replicas=1) == ["replica-0/checkpoint-20"]


def test_a_step_that_one_replica_lacks_is_refused_by_what_each_has(run_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"replica 0: \[20\]; replica 1: none .*copy the missing folder"):
        found(run_folder, f"{run_folder}/replica-0/checkpoint-20")


def test_a_trainer_of_a_version_without_a_hook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from thinwire.integrations import hooks
    from thinwire.integrations.hf import DiLoCoTrainerMixin

    class Trainer(DiLoCoTrainerMixin, transformers.Trainer):  # type: ignore[misc]
        pass

    monkeypatch.setitem(hooks.HOOKS, "transformers", (*hooks.HOOKS["transformers"], "_gone"))
    with pytest.raises(ThinwireError, match=r"transformers 5[\d.]+ has no _gone, which thinwire needs"):
        Trainer(method="diloco", transport=thinwire.LoopbackWorld(1).transports[0])
