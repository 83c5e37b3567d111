"""What reads bytes of other hosts or of the disk, as functions of bytes: each reads them, or refuses them in its words.

A fuzzer runs these (`benchmarks/fuzz.py`), and the tests do on a few thousand mutations of what is right.
"""

import hashlib
import json
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from thinwire.averaging.decoding import decode as decode_part
from thinwire.averaging.delivery import Progress
from thinwire.averaging.quorum_words import Offer, Verdict, read_offer, read_verdict, with_offer, with_verdict
from thinwire.codecs.registry import NAMES, by_name
from thinwire.errors import ThinwireError
from thinwire.membership.coordinator import Coordinator
from thinwire.membership.council import Council
from thinwire.membership.invitation import Invitation, read_invitation
from thinwire.membership.journal import Journal
from thinwire.membership.protocol import VERSION, Message, decode, encode
from thinwire.training.global_state import MAGIC, GlobalState, pack, unpack
from thinwire.transport import message
from thinwire.transport.base import Envelope, Kind
from thinwire.transport.secret import Secret
from thinwire.transport.wire_frames import Ask, Bye, Cancel, FrameError, Got, Hello, Opening, Part, Want, read, write
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
        offer, coded = read_offer(_vector(raw[1:]), step=1000, what="a part")
        found = decode_part(codec, coded, numel=NUMEL, peer=1, what="a part")
    except ThinwireError:
        return
    assert offer.weight >= 0 and found.shape == (NUMEL,)


def read_quorum_word(raw: bytes) -> None:
    """Read a verdict of a quorum."""
    try:
        read_verdict(_vector(raw), num_replicas=3, server=1, least=2, step=10, what="a verdict")
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
        assert Journal(path).lines()[-1] == {"what": "numbers", "next_replica": 1}


