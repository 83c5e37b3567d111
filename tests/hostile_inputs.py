"""Parsers of bytes from other hosts or from the disk, as functions of bytes: each reads its input or refuses it.

`benchmarks/fuzz.py` runs them under a fuzzer; the tests run them on some thousand mutations of valid inputs.
A target fails where a parser raises anything but its documented error, or returns values outside their ranges.
"""

import functools
import hashlib
import json
import math
import secrets
import selectors
import socket
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq

from thinwire.averaging.exchange import decode as decode_part
from thinwire.averaging.quorum import (
    MeanHeader,
    PartHeader,
    read_mean_header,
    read_part_header,
    with_mean_header,
    with_part_header,
)
from thinwire.averaging.round_context import Progress
from thinwire.codecs import NAMES, by_name
from thinwire.elastic.coordinator import Coordinator
from thinwire.elastic.coordinator_session import CoordinatorSession
from thinwire.elastic.coordinator_state import CoordinatorConfig
from thinwire.elastic.global_state import MAGIC, GlobalState, pack, unpack
from thinwire.elastic.invitation import Invitation, read_invitation
from thinwire.elastic.journal import Journal
from thinwire.elastic.protocol import VERSION, Message, decode, encode
from thinwire.errors import ConnectError, PayloadError, ThinwireError
from thinwire.lab.daemon_client import Channel
from thinwire.monitor.active_test.wire_tests import cells_of, read_flow, read_pair, seconds_of
from thinwire.monitor.dashboard.server import DashboardServer, Feed
from thinwire.monitor.dashboard.snapshot import RunFollower
from thinwire.monitor.doctor.peer import parse_target
from thinwire.planning import probe
from thinwire.recording.connection_records import RankPlace
from thinwire.sync import consistency_check
from thinwire.transport import burst_probe as host_probes
from thinwire.transport import connect as connect_module
from thinwire.transport import message
from thinwire.transport.addresses import RankEndpoint
from thinwire.transport.base import JSON_BYTES, Envelope, read_object
from thinwire.transport.rendezvous import Rendezvous
from thinwire.transport.secret import Secret
from thinwire.transport.streams import ROUNDS, MessageAddress
from thinwire.transport.wire.connection import key_pair
from thinwire.transport.wire.framing import (
    CancelFrame,
    Credit,
    FrameError,
    Goodbye,
    Hello,
    MessagePart,
    MessageStart,
    Receipt,
    RequestFrame,
    read,
    write,
)
from thinwire.transport.wire.listener import ACCEPTED, UNKNOWN, Listener
from thinwire.version import __version__

NUMEL = 37
_TOKENS = (b"a", b"b", b"c")


def read_frame(raw: bytes) -> None:
    """Read a frame of the wire; what is read is written as the same bytes."""
    try:
        frame = read(memoryview(raw))
    except FrameError:
        return
    assert bytes(write(frame)) == raw


def read_message(raw: bytes) -> None:
    """Read a message with its header and checksums."""
    try:
        found = message.unpack(_vector(raw), source=1, envelope=_envelope())
    except ThinwireError:
        return
    assert found.payload.numel() <= len(raw)


def read_state(raw: bytes) -> None:
    """Read a global state; what is read is packed as the same bytes."""
    try:
        state = unpack(_vector(raw))
    except ThinwireError:
        return
    assert bytes(pack(state).numpy()) == raw


def read_signed_message(raw: bytes) -> None:
    """Read a message whose header has the right checksum, whatever it says."""
    size = message.HEADER_BYTES - 4
    head = raw[:size].ljust(size, b"\0")
    read_message(head + struct.pack("<I", zlib.crc32(head)) + raw[size:])


def read_signed_state(raw: bytes) -> None:
    """Read a state whose lengths and hash are those of its header, whatever that says: a line, and then the tensors."""
    header, _, body = raw.partition(b"\n")
    start = 64 + len(header)
    padding = bytes(-start % 64)
    digest = hashlib.sha256(header).digest()
    total = start + len(padding) + len(body)
    read_state(struct.pack("<8sIIQQ32s", MAGIC, 1, 0, len(header), total, digest) + header + padding + body)


