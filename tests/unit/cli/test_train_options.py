"""Options of `thinwire train` as they are settled: a default folder is a free one."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.cli.train import remarks
from thinwire.cli.train_options import parse, settle


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_a_default_folder_never_holds_a_run_and_is_the_same_for_all_ranks(
    rank: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")

    def folder(*words: str) -> str:
        return str(settle(parse(words), words).run_dir)

    assert folder() == "runs/iso-loco-nano-seed0"
    for used in ("", "-2"):
        (tmp_path / f"runs/iso-loco-nano-seed0{used}").mkdir(parents=True)
        (tmp_path / f"runs/iso-loco-nano-seed0{used}/config.json").touch()
    assert folder() == "runs/iso-loco-nano-seed0-3"
    assert folder("--overwrite") == "runs/iso-loco-nano-seed0"
    assert folder("--out", "runs/iso-loco-nano-seed0") == "runs/iso-loco-nano-seed0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--replicas 1", ["one replica trains alone and exchanges nothing; try --replicas 2"]),
        ("--replicas 1 --pp 2 --steps 12 --sync-interval 30", []),  # its ranks exchange activations
        ("--steps 12 --sync-interval 30", ["--sync-interval 30 is above --steps 12: replicas exchange once, at the"]),
        ("--steps 12 --sync-interval 30 --no-final-exchange", ["above --steps 12: replicas exchange never"]),
        ("--steps 30 --sync-interval 30", []),
    ],
)
def test_options_that_leave_little_to_exchange_get_one_line(words: str, said: list[str]) -> None:
    found = remarks(settle(parse(words.split()), words.split()))
    assert len(found) == len(said) and all(part in line for part, line in zip(said, found, strict=True))
