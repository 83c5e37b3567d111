"""A run on a carrier in one process: real joins, mailboxes and blobs, and leaders that follow each other."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from thinwire.carriers.memory import CarrierFault, MemoryCarrier, MemoryStore
from thinwire.elastic import mailbox
from thinwire.elastic.carried_blobs import CarriedBlobs, PollBudget
from thinwire.elastic.carried_journal import CarriedJournal, decode_entry, run
from thinwire.elastic.mailbox import LeaderWatch, MailboxConnection, open_run
from thinwire.elastic.protocol import VERSION, encode
from thinwire.errors import ConnectError, PayloadError
from thinwire.training.elastic.carried_coordinator import coordinate_on
from thinwire.transport.blob_store import BlobStore
from thinwire.transport.secret import Secret
from thinwire.version import __version__

UNLIMITED = float("inf")
JOB = {
    "thinwire": __version__, "identity": {"run": "r", "incarnations": ["i"]}, "begin_with": 2, "last_step": 100,
    "sync_interval": 10, "overlap_steps": 1, "shard_windows": 8, "start_timeout_s": 60.0, "resumed_step": 0,
}  # fmt: skip
FIRST = [{"what": "job", "job": JOB}, {"what": "run", **JOB["identity"]}]  # type: ignore[dict-item]


def until(what: Callable[[], Any], *, deadline_s: float = 60.0) -> Any:
    end_s = time.monotonic() + deadline_s
    while not (found := what()):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return found


class Leader:
    """A process that may lead, as a thread; `kill` ends it between two requests, without a word."""

    def __init__(self, store: MemoryStore, run_dir: Path, *, first: bool, gone_s: float = 1.0) -> None:
        self.said: list[str] = []
        self._is_dead = threading.Event()
        self.carrier = MemoryCarrier(store, on_request=self._request)
        self.until = threading.Event()
        run_dir.mkdir(exist_ok=True)
        self._thread = threading.Thread(target=self._run, args=(run_dir, FIRST if first else [], gone_s), daemon=True)
        self._thread.start()

    def _request(self, operation: str, name: str) -> None:
        if self._is_dead.is_set():
            raise SystemExit

    def _run(self, run_dir: Path, first_lines: list[dict[str, Any]], gone_s: float) -> None:
        with contextlib.suppress(SystemExit):
            coordinate_on(
                self.carrier, run_dir=run_dir, first_lines=first_lines, say=self.said.append, until=self.until,
                gone_s=gone_s, look_s=0.1,
            )  # fmt: skip

    def kill(self) -> None:
        self._is_dead.set()
        self._thread.join(timeout=30)

    def close(self) -> None:
        self.until.set()
        self._thread.join(timeout=30)


class Member:
    """A replica's connection, and what came over it."""

    def __init__(self, store: MemoryStore) -> None:
        self.heard: list[dict[str, Any]] = []
        self.carrier = MemoryCarrier(store)
        self.warned: list[str] = []
        self.line = MailboxConnection(self.carrier, on_message=self.heard.append, warn=self.warned.append)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.heard if one["kind"] == kind]

    def join(self) -> int:
        self.line.send("join", version=VERSION, thinwire=__version__, host="h")
        number: int = until(lambda: self.of("welcome"))[0]["replica"]
        return number

    def begin(self) -> None:
        self.line.send("here", address="carrier", port=1, corpus="c", windows=100, held=0, era=0, disk=0)

    def launch(self, round_id: int) -> None:
        self.line.send("beat", step=10, step_s=0.1, roster=0)
        self.line.send("launch", round=round_id, step=10 * (round_id + 1), used={})


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    things: list[Any] = []
    yield things
    for one in things:
        one.close()