def read_part(raw: bytes) -> None:
    """Read a part of an elastic round, in the code that the first byte says."""
    codec = by_name(NAMES[raw[0] % len(NAMES)]) if raw else by_name(NAMES[0])
    try:
        offer, coded = read_part_header(_vector(raw[1:]), step=1000, what="a part")
        found = decode_part(codec, coded, numel=NUMEL, peer=1, what="a part")
    except ThinwireError:
        return
    assert offer.weight >= 0 and found.shape == (NUMEL,)


def read_quorum_word(raw: bytes) -> None:
    """Read a verdict of a quorum."""
    try:
        read_mean_header(_vector(raw), num_replicas=3, server=1, least=2, step=10, what="a verdict")
    except ThinwireError:
        return


def read_words(raw: bytes) -> None:
    """Read an invitation that a person typed."""
    try:
        read_invitation(raw.decode("utf-8", "replace"))
    except (ThinwireError, ValueError):
        return


def read_journal(raw: bytes) -> None:
    """Read a coordinator's journal that was damaged anywhere, and write on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        path.write_bytes(raw)
        try:
            journal = Journal(path)
        except ThinwireError:
            return
        journal.write("numbers", {"next_replica": 1})
        journal.close()
        assert Journal(path).lines[-1] == {"what": "numbers", "next_replica": 1}


def read_rank_note(raw: bytes) -> None:
    """Read the note by which a rank introduces itself in torch's store, which authenticates no one."""
    try:
        station = RankEndpoint.from_json(raw.decode("utf-8", "replace"), rank=1)
    except ConnectError as error:
        assert len(str(error)) < 1000 and str(error).isprintable()
        return
    texts = (station.hostname, station.host, station.address, station.secret)
    assert all(type(text) is str and text.isprintable() for text in texts)
    assert station.rank == 1 and type(station.replica) is int and 0 < station.port < 65_536


def read_board(raw: bytes) -> None:
    """Meet over notes that are anything: the list of ranks, the notes of two others, a beat and a key, a line each."""
    lines = [*raw.split(b"\n"), b"", b"", b"", b"", b""][:5]
    store = dist.HashStore()  # type: ignore[attr-defined]
    for key, text in zip(("present", "endpoint/0", "endpoint/2", "beat/0", "key"), lines, strict=True):
        store.set(key, text)
    board = Rendezvous(store, rank=1, world_size=3, place="h:1")
    own = RankEndpoint(rank=1, replica=1, hostname="h", host="h", address="10.0.0.1", port=1)
    board.is_silent(0)
    for read_one in (
        connect_module._gather_endpoints,
        lambda own, board, deadline_s: connect_module._shared_key(board, deadline_s=1),
    ):
        try:
            found = read_one(own, board, deadline_s=1.0)
        except ConnectError as error:
            assert len(str(error)) < 1000 and str(error).isprintable()
            continue
        assert len(found.key) == 32 if isinstance(found, Secret) else set(found) <= {0, 1, 2} and 1 in found


def read_plan(raw: bytes) -> None:
    """Read a plan of an active test, and what a rank says of one."""
    text = raw.decode("utf-8", "replace")
    try:
        found = read_object(text, whose="a note")
    except PayloadError:
        return
    pair = read_pair(found)
    assert 0 <= pair.rate_bits_per_s < math.inf and len(pair.detail) <= 300 and pair.detail.isprintable()
    flow = read_flow(9, found.get("seconds"))
    assert flow is None or 0 < flow.seconds < math.inf
    for parts in (2, 3):
        try:
            assert all(0 <= row[0] < 4 and 0 <= row[1] < 4 for row in cells_of(found, world_size=4, parts=parts))
            assert 0 <= seconds_of(found, "limit_s") <= 3600
        except PayloadError as error:
            assert len(str(error)) < 1000


