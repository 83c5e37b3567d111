from __future__ import annotations

import pytest
import vocabulary
from source_tree import parse


def test_folders_that_are_done_hold_no_offender() -> None:
    found = [f"{offender} in {', '.join(offender.places)}" for offender in vocabulary.offenders() if offender.is_done]
    assert not found, "take a standard term:\n" + "\n".join(found)


def test_no_offender_is_new() -> None:
    listed = vocabulary.listed()
    new = [f"{one} in {', '.join(one.places)}" for one in vocabulary.offenders() if str(one) not in listed]
    assert not new, "take a standard term:\n" + "\n".join(new)


def test_the_list_of_offenders_only_shrinks() -> None:
    listed = vocabulary.listed()
    stale = sorted(set(listed) - set(map(str, vocabulary.offenders())))
    assert not stale, "python tests/architecture/vocabulary.py drops what holds no longer:\n" + "\n".join(stale)
    assert listed == sorted(set(listed)), "sorted, and each entry once"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("sync/desk.py", '"""Rounds."""'),
        ("sync/desk/__init__.py", '"""Rounds."""'),
        ("sync/rounds.py", '"""What a round is."""'),
        ("sync/rounds.py", '"""Rounds."""\nclass RoundCouncil: ...'),
        ("sync/rounds.py", '"""Rounds."""\nclass Line: ...'),
        ("sync/rounds.py", '"""Rounds."""\nclass Round:\n    def _tell(self): ...'),
        ("sync/rounds.py", '"""Rounds."""\nasync def last_words(): ...'),
    ],
)
def test_an_offender_is_seen(name: str, source: str) -> None:
    assert list(vocabulary.in_module(name, parse(source)))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("sync/rounds.py", '"""Rounds in flight."""\nclass Outline:\n    def read_line(self): ...'),
        ("sync/whole_rounds.py", '"""Whatever is in flight."""\ndef depends(): ...\nkeyword = "told"'),
    ],
)
def test_a_standard_name_passes(name: str, source: str) -> None:
    assert not list(vocabulary.in_module(name, parse(source)))