def test_rounds_go_on_with_another_leader_and_none_is_decided_twice(
    tmp_path: Path, closing: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "_HEAD_S", 0.2)
    monkeypatch.setattr(mailbox, "_ALIVE_S", 0.2)
    store = MemoryStore()
    first = Leader(store, tmp_path / "first", first=True)
    members = [Member(store), Member(store)]
    closing += [one.line for one in members]
    assert sorted(one.join() for one in members) == [0, 1]
    second = Leader(store, tmp_path / "second", first=False)
    closing.append(second)
    for one in members:
        one.begin()
    for one in members:
        until(lambda one=one: one.of("state"))
        one.line.send("active", step=0)
    for one in members:
        until(
            lambda one=one: [
                roster
                for roster in one.of("roster")
                if sum(found["state"] == "active" for found in roster["members"]) == 2
            ]
        )

    def decide(round_id: int) -> None:
        for one in members:
            one.launch(round_id)
        for one in members:
            until(lambda one=one: [call for call in one.of("call") if call["round"] == round_id])
            one.line.send("vote", round=round_id, step=10 * (round_id + 1), has=[0, 1], hash=0)
        for one in members:
            until(lambda one=one: [found for found in one.of("decision") if found["round"] == round_id])

    decide(0)
    first.kill()
    began_s = time.monotonic()
    until(lambda: any("leads the run now" in text for text in second.said))
    assert time.monotonic() - began_s < 30
    decide(1)
    journal = CarriedJournal(carrier=MemoryCarrier(store), holder="reader")
    run(journal.read())
    decided = [line["round_id"] for line in journal.lines if line["what"] == "decision"]
    assert decided == [0, 1] and journal.term == 2
    members[0].line.send("command", verb="status", target="")
    answer = until(lambda: members[0].of("answer"))[0]
    assert answer["status"]["rounds"] == 2 and len(answer["status"]["members"]) == 2


def test_expired_credentials_pause_a_replica_and_lose_nothing(tmp_path: Path, closing: list[Any]) -> None:
    store = MemoryStore()
    closing.append(Leader(store, tmp_path / "a", first=True))
    member = Member(store)
    closing.append(member.line)
    member.carrier.inject(CarrierFault(on="put", kind="refused"))
    assert member.join() == 0
    assert any("renew them" in text for text in member.warned)
    assert any("answers again" in text for text in member.warned)


def test_a_watch_sees_a_leader_that_is_gone_or_has_resigned() -> None:
    store, now = MemoryStore(is_virtual=True), [0.0]
    carrier = MemoryCarrier(store)
    budget = PollBudget(an_hour=UNLIMITED, now=lambda: now[0])
    watch = LeaderWatch(carrier, budget=budget, gone_s=10.0, now=lambda: now[0])
    server = mailbox.MailboxServer(carrier, term=3, generation="g", say=print, budget=budget, now=lambda: now[0])
    server.flush()
    assert not watch.is_gone() and watch.term == 3
    now[0] = 9.0
    server.flush()
    now[0] = 18.0
    assert not watch.is_gone()
    now[0] = 28.5
    assert watch.is_gone()
    server.flush(has_resigned=True)
    assert watch.is_gone()