def read_note(raw: bytes) -> None:
    """Read a note of a peer, and in it what its probe of a wire measured."""
    try:
        found = read_object(raw, whose="the note of replica 0")
        latency_s, transfers = probe._checked(found, (0, 1))
        fit = probe._fit(latency_s, transfers)
    except PayloadError:
        return
    assert 0 < fit.bandwidth_bits_per_s < math.inf and 0 <= fit.overhead_s < math.inf


def read_fingerprint(raw: bytes) -> None:
    """Read what a peer trains, as it says before the first step."""
    try:
        for tensor in consistency_check.parse_listing(raw, peer=1):
            assert len(tensor) == 4
    except PayloadError:
        pass
    try:
        found = consistency_check._parse_fingerprint(raw, peer=1)
    except PayloadError:
        return
    assert set(found) == {"description", "model", "values", "frozen", "listing_bytes"}


def read_rank_place(raw: bytes) -> None:
    """Read where a rank of a watched job is, and connect to it as far as that needs no network."""
    place = RankPlace.from_text(raw.rstrip(b"\0").decode("utf-8", "replace"))
    assert 0 <= place.port < 65_536 and len(place.to_text().encode()) <= 4 * len(raw) + 64
    for address in place.addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.inet_pton(family, address)  # what is dialled is an address as the kernel reads it


class _Bursts:
    """A host's probes whose thread has ended, so that what comes is read here, one input after the other."""

    def __init__(self) -> None:
        self.took_s: list[float] = []
        self.probes = host_probes.BurstProbe(host_probes.open_probe_port(), {5: (["127.0.0.1"], 9)}, self.take)
        self.probes.close()
        self.probes._selector = selectors.DefaultSelector()
        self.way = self.probes._ways[5]

    def take(self, host: int, began_s: float, took_s: float, num_beside: int) -> None:
        assert host == 5 and took_s >= 0 and 0 <= num_beside < 1 << 32
        self.took_s.append(took_s)


_bursts = functools.cache(_Bursts)


def read_burst(raw: bytes) -> None:
    """Take a burst of bytes from another host, and the answer to one, in pieces of any size."""
    bursts = _bursts()
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)
    begun = host_probes.BURST_BYTES - 1 - (raw[0] if raw else 0)
    is_answer = len(raw) > 1 and raw[1] % 2 == 1
    data = bursts.way if is_answer else host_probes._Source(near, "127.0.0.1", count=begun)
    bursts.probes._selector.register(near, selectors.EVENT_READ, data)
    if is_answer:
        bursts.way.connection, bursts.way.is_open, bursts.way.left, bursts.way.answer = near, True, 0, b""
    with near, far:
        piece = 1 + (raw[2] if len(raw) > 2 else 0)
        for start in range(3, len(raw), piece):
            if near.fileno() < 0:
                break
            far.send(raw[start : start + piece])
            bursts.probes._serve(near, data, selectors.EVENT_READ)
        far.close()
        for _ in range(len(raw) + 1):  # what has come is read first
            if near.fileno() >= 0:
                bursts.probes._serve(near, data, selectors.EVENT_READ)
        assert near.fileno() < 0, "a connection that ended is closed"
    assert not bursts.probes._selector.get_map()


class _Port:
    """An authenticated port of ours, as a coordinator and a replica open it."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        secret = Secret(key=bytes(32))
        caller = key_pair(secret, replica=1, role="dialler").public_bytes
        self.door = Listener(
            self.context, address="127.0.0.1", keys=key_pair(secret, replica=0, role="door"), callers={caller: 1},
            decide=lambda replica: ACCEPTED,
        )  # fmt: skip
        self.caller = caller
        self.asker = self.context.socket(zmq.DEALER)
        self.asker.connect("inproc://zeromq.zap.01")


_port = functools.cache(_Port)


def ask_to_be_admitted(raw: bytes) -> None:
    """Ask whether a client key is one of the job's, as libzmq asks for whoever has proved one; a line is a frame."""
    port = _port()
    frames = raw.split(b"\n")
    port.asker.send_multipart([b"", *frames] if raw[:1] != b"\0" else frames)
    port.door.decisions()
    answer = port.asker.recv_multipart(zmq.DONTWAIT)
    is_known = len(answer) == 7 and answer[3] == ACCEPTED
    assert len(answer) == 7 and (is_known or answer[3] == UNKNOWN)
    assert not is_known or port.caller in raw


