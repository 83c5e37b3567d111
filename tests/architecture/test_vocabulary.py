from __future__ import annotations

import pytest
import vocabulary
from source_tree import parse


def test_the_package_holds_no_offender() -> None:
    found = vocabulary.offenders()
    assert not found, "take a standard term:\n" + "\n".join(map(str, found))


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
