"""What strangers, liars and floods at the coordinator's port do to the replicas: nothing."""

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from tests.strangers import GARBAGE, GARBAGE_NAMES, hangs_up, memory_is_bounded
from thinwire.cli.main import main
from thinwire.elastic import coordinator_server as hub_module
from thinwire.elastic import join as join_module
from thinwire.elastic.connection_limits import UNSEEN_BYTES
from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_client import CoordinatorConnection, send_command
from thinwire.elastic.coordinator_server import KEY_FILE, TOKEN_BYTES, CoordinatorServer, client_keys, coordinator_keys
from thinwire.elastic.coordinator_state import CoordinatorConfig
from thinwire.elastic.invitation import Invitation, read_invitation
from thinwire.elastic.join import JoinPlan, join
from thinwire.elastic.one_time_invitations import (
    INVITATIONS_FILE,
    InvitedCallers,
    add_invitation,
    read_invitations,
)
from thinwire.elastic.protocol import MOST_BYTES_HERE, VERSION, Message, encode
from thinwire.errors import ConnectError, Refused, WrongCoordinator
from thinwire.training.elastic.coordinator_process import JOB_FILE, PORT_FILE
from thinwire.training.elastic.job import LocalSettings
from thinwire.transport.addresses import ListenConfig
from thinwire.transport.secret import Secret, make_secret
from thinwire.transport.wire import listener as wire_door
from thinwire.transport.wire.listener import MAX_UNPROVEN
from thinwire.version import __version__

SECRET, OTHER = Secret(key=bytes(range(32))), Secret(key=bytes(32))
HOST, SOON_S = "127.0.0.1", 600.0


class Port:
    """A coordinator at a port of this host, and an honest replica that talks with it."""

    def __init__(self, *, key: Secret | None = None, invitations: Path | None = None) -> None:
        self.said: list[str] = []
        self.journal: list[tuple[str, dict[str, Any]]] = []
        self.hub = CoordinatorServer(
            secret=SECRET, key=key, address=HOST, port=0, say=self.said.append, invitations=invitations
        )
        self.coordinator = Coordinator(
            CoordinatorConfig(
                job={"thinwire": __version__}, initial_replicas=1, sync_interval=10, overlap_steps=1,
                shard_windows=8, is_invite_only=invitations is not None,
            ),
            send=self.hub.send, record=lambda what, fields: self.journal.append((what, fields)), generation="g",
            secret=SECRET,
        )  # fmt: skip
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        public = b"" if key is None else coordinator_keys(key).public_bytes
        self.invitation = Invitation(host=HOST, port=self.hub.port, coordinator_key=public)
        self.heard: list[Message] = []
        self._news = threading.Condition()
        self.line = CoordinatorConnection(self.invitation, secret=SECRET, on_message=self._hear)
        self.line.send("join", version=VERSION, thinwire=__version__, host="honest")
        self.wait("welcome")
        self.line.send("here", address=HOST, port=1, corpus="c", windows=1, held=0, era=0, disk=0)
        self.line.send("active", step=0)
        self._leases = 0

    def _serve(self) -> None:
        try:
            self.hub.serve(self.coordinator, until=self._is_over.is_set)
        except BaseException as failure:
            self._failure = failure

    def _hear(self, message: Message) -> None:
        with self._news:
            self.heard.append(message)
            self._news.notify_all()

    def wait(self, kind: str, **fields: Any) -> None:
        def is_there() -> bool:
            wanted = {"kind": kind, **fields}
            return any(all(one.get(name) == value for name, value in wanted.items()) for one in self.heard)

        with self._news:
            assert self._news.wait_for(is_there, timeout=SOON_S), (kind, self._failure)

    def goes_on(self) -> None:
        """See that the honest replica is answered."""
        self._leases += 1
        number = self._leases
        self.coordinator.state.leases.count(0, dict.fromkeys(range(number), 8))
        self.line.send("lease", number=number)
        self.wait("leased", number=number)

    def close(self) -> None:
        self.line.close()
        self._is_over.set()
        self._thread.join()
        self.hub.close()
        assert self._failure is None, self._failure


@pytest.fixture
def port() -> Iterator[Port]:
    found = Port()
    yield found
    found.close()