def greet(raw: bytes) -> None:
    """Connect to an authenticated port by TCP and send anything: nothing of it reaches us."""
    port = _port()
    with socket.create_connection(("127.0.0.1", port.door.port), timeout=10) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.sendall(raw)
        list(port.door.departed())
        port.door.decisions()
        assert not list(port.door.delivered()), "a stranger was heard"
        port.door.guard()


@functools.cache
def _dashboard() -> DashboardServer:
    folder = Path(tempfile.mkdtemp(prefix="thinwire-fuzz-"))
    return DashboardServer(Feed(RunFollower(folder)), host="127.0.0.1", port=0, token=secrets.token_hex(24))


def ask_the_dashboard(raw: bytes) -> None:
    """Send a request to the dashboard and end the connection; without the token no data comes back."""
    server = _dashboard()
    near, far = socket.socketpair()
    with near, far:
        far.sendall(raw)
        far.shutdown(socket.SHUT_WR)
        server.finish_request(near, ("127.0.0.1", 9))
        near.close()
        answer = b""
        while piece := far.recv(1 << 16):
            answer += piece
    line, _, rest = answer.partition(b"\r\n")
    assert not line.startswith(b"HTTP/1.1") or line.split()[1][:1] in b"45" or line.split()[1] == b"100"
    assert server.token is not None and server.token.encode() not in rest and b"sections" not in rest


def read_target(raw: bytes) -> None:
    """Read an address that a person gives to `thinwire doctor`."""
    try:
        host, port = parse_target(raw.decode("utf-8", "replace"))
    except ValueError:
        return
    assert host and 0 < port < 65_536


def read_lab_message(raw: bytes) -> None:
    """Read what a lab tells its keeper over their own pair of sockets."""
    near, far = socket.socketpair()
    channel = Channel(near)
    with near, far:
        far.sendall(raw)
        far.shutdown(socket.SHUT_WR)
        try:
            while (received := channel.receive()) is not None:
                assert isinstance(received[0], dict)
        except ValueError:
            return


