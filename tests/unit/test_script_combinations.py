"""The page of `thinwire run` shows the stored results of published scripts."""

from __future__ import annotations

from benchmarks import script_combinations as combinations


def test_the_page_holds_the_table_of_the_stored_results() -> None:
    _, _, rest = combinations.PAGE.read_text().partition(combinations.BEGIN)
    shown, end, _ = rest.partition(combinations.END)
    assert end and shown == combinations.table()
    assert shown.count("| 0 |") >= 4