class Hub:
    """A coordinator that hears lines of bytes: who says it, after how long, and what."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sent_bytes = 0
        self.decisions: dict[int, Any] = {}
        self.coordinator = Coordinator(
            job={"thinwire": __version__}, planned=2, sync_interval=10, overlap_steps=1, shard_windows=8,
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
    council = Council(replica=0, interval_steps=10, say=lambda kind, **fields: None, now=lambda: now[0])
    for line in raw.split(b"\n")[:64]:
        now[0] += 0.5
        try:
            council.hear(decode(line, to_member=True))
        except ThinwireError:
            continue
        council.turn()
        council.active()


def _said(to: bytes, kind: str, seconds: int = 1, **fields: Any) -> bytes:
    return bytes([_TOKENS.index(to), seconds]) + encode(kind, **fields)


def _session() -> bytes:
    lines = []
    for token in (b"a", b"b"):
        lines.append(_said(token, "join", version=VERSION, thinwire=__version__, host="h"))
        lines.append(_said(token, "here", address="h", port=1, corpus="c", windows=9, held=0, era=0))
    for token in (b"a", b"b"):
        lines += [_said(token, "active", step=0), _said(token, "beat", step=0, step_s=0.1, roster=0)]
        lines.append(_said(token, "lease", number=0))
    for token in (b"a", b"b"):
        lines.append(_said(token, "launch", round=0, step=10, used={"0": 1}))
    for token in (b"a", b"b"):
        lines.append(_said(token, "vote", round=0, step=10, has=[0, 1], hash=0))
    lines.append(_said(b"c", "join", version=VERSION, thinwire=__version__, host="h"))
    lines.append(_said(b"c", "here", address="h", port=1, corpus="c", windows=9, held=7, era=0))
    lines.append(_said(b"a", "captured", step=12, root="ab" * 32, bytes=9))
    lines += [_said(b"a", "lost", replica=1), _said(b"b", "stuck", round=1, why="w"), _said(b"a", "missed", step=3)]
    lines.append(_said(b"a", "command", verb="pause", target=""))
    lines += [_said(b"a", "withhold", round=9, step=14, used={"0": 4}, parts=2)]
    lines += [_said(b"a", "reject", round=8, member=1, parts=2, since=7)]
    lines += [_said(b"a", "done", note={"n": 1}), _said(b"b", "note", level="warning", text="t")]
    return b"\n".join([*lines, _said(b"b", "leave", 60, why="w")])


def _words_of_a_coordinator() -> bytes:
    member = {"replica": 1, "host": "h", "address": "h", "port": 1, "standing": "active"}
    words: list[Message] = [
        {"kind": "roster", "members": [member], "started": True, "number": 3},
        {"kind": "call", "round": 0, "members": [0, 1]},
        {"kind": "decision", "round": 0, "launch_step": 10, "members": [0], "holders": [1], "step": 9, "closed": 8},
        {"kind": "progress", "step": 90, "closed": 80, "floor": 70, "kept": 60, "generation": "g"},
        {"kind": "state", "step": 5, "root": "ab" * 32, "bytes": 7, "holders": [1], "note": {}, "era": 0},
        {"kind": "leased", "number": 0, "shard": 1, "start": 2},
        {"kind": "capture", "step": 3}, {"kind": "anew"}, {"kind": "pause", "paused": True},
        {"kind": "leave", "why": ""}, {"kind": "expelled", "why": "", "is_non_finite": True},
        {"kind": "refused", "why": "w"}, {"kind": "failed", "why": "w"},
        {"kind": "finish", "writer": 0, "notes": [], "note": {}}, {"kind": "unknown", "generation": "g"},
    ]  # fmt: skip
    return b"\n".join(encode(word.pop("kind"), **word) for word in words)


def _envelope() -> Envelope:
    return Envelope(
        kind=Kind.ROUND, round_id=2, fragment=0, phase=0, codec_id=3, numel=NUMEL, payload_bytes=64, takes_less=True
    )


def _vector(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _frames() -> list[bytes]:
    hello = Hello(replica=1, num_replicas=2, incarnation=bytes(16))
    opening = Opening(number=1, key=(1, 2, 3, 0), message_bytes=5, body=memoryview(b"12345"))
    part = Part(number=1, start=9, body=memoryview(b"xyz"))
    rest = (Ask(number=1, end=9), Got(number=1, is_matched=True), Want(number=1, name=b"n"), Cancel(number=2), Bye())
    return [bytes(write(frame)) for frame in (hello, opening, part, *rest)]


def _parts() -> list[bytes]:
    offer, vector = Offer(num_tokens=64, num_steps=2, has_part=True), torch.linspace(-1, 1, NUMEL)
    coded = [by_name(name).encode(vector, seed=0) for name in NAMES]
    return [bytes([number]) + bytes(with_offer(offer, part).numpy()) for number, part in enumerate(coded)]


def _verdicts() -> list[bytes]:
    verdict = Verdict(members=(0, 1), progress=Progress(step=12, closed_step=11))
    return [bytes(with_verdict(verdict, torch.ones(4, dtype=torch.uint8), num_replicas=3).numpy())]


def _states() -> list[bytes]:
    state = GlobalState(step=3, parameters={"w": torch.ones(2, 3)}, outer={"m": torch.zeros(4)}, note={"a": [1, None]})
    return [bytes(pack(state).numpy())]


def _signed(raw: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", raw, 16)
    return raw[64 : 64 + length] + b"\n" + raw[64 + length + -length % 64 :]


def _messages() -> list[bytes]:
    return [bytes(message.pack(torch.arange(64, dtype=torch.uint8), sender=1, envelope=_envelope()).numpy())]


Target = tuple[Callable[[bytes], None], list[bytes]]
TARGETS: dict[str, Target] = {
    "frame": (read_frame, _frames()),
    "message": (read_message, _messages()),
    "signed-message": (read_signed_message, [raw[: message.HEADER_BYTES - 4] + raw[-64:] for raw in _messages()]),
    "state": (read_state, _states()),
    "signed-state": (read_signed_state, [_signed(raw) for raw in _states()]),
    "part": (read_part, _parts()),
    "verdict": (read_quorum_word, _verdicts()),
    "invitation": (read_words, [Invitation(host="h", port=1, secret=Secret(key=bytes(32))).text().encode()]),
    "journal": (read_journal, [b'{"what":"numbers","next_replica":3}\n{"what":"started"}\n']),
    "replicas": (hear_replicas, [_session()]),
    "coordinator": (hear_coordinator, [_words_of_a_coordinator()]),
}