class Hub:
    """A coordinator that hears lines of bytes: who says it, after how long, and what."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sent_bytes = 0
        self.decisions: dict[int, Any] = {}
        self.coordinator = Coordinator(
            CoordinatorConfig(
                job={"thinwire": __version__}, initial_replicas=2, sync_interval=10, overlap_steps=1,
                shard_windows=8,
            ),
            send=self._send, record=self._record, generation="g",
        )  # fmt: skip

    def _send(self, token: bytes, kind: str, fields: dict[str, Any]) -> None:
        decode(encode(kind, **fields), to_member=True)  # what it says can be read

    def _record(self, what: str, fields: dict[str, Any]) -> None:
        json.dumps(fields)
        if what == "decision":
            assert fields["round_id"] not in self.decisions, "a round was decided twice"
            self.decisions[fields["round_id"]] = fields

    def hear(self, line: bytes) -> None:
        token, seconds, raw = _TOKENS[line[0] % len(_TOKENS)], line[1] % 64, line[2:]
        self.now_s += seconds / 4
        try:
            self.coordinator.handle(token, decode(raw, to_member=False), now_s=self.now_s)
        except ThinwireError:
            return
        finally:
            self.coordinator.tick(self.now_s)


def hear_replicas(raw: bytes) -> None:
    """Let a coordinator hear what replicas say, a line each."""
    hub = Hub()
    for line in raw.split(b"\n")[:64]:
        if len(line) > 2:
            hub.hear(line)


def hear_coordinator(raw: bytes) -> None:
    """Let a replica hear what a coordinator says, a line each."""
    now = [0.0]
    session = CoordinatorSession(replica=0, interval_steps=10, send=lambda kind, **fields: None, now=lambda: now[0])
    for line in raw.split(b"\n")[:64]:
        now[0] += 0.5
        try:
            session.receive(decode(line, to_member=True))
        except ThinwireError:
            continue
        session.tick()
        session.active()


def _said(to: bytes, kind: str, seconds: int = 1, **fields: Any) -> bytes:
    return bytes([_TOKENS.index(to), seconds]) + encode(kind, **fields)


def _session() -> bytes:
    lines = []
    for token in (b"a", b"b"):
        lines.append(_said(token, "join", version=VERSION, thinwire=__version__, host="h"))
        lines.append(_said(token, "here", address="h", port=1, corpus="c", windows=9, held=0, era=0, disk=0))
    for token in (b"a", b"b"):
        lines += [_said(token, "active", step=0), _said(token, "beat", step=0, step_s=0.1, roster=0)]
        lines.append(_said(token, "lease", number=0))
    for token in (b"a", b"b"):
        lines.append(_said(token, "launch", round=0, step=10, used={"0": 1}))
    for token in (b"a", b"b"):
        lines.append(_said(token, "vote", round=0, step=10, has=[0, 1], hash=0))
    lines.append(_said(b"c", "join", version=VERSION, thinwire=__version__, host="h", role="reader"))
    lines.append(_said(b"c", "here", address="h", port=1, corpus="c", windows=9, held=7, era=0, disk=0))
    lines.append(_said(b"a", "captured", step=12, root="ab" * 32, bytes=9))
    lines += [_said(b"a", "lost", replica=1), _said(b"b", "stuck", round=1, why="w"), _said(b"a", "missed", step=3)]
    lines.append(_said(b"a", "command", verb="pause", target=""))
    lines += [_said(b"a", "withhold", round=9, step=14, used={"0": 4}, parts=2)]
    lines += [_said(b"a", "reject", round=8, member=1, parts=2, since=7, fault="non_finite", why="")]
    lines += [_said(b"a", "done", note={"n": 1}), _said(b"b", "note", level="warning", text="t")]
    return b"\n".join([*lines, _said(b"b", "leave", 60, why="w")])


def _words_of_a_coordinator() -> bytes:
    member = {"replica": 1, "role": "stage", "host": "h", "address": "h", "port": 1, "state": "active"}
    words: list[Message] = [
        {"kind": "roster", "members": [member], "started": True, "number": 3},
        {"kind": "call", "round": 0, "members": [0, 1]},
        {"kind": "decision", "round": 0, "launch_step": 10, "members": [0], "holders": [1], "step": 9, "closed": 8},
        {"kind": "progress", "step": 90, "closed": 80, "floor": 70, "kept": 60, "generation": "g"},
        {"kind": "state", "step": 5, "root": "ab" * 32, "bytes": 7, "holders": [1], "note": {}, "era": 0},
        {"kind": "leased", "number": 0, "shard": 1, "start": 2},
        {"kind": "capture", "step": 3}, {"kind": "anew"}, {"kind": "pause", "paused": True},
        {"kind": "leave", "why": ""}, {"kind": "expelled", "why": "", "has_bad_parts": True},
        {"kind": "refused", "why": "w"}, {"kind": "failed", "why": "w"},
        {"kind": "finish", "writer": 0, "notes": [], "note": {}}, {"kind": "unknown", "generation": "g"},
    ]  # fmt: skip
    return b"\n".join(encode(word.pop("kind"), **word) for word in words)


def _envelope() -> Envelope:
    return Envelope(stream=ROUNDS, key=(2, 0, 0), codec_id=3, numel=NUMEL, payload_bytes=64, takes_less=True)


def _vector(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _frames() -> list[bytes]:
    hello = Hello(replica=1, num_replicas=2, incarnation=bytes(16), role="reader")
    opening = MessageStart(
        number=1, address=MessageAddress(200, 3, 2, 3, 0), message_bytes=5, body=memoryview(b"12345")
    )
    part = MessagePart(number=1, start=9, body=memoryview(b"xyz"))
    rest = (
        Credit(number=1, end=9),
        Receipt(number=1, is_matched=True),
        RequestFrame(number=1, name=b"n"),
        CancelFrame(number=2),
        Goodbye(),
    )
    return [bytes(write(frame)) for frame in (hello, opening, part, *rest)]


def _parts() -> list[bytes]:
    offer, vector = PartHeader(num_tokens=64, num_steps=2, has_part=True), torch.linspace(-1, 1, NUMEL)
    coded = [by_name(name).encode(vector, seed=0) for name in NAMES]
    return [bytes([number]) + bytes(with_part_header(offer, part).numpy()) for number, part in enumerate(coded)]


def _verdicts() -> list[bytes]:
    verdict = MeanHeader(members=(0, 1), progress=Progress(step=12, closed_step=11))
    return [bytes(with_mean_header(verdict, torch.ones(4, dtype=torch.uint8), num_replicas=3).numpy())]


def _states() -> list[bytes]:
    state = GlobalState(step=3, parameters={"w": torch.ones(2, 3)}, outer={"m": torch.zeros(4)}, note={"a": [1, None]})
    return [bytes(pack(state).numpy())]


def _signed(raw: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", raw, 16)
    return raw[64 : 64 + length] + b"\n" + raw[64 + length + -length % 64 :]


def _messages() -> list[bytes]:
    return [bytes(message.pack(torch.arange(64, dtype=torch.uint8), sender=1, envelope=_envelope()).numpy())]


def _rank_notes() -> list[bytes]:
    station = RankEndpoint(rank=1, replica=1, hostname="h", host="k/4", address="10.0.0.2", port=29400, secret="ab" * 8)
    return [station.to_json().encode()]


def _boards() -> list[bytes]:
    first, third = (
        RankEndpoint(rank=rank, replica=rank, hostname="h", host="h", address="10.0.0.1", port=9).to_json().encode()
        for rank in (0, 2)
    )
    return [b"\n".join((b"0 1 2", first, third, b"3 1.000", bytes(32).hex().encode()))]


def _plans() -> list[bytes]:
    pair = {"rate": 8e6, "overhead_s": 0.01, "latency_s": 0.02, "fault": "", "detail": "none"}
    said = {"seconds": 0.5, "wrong": None, "clock": "c", "connected": [0, 2], "num_findings": 1}
    plan = {"do": "flows", "rows": [[0, 1, 65536], [1, 2, 4]], "limit_s": 5.0}
    return [json.dumps(one).encode() for one in (pair, said, plan, {"do": "pairs", "rows": [[0, 1]], "seconds": 0.1})]


def _wire_notes() -> list[bytes]:
    transfers = [(size, 0.01 + size / 1e6) for size in (16384, 32768, 65536) for _ in range(3)]
    return [json.dumps({"latency_s": 0.005, "transfers": transfers}).encode().ljust(JSON_BYTES)]


_CLIENT = key_pair(Secret(key=bytes(32)), replica=1, role="dialler").public_bytes
_ZAP = [b"\n".join((b"1.0", b"7", b"thinwire", b"127.0.0.1", b"", b"CURVE", key)) for key in (_CLIENT, bytes(32))]
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_HELLO_COMMAND = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72 + 32 + 8 + 80)
_REQUESTS = [
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n\r\n",
    b"GET /?token=0123456789abcdef HTTP/1.1\r\nHost: localhost\r\nCookie: thinwire-8080=0123; a=b\r\n\r\n",
    b"GET /events HTTP/1.0\r\nHost: [::1]:80\r\nAuthorization: Bearer 0123456789abcdef\r\n\r\n",
    b"POST /snapshot.json HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
]
_TOLD = (
    json.dumps({"description": "d", "model": "m", "values": "v", "frozen": "f", "listing_bytes": "99"})
    .encode()
    .ljust(2048)
)
_LAB = b"".join(len(body).to_bytes(4, "big") + body for body in (b'{"ask":"count","id":1}', b'{"ask":"close","id":2}'))

Target = tuple[Callable[[bytes], None], list[bytes]]
TARGETS: dict[str, Target] = {
    "frame": (read_frame, _frames()),
    "message": (read_message, _messages()),
    "signed-message": (read_signed_message, [raw[: message.HEADER_BYTES - 4] + raw[-64:] for raw in _messages()]),
    "state": (read_state, _states()),
    "signed-state": (read_signed_state, [_signed(raw) for raw in _states()]),
    "part": (read_part, _parts()),
    "verdict": (read_quorum_word, _verdicts()),
    "invitation": (
        read_words,
        [
            Invitation(host="h", port=1, secret=Secret(key=bytes(32)), coordinator_key=key).text().encode()
            for key in (b"", bytes(range(32)))
        ],
    ),
    "journal": (read_journal, [b'{"what":"numbers","next_replica":3}\n{"what":"started"}\n']),
    "replicas": (hear_replicas, [_session()]),
    "coordinator": (hear_coordinator, [_words_of_a_coordinator()]),
    "greeting": (greet, [_GREETING, _GREETING + _HELLO_COMMAND]),
    "admission": (ask_to_be_admitted, _ZAP),
    "rank-note": (read_rank_note, _rank_notes()),
    "board": (read_board, _boards()),
    "active-test": (read_plan, _plans()),
    "wire-note": (read_note, _wire_notes()),
    "fingerprint": (read_fingerprint, [_TOLD, b'[["w", [4, 16], "torch.float32", true]]']),
    "rank-place": (
        read_rank_place,
        [RankPlace(host="h", clock="c", addresses=("10.0.0.1", "fd00::1"), port=9).to_text().encode()],
    ),
    "burst": (read_burst, [bytes((9, 0, 2)) + bytes(30), bytes((0, 1, 1)) + struct.pack("<I", 5)]),
    "dashboard": (ask_the_dashboard, _REQUESTS),
    "address": (read_target, [b"10.77.0.1:29400", b"thinwire://host-a:4000/job?key=1", b"[::1]:80"]),
    "lab-message": (read_lab_message, [_LAB]),
}

# By target: what it parses, where the bytes come from, and whether the sender has proved the job's secret by then.
# "gloo": the messages of a job without a secret; with one they come over authenticated connections.
# "store": torch's store at MASTER_ADDR, where whoever reaches the port can write.
SENDERS: dict[str, tuple[str, str, bool]] = {
    "greeting": ("bytes sent to an authenticated port (libzmq's greeting and handshake)", "TCP", False),
    "admission": ("the question whether a client key is of the job (ZAP)", "TCP", False),
    "burst": ("bursts of `probe_wires`, and their answers", "TCP", False),
    "dashboard": ("requests to the dashboard before the token", "HTTP", False),
    "rank-note": ("a rank's introduction (address, port)", "store", False),
    "board": ("list of ranks, beats and key of `diagnose test`", "store", False),
    "active-test": ("plans and results of `diagnose test`", "store", False),
    "fingerprint": ("what a replica trains, before the first step", "gloo", False),
    "message": ("a message's header and checksums", "gloo", False),
    "signed-message": ("a message whose header has the right checksum", "gloo", False),
    "part": ("a part of a round, in every codec", "gloo", False),
    "verdict": ("a quorum's verdict", "gloo", False),
    "wire-note": ("notes between replicas, and what `probe` measured", "gloo", False),
    "rank-place": ("where a rank of a watched job is", "gloo", False),
    "invitation": ("the URI that a host joins by", "command line", False),
    "address": ("the address given to `doctor`", "command line", False),
    "frame": ("frames of the wire", "wire", True),
    "replicas": ("what replicas say to a coordinator", "wire", True),
    "coordinator": ("what a coordinator says to a replica", "wire", True),
    "state": ("a global state", "wire", True),
    "signed-state": ("a global state whose header has the right hash", "wire", True),
    "journal": ("a coordinator's journal", "file", True),
    "lab-message": ("messages of a lab to its supervisor", "socket pair", True),
}
