"""How the test run is laid out: no test is lost or run twice, files stay whole, and none disturbs those after it."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from xdist.remote import Producer

from tests import dealing, durations
from tests.conftest import pytest_runtest_protocol
from tests.dealing import SHARING, Dealing, unit_of
from tests.every_case import over

ROOT = Path(__file__).resolve().parents[2]
FILES = {"tests/cli/test_a.py": 9, "tests/multiprocess/test_training.py": 2, "tests/lab/test_b.py": 1}
TESTS = [f"{file}::test_{n}" for file, count in FILES.items() for n in range(count)]
TESTS += [f"tests/{folder}/test_c.py::test_{n}" for folder in ("laws", "unit") for n in range(10)]


class Worker:
    """Notes what it is sent, and does it in that order."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.sent: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def deal(num_workers: int) -> list[list[str]]:
    """Deal all tests out to workers that take turns, and return what each ran."""
    option = SimpleNamespace(loadscopereorder=True, tx=["popen"] * num_workers)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: option.tx)
    scheduler = Dealing(config, Producer("test", enabled=False))
    workers: list[Any] = [Worker(number) for number in range(num_workers)]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, TESTS)
    scheduler.schedule()
    done: list[list[str]] = [[] for _ in workers]
    while not all(len(ran) == len(worker.sent) for ran, worker in zip(done, workers, strict=True)):
        for ran, worker in zip(done, workers, strict=True):
            if len(ran) < len(worker.sent):
                index = worker.sent[len(ran)]
                ran.append(TESTS[index])
                scheduler.mark_test_complete(worker, index)
    assert scheduler.tests_finished and not scheduler.has_pending
    return done


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_every_test_runs_once_and_a_file_with_processes_on_one_worker(num_workers: int) -> None:
    done = deal(num_workers)
    assert sorted(itertools.chain(*done)) == sorted(TESTS)
    for file in FILES:
        assert sum(any(test.startswith(file) for test in ran) for ran in done) == 1, file


def test_one_of_three_workers_computes_first_and_all_begin_with_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"tests/laws/test_c.py::test_4": 9.0, "tests/multiprocess/test_training.py": 3.0, "tests/gone.py": 99.0}
    stored["tests/cli/test_a.py"] = 2.0
    monkeypatch.setattr(dealing, "SECONDS", stored)
    computes, waits, also_waits = deal(3)
    assert computes[0] == "tests/laws/test_c.py::test_4"
    assert unit_of(waits[0]) == "tests/multiprocess/test_training.py"
    assert unit_of(also_waits[0]) == "tests/cli/test_a.py"


def test_the_files_that_are_named_exist() -> None:
    assert [name for name in SHARING if not (ROOT / name).is_file()] == []
    assert all(unit_of(f"{name}::test") == name for name in SHARING)


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.cli.test_a" name="test_x[a b]" time="2.5" />
<testcase classname="tests.cli.test_a" name="test_y" time="40" />
<testcase classname="tests.laws.test_c" name="test_z[&lt;3&gt;]" time="7" />
<testcase classname="tests.laws.test_c" name="test_short" time="0.2" />
</testsuite></testsuites>"""


def test_durations_are_stored_by_what_is_dealt_out_and_the_slowest_tests_are_printed_first(tmp_path: Path) -> None:
    junit, path = tmp_path / "tests.xml", tmp_path / "durations.txt"
    junit.write_text(JUNIT)
    path.write_text("9 tests/architecture/test_dealing.py::test_w\n8 tests/gone.py\n5 tests/cli/test_a.py\n")
    seconds = durations.measured(junit)
    durations.store(seconds, unit_of=unit_of, path=path)
    assert durations.stored(path) == {
        "tests/cli/test_a.py": 42.0, "tests/architecture/test_dealing.py::test_w": 9.0,
        "tests/laws/test_c.py::test_z[<3>]": 7.0,
    }  # fmt: skip
    lines = [line.split(" s  ") for line in durations.report(seconds, num_tests=2).splitlines()]
    assert [line[-1] for line in lines] == [
        "tests/cli/test_a.py::test_y", "tests/laws/test_c.py::test_z[<3>]", "", "tests/cli", "tests/laws",
    ]  # fmt: skip


def test_a_law_over_many_cases_names_the_one_that_it_fails_in() -> None:
    seen = []

    @over([("a", 1), ("b", 2), ("c", 3)])
    @pytest.mark.parametrize("other", [5])
    def law(name: str, number: int, other: int) -> None:
        seen.append((name, number, other))
        assert number != 2

    assert list(inspect.signature(law).parameters) == ["other"] and law.pytestmark[0].args == ("other", [5])  # type: ignore[attr-defined]
    with pytest.raises(AssertionError) as failed:
        law(other=5)
    assert failed.value.__notes__ == ["in the case 'b', 2"] and seen == [("a", 1, 5), ("b", 2, 5)]


def test_a_test_that_sets_torch_s_threads_leaves_those_after_it_alone(request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    around = pytest_runtest_protocol(request.node)
    try:
        next(around)
        torch.set_num_threads(before + 2)
        with pytest.raises(StopIteration):
            around.send(None)
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)