class Listener:
    """A coordinator that hears."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def handle(self, token: bytes, message: Any, *, now_s: float) -> None:
        self.heard.append(token)

    def tick(self, now_s: float) -> None: ...


def test_members_that_flood_or_lie_hold_up_none_and_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_MOST_CURSORS", 8)
    store, now, said = MemoryStore(is_virtual=True), [0.0], list[str]()
    carrier, coordinator = MemoryCarrier(store), Listener()
    budget = PollBudget(an_hour=UNLIMITED, now=lambda: now[0])
    server = mailbox.MailboxServer(
        carrier, term=3, generation="g", say=said.append, budget=budget, now=lambda: now[0]
    )  # fmt: skip

    def write(token: bytes, number: int, *, size: int = 0, place: bytes = b"") -> None:
        messages = [encode("command", verb="status", target=""), *([bytes(size)] if size else [])]
        letters = {"token": token, "number": number, "messages": messages}
        name = f"in/{(place or token).hex()}/{number:010d}"
        carrier.put(name, msgspec.msgpack.encode(letters), only_new=True)

    flood, honest = b"f" * 16, b"x" * 16
    for number in range(1, 300):
        write(flood, number)
    write(honest, 1)
    server.step(coordinator, turn=lambda: None)  # type: ignore[arg-type]
    assert honest in coordinator.heard and len(coordinator.heard) == 256
    for number in range(8):  # 56 MB at once
        write(flood, 400 + number, size=7 << 20)
    write(b"t" * 4096, 1, place=b"t")
    for number in range(20):
        write(bytes([number]) * 16, 1)
    for number in (1 << 40, -1):
        carrier.put(f"in/aa/{number:010d}", msgspec.msgpack.encode([honest, number, []]), only_new=True)
    while carrier.listing("in"):
        now[0] += 10.0
        before = carrier.cost().received_bytes
        server.step(coordinator, turn=lambda: None)  # type: ignore[arg-type]
        assert carrier.cost().received_bytes - before <= 32 << 20
    assert len(server._cursors) == 8 and max(map(len, server._cursors)) == 16
    assert any("no object of this thinwire" in text for text in said), said
    assert set(coordinator.heard) == {flood, honest, *(bytes([number]) * 16 for number in range(20))}


def test_a_reader_that_a_forged_head_led_away_comes_back() -> None:
    store, now = MemoryStore(is_virtual=True), [0.0]
    carrier = MemoryCarrier(store)
    budget = PollBudget(an_hour=UNLIMITED, now=lambda: now[0])
    server = mailbox.MailboxServer(carrier, term=3, generation="g", say=print, budget=budget, now=lambda: now[0])
    reader = mailbox.BroadcastReader(carrier, budget=budget, now=lambda: now[0])
    server.flush()
    assert [(one.term, one.number) for one in reader.read()] == [(3, 0)]
    for forged in (mailbox.Head(term=1 << 30, number=0), mailbox.Head(term=3, number=1 << 30)):
        now[0] += 4.0  # so that it looks
        carrier.put(mailbox.HEAD, msgspec.msgpack.encode(forged), only_new=False)
        assert list(reader.read()) == [] and (reader.term, reader.number) == (forged.term, forged.number)
        for _ in range(5):
            now[0] += 7.0
            server.flush()
            found = [one.number for one in reader.read()]
        assert reader.term == 3 and found
    with pytest.raises(PayloadError, match="out/head is no object"):  # before a term that no journal takes
        carrier.put(mailbox.HEAD, msgspec.msgpack.encode(mailbox.Head(term=1 << 62, number=0)), only_new=False)
        LeaderWatch(carrier, budget=budget).is_gone()
    with pytest.raises(ValueError, match="position 7 of the journal is no entry"):
        decode_entry(b'{"term":1,"holder":"h","lines":[{"what":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", position=7)


def blob(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_a_blob_is_uploaded_once_and_read_by_all_under_its_name(closing: list[Any]) -> None:
    store, budget = MemoryStore(), PollBudget(an_hour=UNLIMITED)
    carriers = [MemoryCarrier(store) for _ in range(3)]
    wires = [CarriedBlobs(one, replica=index, num_replicas=3, budget=budget) for index, one in enumerate(carriers)]
    stores = [BlobStore(wire, mirror=wire) for wire in wires]
    closing += wires
    waiting = stores[1].get(0, b"r\0part", most_bytes=10)  # before it is there
    stores[0].publish(b"r\0part", blob(1, 2, 3))
    assert waiting.wait(deadline_s=30).tolist() == [1, 2, 3]
    stores[1].publish(b"r\0part", blob(1, 2, 3))  # as a holder of it
    assert stores[2].get(1, b"r\0part", most_bytes=10).wait(deadline_s=30).tolist() == [1, 2, 3]
    assert [one.cost().puts for one in carriers] == [1, 0, 0]
    stores[1].withdraw(b"r\0part")
    stores[0].withdraw(b"r\0part")
    until(lambda: not store.blobs)
    wires[1].uploads_bulk = lambda: False
    for one in (stores[1], stores[0]):
        one.publish(b"state/1/0", blob(7), is_bulk=True)
    assert stores[2].get(1, b"state/1/0", most_bytes=10).wait(deadline_s=30).tolist() == [7]
    assert carriers[1].cost().puts == 0
    carriers[2].inject(CarrierFault(on="get", kind="throttled", times=2))
    stores[0].publish(b"r\0next", blob(9))
    assert stores[2].get(0, b"r\0next", most_bytes=10).wait(deadline_s=30).tolist() == [9]
    cancelled = stores[2].get(0, b"never", most_bytes=10)
    cancelled.cancel()
    assert cancelled.done()


def test_a_place_without_a_run_of_the_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match="take the whole address"):
        open_run(f"file://{tmp_path}", secret=Secret(key=bytes(32)))
    open_run(f"file://{tmp_path}", secret=Secret(key=bytes(32)), may_create=True)
    open_run(f"file://{tmp_path}", secret=Secret(key=bytes(32)))  # the remedy
    for may_create in (True, False):  # a part that is there beside those that are to be made
        open_run(f"file://localhost{tmp_path}/of%20us/runs", secret=Secret(key=bytes(32)), may_create=may_create)
    assert (tmp_path / "of us" / "runs").is_dir() and not (tmp_path / "of%20us").exists()
    store = MemoryStore()
    line = MailboxConnection(MemoryCarrier(store), on_message=lambda message: None)
    assert isinstance(line.no_answer(deadline_s=1.0), ConnectError)
    line.close()
