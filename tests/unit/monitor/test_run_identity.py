"""The identity of a run: what descends from what, what is refused, and what untrusted JSON may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from thinwire.elastic.journal import Journal
from thinwire.errors import Refused, ThinwireError
from thinwire.runlog.run_identity import (
    check_folder,
    identity_from_json,
    new_identity,
    read_identity,
    write_identity,
)
from thinwire.training.elastic.coordinator_process import _check_journal

FIRST = new_identity(config_digest=32 * "0")


def test_an_identity_is_read_as_it_was_written(tmp_path: Path) -> None:
    later = FIRST.next_incarnation()
    write_identity(tmp_path, later)
    assert read_identity(tmp_path) == later and later.incarnations[0] == FIRST.incarnation


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "../../etc"), ("run", 7), ("run", None), ("config_digest", "f"), ("incarnations", []),
        ("incarnations", "abc"), ("incarnations", [16 * "g"]), ("incarnations", [16 * "a"] * 1001),
        ("incarnations", [3]),
    ],
)  # fmt: skip
def test_an_identity_of_another_form_is_refused_with_the_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        identity_from_json({**FIRST.to_json(), field: value})


def test_a_joining_host_may_bring_a_folder_of_the_runs_past_and_no_other(tmp_path: Path) -> None:
    assert check_folder(tmp_path / "new", FIRST)
    write_identity(tmp_path, FIRST)
    later, apart = FIRST.next_incarnation(), FIRST.next_incarnation()
    assert not check_folder(tmp_path, FIRST) and check_folder(tmp_path, later)
    write_identity(tmp_path, apart)
    with pytest.raises(Refused, match=f"incarnation {apart.incarnation} of run {FIRST.run}.*{later.incarnation}"):
        check_folder(tmp_path, later)
    other = new_identity(config_digest=32 * "0")
    with pytest.raises(Refused, match=f"holds run {FIRST.run}, and the coordinator runs {other.run}"):
        check_folder(tmp_path, other)


def test_a_coordinator_goes_on_with_the_journal_of_its_own_incarnation_only(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.jsonl"
    for _ in range(2):  # it is begun once, and taken back by the process that follows
        journal = Journal(path)
        _check_journal(journal, FIRST.to_json(), path=path)
        journal.close()
    assert [line["what"] for line in Journal(path).lines] == ["run"]
    for foreign in (FIRST.next_incarnation(), new_identity(config_digest=32 * "0")):
        with pytest.raises(ThinwireError, match=rf"{FIRST.incarnation}.*{foreign.incarnation}"):
            _check_journal(Journal(path), foreign.to_json(), path=path)
