"""A family registers a stream of its own; its messages keep to the stream's limits on every transport."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from thinwire.errors import PayloadError
from thinwire.transport.addresses import Address
from thinwire.transport.base import Envelope, Transport, all_gather_json
from thinwire.transport.loopback import run_replicas
from thinwire.transport.process_group import ProcessGroupTransport, tag_of
from thinwire.transport.secret import Secret
from thinwire.transport.streams import BLOBS, BUFFERS, CONTROL, ROUNDS, SETUP, Stream, register
from thinwire.transport.wire.wire_transport import WireTransport

SOON_S = 60.0
FEATURES = register(
    Stream(
        name="features", number=200, keys=("step", "micro-batch", "stage"), in_flight=(2, 4, 1), most_bytes=70_000,
        priority=0, least_deadline_s=5.0, slowest_bytes_per_s=1000.0,
    )
)  # fmt: skip


def over_gloo(replica_main: Callable[[Transport], Any]) -> list[Any]:
    store, results = dist.HashStore(), [None, None]

    def body(replica: int) -> None:
        group = dist.ProcessGroupGloo(store, replica, 2, timedelta(seconds=SOON_S))
        transport = ProcessGroupTransport(group)
        results[replica] = replica_main(transport)
        meet.wait(SOON_S)
        transport.close()

    return in_threads(body, results, meet := threading.Barrier(2))


def over_wires(replica_main: Callable[[Transport], Any]) -> list[Any]:
    secret, results = Secret(key=bytes(32)), [None, None]
    ends = [WireTransport(replica=r, num_replicas=2, secret=secret, address="127.0.0.1") for r in range(2)]
    ends[1].dial({0: Address(host="127.0.0.1", port=ends[0].port)}, deadline_s=SOON_S)

    def body(replica: int) -> None:
        results[replica] = replica_main(ends[replica])
        meet.wait(SOON_S)
        ends[replica].close()

    return in_threads(body, results, meet := threading.Barrier(2))


def in_threads(body: Callable[[int], None], results: list[Any], meet: threading.Barrier) -> list[Any]:
    threads = [threading.Thread(target=body, args=(replica,)) for replica in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert not meet.broken and None not in results
    return results


@pytest.mark.parametrize(
    "run", [lambda main: run_replicas(2, main), over_gloo, over_wires], ids=["loopback", "gloo", "wire"]
)
def test_a_stream_of_ones_own_is_sent_within_its_limits(run: Callable[[Callable[[Transport], Any]], list[Any]]) -> None:
    def replica_main(transport: Transport) -> list[str]:
        peer, me, texts = 1 - transport.replica, transport.replica, []

        def envelope(*key: int, num_bytes: int = 3, owner: int = 0) -> Envelope:
            return Envelope(stream=FEATURES, key=key, payload_bytes=num_bytes, owner=owner, note=bytes([*key, me]))

        def send(*key: int, **more: int) -> Any:
            message = envelope(*key, **more)
            return transport.send(torch.full((message.payload_bytes,), key[0]).byte(), to=peer, envelope=message)

        keys = [(7, 0), (7, 3), (8, 1), (7, 0)]
        sends = [send(*key) for key in keys[:3]] + [send(7, 0, owner=1), send(8, 2, num_bytes=70_000)]
        for key, owner in zip(keys, (0, 0, 0, 1), strict=True):
            found = transport.receive(source=peer, envelope=envelope(*key, owner=owner)).wait(deadline_s=SOON_S)
            assert found is not None and found.payload.tolist() == [key[0]] * 3
            assert found.note == bytes([*key, peer]).ljust(8, b"\0")
        large = transport.receive(source=peer, envelope=envelope(8, 2, num_bytes=70_000)).wait(deadline_s=SOON_S)
        assert large is not None and large.payload.numel() == 70_000
        for pending in sends:
            pending.wait(deadline_s=SOON_S)
        # two steps may be in flight; this one stays until the peer asks for it, after its own refusals
        pending = send(9, 0, num_bytes=70_000)
        for key in ((11, 0), (9, 4)):
            with pytest.raises(ValueError, match=f"features {key[0]} .* cannot be in flight beside") as error:
                send(*key)
            texts.append(str(error.value))
        for wrong, to, expected in (
            (torch.zeros(4).byte(), peer, r"features 9 .* has 4 bytes, and its envelope says 3; give payload_bytes="),
            (torch.zeros(3), peer, r"a message is a row of uint8 on the CPU, got torch.float32, shape \(3,\), on cpu"),
            (torch.zeros(3).byte(), me, f"replica {me} can exchange with another of 0..1, got {me}"),
            (torch.zeros(3).byte(), 2, f"replica {me} can exchange with another of 0..1, got 2"),
        ):
            with pytest.raises(ValueError, match=expected):
                transport.send(wrong, to=to, envelope=envelope(9, 3))
        all_gather_json({}, transport=transport, number=0, deadline_s=SOON_S)
        transport.receive(source=peer, envelope=envelope(9, 0, num_bytes=70_000)).wait(deadline_s=SOON_S)
        pending.wait(deadline_s=SOON_S)
        again = send(11, 0)  # the remedy
        transport.receive(source=peer, envelope=envelope(11, 0)).wait(deadline_s=SOON_S)
        again.wait(deadline_s=SOON_S)
        wrong = Envelope(stream=FEATURES, key=(12, 0), numel=4, payload_bytes=3)
        send(12, 0)
        with pytest.raises(PayloadError, match=r"features 12 \(micro-batch 0, stage 0\) .* elements is 0, expected 4"):
            transport.receive(source=peer, envelope=wrong).wait(deadline_s=SOON_S)
        return texts

    for first, second in run(replica_main):
        assert first == (
            "features 11 (micro-batch 0, stage 0) cannot be in flight beside features 9 (micro-batch 0, stage 0): "
            "stream features allows (2, 4, 1) consecutive values of its key at once; wait for the earlier one, or "
            "register the stream with larger in_flight"
        )
        assert second.startswith("features 9 (micro-batch 4, stage 0) cannot be in flight beside features 9 (micro-")


def test_what_an_envelope_cannot_hold_is_refused_with_value_limit_and_remedy() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"payload_bytes": 70_001}, "at most 70000 bytes, got 70001; split it, or register the stream with larger"),
        ({"key": (-1,)}, r"step of stream features must be in 0\.\.18446744073709551615, got -1"),
        ({"key": (0, 1 << 32)}, r"micro-batch of stream features must be in 0\.\.4294967295, got 4294967296"),
        ({"key": (0, 0, 0, 1)}, r"a key of stream features has 1 to 3 parts, got \(0, 0, 0, 1\)"),
        ({"key": ()}, r"a key of stream features has 1 to 3 parts, got \(\)"),
        ({"key": (0, 0, 256)}, r"stage of stream features must be in 0\.\.255, got 256"),
        ({"owner": 1 << 16}, r"owner must be in 0\.\.65535, got 65536"),
        ({"note": bytes(9)}, "holds at most 8 bytes, got 9"),
    ]
    for fields, expected in cases:
        with pytest.raises(ValueError, match=expected):
            Envelope(**{"stream": FEATURES, "key": (0,), **fields})
    Envelope(stream=FEATURES, key=(2**64 - 1, 2**32 - 1, 255), payload_bytes=70_000, owner=65_535, note=bytes(8))
    assert FEATURES.deadline_s(70_000) == 75.0


def test_a_stream_is_registered_once_under_a_free_name_and_number() -> None:
    assert register(FEATURES) is FEATURES
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": "features", "number": 202}, "features with number 202 is taken: there is features with number 200"),
        ({"number": 200}, "stream other with number 200 is taken: there is features with number 200; choose another"),
        ({"number": 5}, "with number 5 is taken: there is blob with number 5"),
        ({"number": 9}, r"below 16 are thinwire's own, got 9 for stream other; choose a free number in 16\.\.255"),
        ({"number": 256}, r"must be in 1\.\.255, got 256"),
        ({"name": "Some thing"}, "a-z, 0-9 and -, at most 32 characters, got 'Some thing'"),
        ({"keys": ()}, "has 1 to 3 names"),
        ({"in_flight": (4096, 32, 1)}, "may have 1 to 65536 messages in flight, .* which are 131072; name fewer"),
        ({"in_flight": (4,)}, r"in_flight of stream other has 3 numbers, got \(4,\)"),
        ({"in_flight": (4, 0, 1)}, "may have 1 to 65536 messages in flight"),
        ({"most_bytes": 1 << 49}, "most_bytes of stream other must be in"),
        ({"least_deadline_s": 0.0}, "must be positive, got 0.0"),
    ]
    for fields, expected in cases:
        with pytest.raises(ValueError, match=expected):
            register(Stream(**{"name": "other", "number": 202, **fields}))


def test_what_can_be_in_flight_at_once_never_shares_a_gloo_tag() -> None:
    seen: dict[int, Any] = {}
    streams = (CONTROL, ROUNDS, SETUP, BUFFERS, BLOBS, FEATURES, Stream(name="last", number=255))
    for stream, owner, rest in itertools.product(streams, (0, 1, 2, 63), (False, True)):
        # every consecutive window of a key's values is covered by one of them at any start
        spans = [sorted({0, 1, span // 2, span - 1}) for span in stream.in_flight]
        for start, key in itertools.product((0, 12_345), itertools.product(*(s for s in spans))):
            moved = tuple(part + start for part in key[:2]) + key[2:]
            tag = tag_of(Envelope(stream=stream, key=moved, owner=owner), rest=rest)
            assert 0 <= tag < 2**31
            place = (stream.number, owner, rest, *(p % s for p, s in zip(moved, stream.in_flight, strict=True)))
            assert seen.setdefault(tag, place) == place
    for stream in streams:
        slots = {stream.slot(key) for key in itertools.product(*(range(3, 3 + min(s, 64)) for s in stream.in_flight))}
        assert len(slots) == min(stream.in_flight[0], 64) * stream.in_flight[1] * stream.in_flight[2]
        assert max(slots) < stream.most_in_flight
    with pytest.raises(ValueError, match="at most 64 owners share a process group, got owner 65; give all hosts a sec"):
        tag_of(Envelope(stream=ROUNDS, key=(0,), owner=64))
