"""What `benchmarks/fuzz.py` reports of a fuzzer's run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "fuzz.py"
SPEC = importlib.util.spec_from_file_location("fuzz", FILE)
assert SPEC is not None and SPEC.loader is not None
fuzz = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fuzz)

LOG = """
#9\tINITED cov: 65 ft: 71 corp: 8/187b exec/s: 0 rss: 190Mb
#5000\tDONE   cov: 71 ft: 90 corp: 17/601b lim: 90 exec/s: 2500 rss: 191Mb
stat::number_of_executed_units: 5000
stat::average_exec_per_sec:     2500
stat::peak_rss_mb:              191
"""


@pytest.mark.parametrize(
    ("code", "result"),
    [(0, "ok"), (77, "an input was neither read nor refused"), (71, "out of memory"), (-9, "exit code -9")],
)
def test_a_run_is_reported_by_its_last_counts_and_its_end(code: int, result: str) -> None:
    assert fuzz.summary_of(LOG, code=code) == {
        "inputs": 5000, "edges": 71, "new_edges": 6, "features": 90, "corpus": 17, "peak_rss_mb": 191, "result": result,
    }  # fmt: skip


def test_a_fuzzer_that_never_began_has_no_inputs() -> None:
    assert fuzz.summary_of("Traceback", code=1)["inputs"] == 0


def test_the_table_has_each_target_s_latest_line_and_names_what_was_not_run() -> None:
    lines = [{"target": "a", **fuzz.summary_of(LOG, code=code)} for code in (77, 0)]
    senders = {"a": ("a parser", "TCP", False), "b": ("another", "wire", True)}
    rows = fuzz.table(lines, senders).splitlines()[2:]
    assert rows == [
        "| a parser | `a` | TCP | no | 5,000 | 71 | 191 MB | ok |",
        "| another | `b` | wire | yes | not run |  |  |  |",
    ]