class Caller:
    """One that has the secret, and says what it likes."""

    def __init__(self, port: Port, *, token: bytes | None = None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.plug = self._context.socket(zmq.DEALER)
        keys = client_keys(SECRET)
        self.plug.identity = token or b"t" + os.urandom(TOKEN_BYTES - 1)
        self.plug.curve_publickey, self.plug.curve_secretkey = keys.public, keys.private
        self.plug.curve_serverkey = coordinator_keys(SECRET).public
        self.plug.reconnect_ivl = -1
        self.plug.linger = 0
        self.plug.sndtimeo = round(1000 * SOON_S)
        self._monitor = self.plug.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.plug.connect(f"tcp://{HOST}:{port.hub.port}")

    def say(self, kind: str, **fields: Any) -> None:
        self.plug.send(encode(kind, **fields))

    def answer(self) -> Message:
        assert self.plug.poll(1000 * SOON_S)
        return json.loads(self.plug.recv())

    def is_cut_off(self) -> bool:
        return bool(self._monitor.poll(1000 * SOON_S))

    def close(self) -> None:
        self.plug.disable_monitor()
        self._context.destroy(linger=0)


@contextlib.contextmanager
def caller(port: Port, *, token: bytes | None = None) -> Iterator[Caller]:
    found = Caller(port, token=token)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("said", GARBAGE, ids=GARBAGE_NAMES)
def test_who_speaks_something_else_is_hung_up_on(port: Port, said: bytes) -> None:
    with memory_is_bounded(40_000_000), socket.create_connection((HOST, port.hub.port)) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(said)
        assert hangs_up(stranger)
    port.goes_on()


@pytest.mark.parametrize("way", ["no key", "another secret", "the server's key alone", "another server's key"])
def test_who_has_not_the_secret_is_never_heard(port: Port, way: str) -> None:
    context: zmq.Context[Any] = zmq.Context()
    plug = context.socket(zmq.DEALER)
    if way != "no key":
        keys = client_keys(SECRET if way == "another server's key" else OTHER)
        plug.curve_publickey, plug.curve_secretkey = keys.public, keys.private
        plug.curve_serverkey = coordinator_keys(SECRET if way == "the server's key alone" else OTHER).public
    monitor = plug.get_monitor_socket(
        zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    )  # fmt: skip
    plug.connect(f"tcp://{HOST}:{port.hub.port}")
    with contextlib.suppress(zmq.Again):  # it may be refused before it can say a word
        plug.send(encode("join", version=VERSION, thinwire=__version__, host="stranger"), zmq.NOBLOCK)
    assert monitor.poll(1000 * SOON_S)
    event = zmq.Event(int.from_bytes(monitor.recv_multipart()[0][:2], "little"))
    assert event is not zmq.EVENT_HANDSHAKE_SUCCEEDED
    plug.disable_monitor()
    context.destroy(linger=0)
    port.goes_on()
    assert [member.host for member in port.coordinator.state.roster] == ["honest"]


@pytest.mark.parametrize("key", [None, Secret(key=b"m" * 32)], ids=["the secret's key", "a key of its own"])
def test_a_member_that_poses_as_the_coordinator_is_refused(key: Secret | None) -> None:
    honest, posing = Port(key=Secret(key=b"c" * 32)), Port(key=key)
    try:
        # the member has the secret, and the port of the coordinator leads to its own one
        given = dataclasses.replace(honest.invitation, port=posing.hub.port)
        with pytest.raises(WrongCoordinator, match="has not proved the coordinator's key that the address names"):
            join(given, secret=SECRET, plan_of=lambda job: pytest.fail("welcomed"), deadline_s=3)
        with pytest.raises(WrongCoordinator, match="the whole address that the first host printed last"):
            send_command(given, secret=SECRET, deadline_s=1, verb="status", target="")
        assert len(posing.coordinator.state.roster) == 1
        # nor is an address without a key one for a coordinator that has one
        bare = dataclasses.replace(honest.invitation, coordinator_key=b"")
        with pytest.raises(WrongCoordinator, match="that follows from the secret"):
            send_command(bare, secret=SECRET, deadline_s=1, verb="status", target="")
        assert send_command(honest.invitation, secret=SECRET, deadline_s=SOON_S, verb="status", target="")["ok"]
    finally:
        honest.close()
        posing.close()


def test_a_damaged_line_of_invitations_invites_nobody_and_the_others_stay(tmp_path: Path) -> None:
    path, public_of = tmp_path / INVITATIONS_FILE, lambda key: client_keys(key).public_bytes
    add_invitation(tmp_path, public_of=public_of)
    path.write_bytes(path.read_bytes()[:20] + b"\xff")  # as a full disk leaves it
    second = add_invitation(tmp_path, public_of=public_of)
    assert read_invitations(path) == [b"", public_of(second)]


def test_an_invitation_admits_one_replica_and_a_used_one_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = Port(key=Secret(key=b"c" * 32), invitations=tmp_path / INVITATIONS_FILE)
    plan = lambda job: JoinPlan(num_replicas=2, interval_steps=10)  # noqa: E731
    listen = ListenConfig(address=HOST)
    try:
        first, second = (add_invitation(tmp_path, public_of=lambda key: client_keys(key).public_bytes) for _ in "ab")
        assert first.key.hex() not in (tmp_path / INVITATIONS_FILE).read_text(), "who reads the file is not invited"
        secrets: list[Secret] = []
        wire = join_module.WireTransport
        seen = lambda *, secret, **rest: (secrets.append(secret), wire(secret=secret, **rest))[1]  # noqa: E731
        monkeypatch.setattr(join_module, "WireTransport", seen)
        seated, _ = join(port.invitation, secret=first, plan_of=plan, listen=listen, deadline_s=SOON_S)
        try:
            assert secrets == [SECRET], "it is sent the job's secret, with which replicas reach each other"
            with pytest.raises(Refused, match="a replica has joined by this invitation, which admits one; ask whoever"):
                join(port.invitation, secret=first, plan_of=plan, listen=listen, deadline_s=SOON_S)
            monkeypatch.setattr(hub_module, "is_own", lambda host: False)
            with pytest.raises(Refused, match=r"takes new replicas by invitation only; ask .* thinwire invite FOLDER"):
                join(port.invitation, secret=SECRET, plan_of=plan, listen=listen, deadline_s=SOON_S)
            answer = send_command(port.invitation, secret=first, deadline_s=SOON_S, verb="status", target="")
            assert answer["ok"] and [one["replica"] for one in answer["status"]["members"]] == [0, 1]
            with pytest.raises(ConnectError):
                send_command(port.invitation, secret=first, deadline_s=1.0, verb="leave", target="0")
            other, _ = join(port.invitation, secret=second, plan_of=plan, listen=listen, deadline_s=SOON_S)
            other.close()
        finally:
            seated.close()
        port.goes_on()
        assert [fields for what, fields in port.journal if what == "invitation"] == [
            {"invitation": 1, "origin": HOST}, {"invitation": 2, "origin": HOST},
        ]  # fmt: skip
    finally:
        port.close()


def test_invite_prints_an_address_of_a_key_of_its_own_for_a_run_that_asks_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_secret(tmp_path / KEY_FILE)
    (tmp_path / PORT_FILE).write_text(json.dumps({"address": HOST, "port": 29400}))
    LocalSettings(
        invitation="", secret="", out=str(tmp_path), cache_dir="", threads=1, address=HOST,
        advertise="gate.example:7000", port_range="29400-29400",
    ).save()  # fmt: skip
    (tmp_path / JOB_FILE).write_text(json.dumps({"is_invite_only": False}))
    assert main(["invite", str(tmp_path)]) == 2
    assert "an invitation would limit nothing" in capsys.readouterr().err
    (tmp_path / JOB_FILE).write_text(json.dumps({"is_invite_only": True}))
    assert main(["invite", str(tmp_path)]) == 0 == main(["invite", str(tmp_path)])
    first, second = (read_invitation(line) for line in capsys.readouterr().out.splitlines())
    assert (first.host, first.port) == ("gate.example", 7000) and first.coordinator_key == second.coordinator_key
    assert first.secret != second.secret and first.secret is not None
    callers = InvitedCallers(client_keys(SECRET).public_bytes, tmp_path / INVITATIONS_FILE)
    callers.reload()
    assert [callers[client_keys(one.secret).public_bytes] for one in (first, second) if one.secret] == [1, 2]


def test_garbage_of_one_that_has_the_secret_is_refused_and_told_of_a_few_times(port: Port) -> None:
    deep = b'{"kind":"done","note":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}"
    nested = b'{"kind":"beat","step":' + b"[" * 900 + b"]" * 900 + b',"step_s":0}'
    with caller(port) as enemy:
        for raw in (
            b"",
            b"{}",
            b"[]",
            os.urandom(1000),
            b'{"kind":"flee"}',
            b'{"kind":"' + b"x" * 60_000,
            deep,
            nested,
        ):
            enemy.plug.send(raw)
        enemy.plug.send_multipart([b"{}", b"{}"])
        for _ in range(100):
            enemy.plug.send(b'{"' + b"y" * 50_000 + b'":1,"kind":"beat"}')
        enemy.say("beat", step=1, step_s=1e-320, roster=0)
        enemy.say("join", version=VERSION, thinwire=__version__, host="enemy")
        assert enemy.answer()["kind"] == "welcome"
        enemy.say("here", address="a b", port=1 << 40, corpus="c", windows=1, held=0, era=0, disk=0)
        enemy.say("vote", round=0, step=0, has=list(range(5000)), hash=0)
        enemy.say("lease", number=3)
        assert enemy.answer()["kind"] == "leased"
    port.goes_on()
    assert 5 <= len(port.said) <= 30 and max(map(len, port.said)) < 400, port.said
    assert any("several frames" in text for text in port.said) and any("'flee'" in text for text in port.said)


def test_a_message_that_is_too_large_ends_its_connection(port: Port) -> None:
    with caller(port) as enemy:
        enemy.plug.send(bytes(4 * MOST_BYTES_HERE))
        assert enemy.is_cut_off()
    port.goes_on()


def test_a_message_of_frames_without_an_end_ends_its_connection(port: Port) -> None:
    with memory_is_bounded(250_000_000), caller(port) as enemy:
        enemy.say("join", version=VERSION, thinwire=__version__, host="enemy")
        assert enemy.answer()["kind"] == "welcome"
        frame = bytes(MOST_BYTES_HERE - 100)
        for _ in range(UNSEEN_BYTES // len(frame) + 200):
            enemy.plug.send(frame, zmq.SNDMORE)
        enemy.plug.send(b"")  # libzmq sends nothing of a message before its last frame
        assert enemy.is_cut_off()
    port.goes_on()
    assert any("without an end" in text for text in port.said)


def test_connections_that_say_nothing_end_and_do_not_fill_the_process(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_door, "HANDSHAKE_S", 1.0)  # who shook hands and says nothing has twice that
    strangers, process = [], psutil.Process()
    silent = Caller(port)
    try:
        before = process.num_fds()
        for _ in range(3 * MAX_UNPROVEN):
            strangers.append(socket.create_connection((HOST, port.hub.port), timeout=SOON_S))
        end = time.monotonic() + SOON_S
        while process.num_fds() - before > len(strangers) + MAX_UNPROVEN + 8:
            assert time.monotonic() < end
            time.sleep(0.01)
        port.goes_on()
        assert silent.is_cut_off()
        for stranger in strangers:
            assert hangs_up(stranger)
    finally:
        silent.close()
        for stranger in strangers:
            stranger.close()


class SlowWire:
    """Relays connections to a port, each byte `latency_s` late, both ways."""

    def __init__(self, port: int, *, latency_s: float) -> None:
        self._port, self._latency_s = port, latency_s
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, HOST, 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        others, other = await asyncio.open_connection(HOST, self._port)
        await asyncio.gather(self._carry(reader, other), self._carry(others, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self._loop.call_later(self._latency_s, writer.write, data)
        self._loop.call_later(self._latency_s, writer.close)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


def flood_from(address: str, port: int, is_over: threading.Event) -> None:
    """Connect some hundreds of times a second, and keep each connection as long as the other end does.

    Far more than may be pending; a thread that never waits would test the interpreter's lock instead, which the
    coordinator's thread shares with it here.
    """
    held: deque[socket.socket] = deque()
    while not is_over.wait(0.002):
        with contextlib.suppress(OSError):
            held.append(socket.create_connection((HOST, port), timeout=SOON_S, source_address=(address, 0)))
        if len(held) > 500:
            held.popleft().close()
    for one in held:
        one.close()


def test_a_flood_of_strangers_keeps_nobody_with_a_slow_wire_from_joining(port: Port) -> None:
    wire, is_over = SlowWire(port.hub.port, latency_s=0.1), threading.Event()
    floods = [
        threading.Thread(target=flood_from, args=(f"127.0.0.{number}", port.hub.port, is_over)) for number in (2, 3)
    ]
    try:
        for flood in floods:
            flood.start()
        slow = Invitation(host=HOST, port=wire.port)
        for _ in range(3):
            answer = send_command(slow, secret=SECRET, deadline_s=60, verb="status", target="")
            assert answer["ok"]
        is_welcome = threading.Event()

        def hear(message: Message) -> None:
            if message["kind"] == "welcome":  # the run's progress may come before it
                is_welcome.set()

        line = CoordinatorConnection(slow, secret=SECRET, on_message=hear)
        for _ in range(30):  # a joiner repeats itself until it is answered, since a connection may be lost
            line.send("join", version=VERSION, thinwire=__version__, host="new")
            if is_welcome.wait(2):
                break
        assert is_welcome.is_set()
        line.close()
    finally:
        is_over.set()
        for flood in floods:
            flood.join()
        wire.close()
    port.goes_on()


def test_who_was_let_go_is_told_so_whatever_it_says(port: Port) -> None:
    token = b"t" + bytes(TOKEN_BYTES - 1)
    with caller(port, token=token) as old:
        old.say("join", version=VERSION, thinwire=__version__, host="old")
        assert old.answer()["replica"] == 1
        old.say("stuck", round=0, why="it cannot")
        assert old.answer()["kind"] == "expelled"
        for kind, fields in {
            "launch": {"round": 0, "step": 1 << 40, "used": {}}, "active": {"step": 5},
            "vote": {"round": 0, "step": 5, "has": [0, 1], "hash": 0}, "lease": {"number": 0}, "leave": {"why": ""},
            "lost": {"replica": 0}, "captured": {"step": 3, "root": "ab" * 32, "bytes": 1}, "done": {"note": {}},
        }.items():  # fmt: skip
            old.say(kind, **fields)
            assert old.answer()["kind"] == "unknown", kind
    port.goes_on()
    assert len(port.coordinator.state.roster) == 1 and port.coordinator.state.rounds.step == 0
    assert not port.coordinator.state.rounds.open_rounds


def test_a_flood_of_one_connection_leaves_the_others_their_answers(port: Port) -> None:
    with memory_is_bounded(60_000_000), caller(port) as enemy:
        enemy.say("join", version=VERSION, thinwire=__version__, host="enemy")
        assert enemy.answer()["kind"] == "welcome"
        text = "x" * 20_000
        for number in range(4000):
            enemy.say("note", level="warning", text=text)
            enemy.say("launch", round=number, step=1, used={})
            if number % 1000 == 0:
                port.goes_on()
        port.goes_on()
    assert len(port.coordinator.state.rounds.open_rounds) <= 256
    assert sum(1 for what, _ in port.journal if what == "finding") < 200
    assert any("more messages than a replica needs" in text for text in port.said) and len(port.said) < 100


def test_what_is_told_of_the_port_is_bounded_over_many_connections(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_MAX_INVALID", 1000)
    with caller(port) as enemy:
        for _ in range(500):
            enemy.plug.send(b"nothing")
        enemy.say("join", version=VERSION, thinwire=__version__, host="enemy")
        assert enemy.answer()["kind"] == "welcome"
    assert 60 <= len(port.said) <= 70


def test_what_a_joining_host_refuses_reaches_the_coordinator_and_its_status(port: Port) -> None:
    def plan_of(job: Mapping[str, Any]) -> JoinPlan:
        raise Refused("the run trains a model of other parameters")

    with pytest.raises(Refused):
        join(port.invitation, secret=SECRET, plan_of=plan_of, listen=ListenConfig(address=HOST), deadline_s=SOON_S)
    end_s = time.monotonic() + SOON_S
    while len(port.coordinator.state.roster) > 1 and time.monotonic() < end_s:
        time.sleep(0.01)
    status = send_command(port.invitation, secret=SECRET, deadline_s=SOON_S, verb="status", target="")["status"]
    told = "could not take part: the run trains a model of other parameters; the others go on without it"
    assert status["findings"][-1].endswith(told)
    port.goes_on()
