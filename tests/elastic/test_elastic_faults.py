"""The real engine where replicas die, are cut off, come and are slow: those that go on hold the same bits."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_elastic_engine import SeatTransport, build, global_values
from torch import nn
from town import Resident, Town

import thinwire
from thinwire.adaptive_timeout import AdaptiveTimeout
from thinwire.averaging.quorum import PartHeader, read_part_header
from thinwire.averaging.round_context import RoundContext
from thinwire.averaging.topology import Peers
from thinwire.elastic.coordinator import MOST_BAD_PARTS
from thinwire.elastic.elastic_method import elastic
from thinwire.elastic.engine_driver import ElasticDriver
from thinwire.elastic.replica_state import global_tensors, load_global_parameters, load_outer
from thinwire.elastic.round_driver import HEAD_BYTES, blob_name, round_of_name
from thinwire.errors import Expelled, NonFiniteError
from thinwire.sync.round_engine import RoundEngine
from thinwire.transport.loopback import single

STEPS, SOON_S = 32, 600.0
# Rounds after the last step have numbers from here on.
FINAL = 1 << 40
# Steps of a test are quick; an interval has 4.
INTERVAL = 4


class Worker:
    """A replica that trains in a thread of its own."""

    def __init__(
        self,
        town: Town,
        *,
        name: str,
        patience_steps: float = STEPS,
        interval: int = INTERVAL,
        steps: int = STEPS,
        bears: bool = False,
        blend: float = 0.5,
        held: int = 0,
    ) -> None:
        self.resident = Resident(town, name=name, held=held)
        self.session = self.resident.session
        self.replica = self.resident.replica
        self.last_step = steps
        self.num_batches = 0
        self.findings: list[str] = []
        self.steps: list[int] = []
        self.spoil: Callable[[int], float | None] = lambda step: None
        self.pause: Callable[[int], None] = lambda step: None
        self.captured: dict[int, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}
        self.expelled = False
        self.failure: BaseException | None = None
        self.session.transfer_timeout = AdaptiveTimeout(least_s=0.3, most_s=1.0)
        self.model = build()
        self.driver = ElasticDriver(self.resident.seat.known_step, grace_steps=patience_steps, tolerates_overdue=bears)
        self.driver.observers.append(self)
        method = thinwire.methods.streaming_diloco(
            sync_interval=interval, overlap_steps=1, num_fragments=2, blend=blend
        )
        self.optimizer = thinwire.DistributedOptimizer(
            self.model, torch.optim.SGD(self.model.parameters(), lr=0.05),
            method=elastic(method, session=self.resident.seat, find=self.findings.append),
            transport=SeatTransport(self.replica), catch_up=self.driver,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, daemon=True)

    def on_exchanged(self, step: int) -> None:
        self.session.reach(step)
        for missed in [cut for cut in self.session.view.captures if cut < step]:  # the word came too late
            self.session.view.captures.discard(missed)
            self.session.send("missed", step=missed)
        if step in self.session.view.captures:
            self.captured[step] = global_tensors(self.optimizer.engine, self.model)
            self.session.send("captured", step=step, root="ab" * 32, bytes=1)

    def begin(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._train()
            self.optimizer.close(final_exchange=True)
        except Expelled:
            self.expelled = True
        except BaseException as failure:
            self.failure = failure

    def _train(self) -> None:
        while self.optimizer.steps_done < self.last_step:
            self.session.check()
            self.pause(self.optimizer.steps_done + 1)
            step = self.optimizer.steps_done + 1
            generator = torch.Generator().manual_seed(1000 * self.replica + step)
            x, y = torch.randn(6, 7, generator=generator), torch.randn(6, 5, generator=generator)
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.count_tokens(6)
            self.num_batches += 1
            self.optimizer.next_stop = self.last_step
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps.append(self.optimizer.steps_done)
            factor = self.spoil(step)
            if factor is not None:
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.mul_(factor)

    def end(self) -> list[torch.Tensor]:
        """Return the global values at the end."""
        self.ended()
        assert not self.expelled
        return global_values(self.optimizer)

    def ended(self) -> None:
        self._thread.join(timeout=SOON_S)
        assert not self._thread.is_alive(), f"replica {self.replica} stands still"
        assert self.failure is None, self.failure


class Street:
    """Some workers, and what becomes of them."""

    def __init__(self, count: int, **more: Any) -> None:
        self.town = Town(planned=count, sync_interval=int(more.get("interval", INTERVAL)))
        self.quicken()
        self.workers = [Worker(self.town, name=f"host{number}", **more) for number in range(count)]
        for worker in self.workers:
            worker.resident.begin()

    def quicken(self) -> None:
        """Let the coordinator wait for votes a second at most, and for late replicas half of one."""
        with self.town.lock:
            self.town.coordinator.state.rounds._spreads = AdaptiveTimeout(least_s=0.5, most_s=1.0)
            self.town.coordinator.state.rounds.grace_s = lambda *, step_s: 0.5  # type: ignore[method-assign]

    def begin(self) -> None:
        for worker in self.workers:
            worker.begin()

    def close(self) -> None:
        for worker in self.workers:
            worker.resident.die()
        self.town.close()

    def members(self) -> dict[int, tuple[int, ...]]:
        return {line["round_id"]: line["members"] for line in self.town.journal if line["what"] == "decision"}


@pytest.fixture
def street() -> Iterator[Callable[..., Street]]:
    made: list[Street] = []

    def make(count: int, **more: Any) -> Street:
        made.append(Street(count, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def are_alike(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def dies_saying(street: Street, number: int, kind: str, *, before: bool, round_id: int = 4) -> None:
    """Let a replica die in the moment it says something of a round."""
    resident = street.workers[number].resident
    inner = resident.session._send

    def say(said: str, **fields: object) -> None:
        is_now = said == kind and fields.get("round") == round_id
        if is_now and before:
            resident.die()
        inner(said, **fields)
        if is_now:
            resident.die()
        if number in street.town.dead:
            resident.session.view.expelled_why = "died"

    resident.session._send = say


@pytest.mark.parametrize(
    ("kind", "before"), [("launch", True), ("launch", False), ("vote", False)], ids=["unheard", "launched", "voted"]
)
def test_a_replica_that_dies_in_a_round_leaves_the_others_alike(
    street: Callable[..., Street], kind: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.elastic.roster.SUSPECT_SILENCE_S", 0.5)
    run = street(3)
    dies_saying(run, 2, kind, before=before)
    run.begin()
    run.workers[2].ended()
    with run.town.lock:
        run.town.coordinator.state.roster.get(2).is_suspect = True  # as whoever lost its connection to it says
    assert are_alike(run.workers[0].end(), run.workers[1].end())
    members = run.members()
    # on a busy machine a replica may be silent for longer than allowed at the start
    assert (0, 1, 2) in members.values() and members[max(members)] == (0, 1)
    for worker in run.workers[:2]:
        assert worker.steps == list(range(1, STEPS + 1))


def test_a_cut_link_leaves_one_part_out_and_all_alike(street: Callable[..., Street]) -> None:
    run = street(3)
    run.workers[0].pause = lambda step: run.town.cut.add(frozenset({0, 1})) if step == STEPS - 6 else None
    run.begin()
    values = [worker.end() for worker in run.workers]
    assert are_alike(values[0], values[1]) and are_alike(values[0], values[2])
    members = run.members()
    assert members[0] == (0, 1, 2)
    # the link is cut between 0 and 1: each round's mean holds what a group that sees each other holds
    assert {members[number] for number in sorted(members)[-2:]} <= {(0, 2), (1, 2)}


def test_a_coordinator_that_comes_back_in_the_middle_of_a_round_changes_nothing(street: Callable[..., Street]) -> None:
    calm = street(3)
    calm.begin()
    expected = calm.workers[0].end()
    run = street(3)
    has_died = threading.Event()

    def say_and_die(said: str, **fields: object) -> None:
        inner(said, **fields)
        if said == "vote" and fields["round"] == 5 and not has_died.is_set():
            has_died.set()
            run.town.restart()
            run.quicken()

    inner = run.workers[1].resident.session._send
    run.workers[1].resident.session._send = say_and_die
    run.begin()
    values = [worker.end() for worker in run.workers]
    assert has_died.is_set()
    assert all(members == (0, 1, 2) for members in run.members().values())
    for value in values:
        assert are_alike(value, expected)


class LateMomenta:
    """Momenta that arrive when a test lets them."""

    def __init__(self, outer: dict[str, torch.Tensor], has_come: threading.Event) -> None:
        self.outer, self.has_come = outer, has_come

    def is_here(self) -> bool:
        return self.has_come.is_set()

    def load_into(self, engine: RoundEngine) -> None:
        assert self.has_come.wait(SOON_S)
        load_outer(engine, self.outer)


def joiner_of(run: Street, *, has_begun: threading.Event, bears: bool) -> Worker:
    """Let a replica come that has been offered a state; the others wait for it before they are at the end."""
    is_cut = threading.Event()

    def wait(step: int) -> None:
        if step == 14:
            is_cut.wait(SOON_S)
        if step == 20:
            has_begun.wait(SOON_S)

    for worker in run.workers:
        worker.pause = wait
    run.begin()
    joiner = Worker(run.town, name="joiner", bears=bears)
    run.workers.append(joiner)
    view, end = joiner.session.view, time.monotonic() + SOON_S
    while view.offer is None and time.monotonic() < end:
        if run.town.coordinator.state.snapshots.of(joiner.replica) is not None:
            is_cut.set()
        time.sleep(0.005)
    is_cut.set()
    return joiner


@pytest.mark.parametrize("is_late", [False, True])
def test_who_begins_at_a_cut_ends_with_the_bits_of_the_others(street: Callable[..., Street], is_late: bool) -> None:
    run, has_begun, has_come = street(2, bears=is_late), threading.Event(), threading.Event()
    joiner = joiner_of(run, has_begun=has_begun, bears=is_late)
    engine, offer = joiner.optimizer.engine, joiner.session.view.offer
    parameters, outer = run.workers[offer.holders[0]].captured[offer.step]
    load_global_parameters(engine, joiner.model, parameters)
    if is_late:
        joiner.driver.await_state(LateMomenta(outer, has_come))
    else:
        load_outer(engine, outer)
    begun = global_values(joiner.optimizer)
    joiner.session.reach(offer.step)
    joiner.resident.begin(offer.step)
    joiner.driver.begin_at(joiner.optimizer, offer.step)
    joiner.begin()
    has_begun.set()
    if is_late:  # it trains on and takes part in rounds, but applies none
        end = time.monotonic() + SOON_S
        while joiner.num_batches < STEPS and time.monotonic() < end:
            time.sleep(0.005)
        assert joiner.session.step == offer.step and joiner.optimizer.steps_done - offer.step < joiner.num_batches
        assert are_alike(global_values(joiner.optimizer), begun)
        has_come.set()
    values = [worker.end() for worker in run.workers]
    assert are_alike(values[0], values[1]) and are_alike(values[0], values[2])
    assert joiner.steps[0] >= offer.step > 0


def test_the_time_of_a_slow_replica_is_not_the_others_and_its_tokens_count_later(
    street: Callable[..., Street],
) -> None:
    run = street(3, patience_steps=1.0, interval=20, steps=120)
    *fast, slow = run.workers
    for worker in fast:
        worker.pause = functools.partial(pause, 0.02)
        worker.session.report_work(step_s=0.02)
    slow.session.report_work(step_s=0.2)

    def wait_for_ten(step: int) -> None:
        """Take ten times as long as the others, however long those take."""
        goal = min(len(worker.steps) for worker in fast) + 10
        while any(worker.optimizer.steps_done < worker.last_step and len(worker.steps) < goal for worker in fast):
            time.sleep(0.002)

    slow.pause = wait_for_ten
    offered: dict[int, tuple[int, int]] = {}
    publish = slow.resident.shelf.publish

    def watch(name: bytes, payload: torch.Tensor) -> None:
        if name == blob_name(round_of_name(name), slow.replica):
            offer, _ = read_part_header(payload[HEAD_BYTES:], step=1000, what="a part")
            offered[round_of_name(name)] = offer.num_tokens, slow.num_batches
        publish(name, payload)

    slow.resident.shelf.publish = watch
    run.town.coordinator.state.rounds.grace_s = lambda *, step_s: 0.25  # type: ignore[method-assign]
    run.begin()
    values = [worker.end() for worker in run.workers]
    assert are_alike(values[0], values[1]) and are_alike(values[0], values[2])
    assert len(slow.steps) < 120 / 4, "it passes over what it lacks"
    assert all(len(worker.steps) > 3 * len(slow.steps) for worker in fast)
    counted = [number for number, members in run.members().items() if slow.replica in members]
    assert counted
    # rounds alternate between the two fragments, and each part holds what no earlier round has counted
    for fragment in (0, 1):
        own = [number for number in sorted(counted) if number % 2 == fragment and number < FINAL]
        if own:
            assert sum(offered[number][0] for number in own) == 6 * offered[own[-1]][1]


def test_a_replica_that_stood_still_for_long_is_told_to_join_again(
    street: Callable[..., Street], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.elastic.coordinator_state._LEAST_STALL_S", 1.0)
    run = street(3, steps=STEPS * 3)
    is_removed = threading.Event()
    run.workers[2].pause = lambda step: is_removed.wait(SOON_S) if step == 10 else None
    for worker in run.workers[:2]:  # they do not end before
        worker.pause = lambda step: is_removed.wait(SOON_S) if step == 2 * STEPS else None
    run.begin()
    end_s = time.monotonic() + SOON_S
    while 2 in run.town.coordinator.state.roster.active and time.monotonic() < end_s:
        time.sleep(0.01)
    is_removed.set()
    run.workers[2].ended()
    assert run.workers[2].expelled and not run.workers[2].session.view.has_bad_parts
    values = [worker.end() for worker in run.workers[:2]]
    assert are_alike(*values)
    assert [text for text in run.town.coordinator.state.findings if "replica 2 on host2 did no step for" in text]


def pause(seconds: float, step: int) -> None:
    time.sleep(seconds)


def nan_at(step: int) -> Callable[[int], float | None]:
    return lambda now: float("nan") if now == step else None


@pytest.mark.parametrize("is_hidden", [False, True], ids=["withheld", "offered"])
def test_a_replica_whose_parameters_are_nan_is_dropped_with_one_finding(
    street: Callable[..., Street], is_hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = street(3)
    run.workers[2].spoil = nan_at(9)
    if is_hidden:  # it does not see for itself that its parts are bad
        monkeypatch.setattr("thinwire.elastic.elastic_mean._is_finite", lambda tensor: True)
    run.begin()
    values = [worker.end() for worker in run.workers[:2]]
    assert are_alike(*values) and all(bool(value.isfinite().all()) for value in values[0])
    run.workers[2].ended()
    assert run.workers[2].expelled and run.workers[2].session.view.has_bad_parts
    bad = [members for number, members in sorted(run.members().items()) if 2 * (number + 1) >= 8]
    assert sum(2 in members for members in bad) <= (MOST_BAD_PARTS + 1 if is_hidden else 1), "few rounds had its part"
    told = [text for text in run.town.coordinator.state.findings if "NaN" in text]
    assert len(told) == 1 and "replica 2 on host2 was dropped: 2 of its parts in a row hold NaN" in told[0]
    assert not any("NaN" in text for worker in run.workers for text in worker.findings)


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_in_which_all_replicas_are_nan_ends_with_one_error(street: Callable[..., Street], count: int) -> None:
    run = street(count)
    for worker in run.workers:
        worker.spoil = nan_at(9)
    run.begin()
    for worker in run.workers:
        worker._thread.join(timeout=SOON_S)
        assert isinstance(worker.failure, NonFiniteError) and not worker.expelled
        assert "the model has diverged" in str(worker.failure) and "resume from a checkpoint" in str(worker.failure)
    told = [text for text in run.town.coordinator.state.findings if "NaN" in text]
    assert len(told) == 1


def test_a_part_of_many_steps_may_be_longer_than_those_of_few(street: Callable[..., Street]) -> None:
    steady = street(3).workers[2]
    lengths = {0: 1.0, 1: 1.0, 2: 9.0}
    exchange = steady.optimizer.engine.exchanges[0]
    for steps, length in ((90, 9.0), (20, 6.0)):
        decoded = {member: torch.full((4,), length) for member, length in lengths.items()}
        offers = {member: PartHeader(num_tokens=100, num_steps=10, has_part=True) for member in (0, 1)}
        offers[2] = PartHeader(num_tokens=10 * steps, num_steps=steps, has_part=True)
        context = RoundContext(peers=Peers(me=2, members=(0, 1, 2)), transport=single(), round_id=9, step=100)
        exchange._leave_out_and_shorten(decoded, offers, context=context)
        assert torch.allclose(decoded[2], torch.full((4,), length))
