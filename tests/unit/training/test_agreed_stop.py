"""The agreed stop of a local run: one step for all, passed by none, and nobody ends before all have saved."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import pytest

from thinwire.training import launch
from thinwire.training.agreed_stop import AgreedStop


@pytest.mark.parametrize("seed", range(8))
def test_all_stop_after_one_step_whenever_the_signal_comes_and_however_far_they_are_apart(
    seed: int, tmp_path: Path
) -> None:
    draw, ahead = random.Random(seed), 3
    launcher = AgreedStop.create(tmp_path / "stop", size=3)
    done = [0, 0, 0]
    ended: list[tuple[int, int]] = []

    def train(rank: int) -> None:
        stop = AgreedStop(tmp_path / "stop", size=3, rank=rank)
        while not stop.is_due(done[rank]):
            while done[rank] - min(done) >= ahead:  # needs a message of the slowest
                time.sleep(0)
            time.sleep(pauses[rank])
            done[rank] += 1
        stop.saved()
        ended.append((done[rank], launcher.num_saved()))

    pauses = [draw.uniform(0, 2e-3) for _ in range(3)]
    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    while min(launcher.steps()) < 1 + seed:
        time.sleep(1e-4)
    step = launcher.decide()
    for thread in threads:
        thread.join(30)
    assert ended == [(step, 3)] * 3


def test_a_run_in_which_a_process_has_not_begun_has_nothing_to_save(tmp_path: Path) -> None:
    launcher = AgreedStop.create(tmp_path / "stop", size=2)
    assert not AgreedStop(tmp_path / "stop", size=2, rank=0).is_due(5)
    assert launcher.steps() == [5, -1] and launcher.decide() == 0


def test_a_process_passes_a_signal_of_its_own_on_to_the_launcher(tmp_path: Path) -> None:
    launcher = AgreedStop.create(tmp_path / "stop", size=1)
    assert launcher.signal() == 0
    AgreedStop(tmp_path / "stop", size=1, rank=0).request(15)
    assert launcher.signal() == 15


@pytest.mark.parametrize("num_later", [1, 2])
def test_a_signal_that_reaches_the_replicas_first_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_later: int
) -> None:
    monkeypatch.setattr(launch, "_ONE_SIGNAL_S", 0.0)
    stop = AgreedStop.create(tmp_path / "stop", size=1)
    replica = AgreedStop(tmp_path / "stop", size=1, rank=0)
    assert not replica.is_due(3)
    replica.request(signal.SIGINT)
    signals: list[int] = []
    replicas = launch._Replicas(tmp_path / "logs", stop)
    replicas.start(
        ["sh", "-c", f"while ! [ -e {tmp_path}/end ]; do sleep 0.01; done"], names=["it"], rendezvous=tmp_path
    )
    try:
        assert replicas.wait(signals, may_return=range(0), say=str) == {}

        def say(text: str) -> None:
            signals.extend([signal.SIGINT] * num_later)  # the launcher's own, long after the replica's
            if num_later == 1:
                (tmp_path / "end").touch()

        assert replicas.save(signals, say) == (num_later == 1), "ended at once, or only as the process did"
    finally:
        replicas.stop()
