"""Frames of the wire: round trip, and refusal of everything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.roles import ROLES
from thinwire.transport.streams import MessageAddress
from thinwire.transport.wire.framing import (
    INCARNATION_BYTES,
    MOST_FRAME_BYTES,
    MOST_NAME_BYTES,
    MOST_PATHS,
    OPENING_BYTES,
    PART_BYTES,
    SESSION_BYTES,
    CancelFrame,
    Credit,
    FrameError,
    FramesArrived,
    Goodbye,
    Hello,
    MessagePart,
    MessageRefused,
    MessageStart,
    NumberedFrame,
    PathHello,
    Receipt,
    ReceivePosted,
    RequestFrame,
    read,
    write,
)

NUMBERS = st.integers(0, 2**64 - 1)
HERE = MessageAddress(1, 0, 0, 0, 0)
SMALL = st.integers(0, 2**32 - 1)
ADDRESSES = st.builds(MessageAddress, st.integers(0, 255), st.integers(0, 65_535), NUMBERS, SMALL, st.integers(0, 255))
FRAMES = st.one_of(
    st.builds(
        Hello,
        replica=SMALL,
        num_replicas=SMALL,
        incarnation=st.binary(min_size=16, max_size=INCARNATION_BYTES),
        role=st.sampled_from(ROLES),
    ),
    st.builds(Credit, number=NUMBERS, end=NUMBERS),
    st.builds(Receipt, number=NUMBERS, is_matched=st.booleans()),
    st.builds(ReceivePosted, number=NUMBERS),
    st.builds(MessageRefused, number=NUMBERS),
    st.builds(Goodbye),
    st.builds(CancelFrame, number=NUMBERS),
    st.builds(FramesArrived, count=NUMBERS),
    st.builds(
        PathHello,
        hello=st.builds(Hello, replica=SMALL, num_replicas=SMALL, incarnation=st.binary(min_size=16, max_size=16)),
        session=st.binary(min_size=SESSION_BYTES, max_size=SESSION_BYTES),
        path=st.just(3),
        num_paths=st.integers(4, MOST_PATHS),
    ),
)


@given(FRAMES)
def test_a_frame_is_read_as_it_was_written(frame):
    assert read(memoryview(write(frame))) == frame


@pytest.mark.parametrize("size", [0, 1, OPENING_BYTES - 1, OPENING_BYTES, OPENING_BYTES + 1, 2**40])
@given(address=ADDRESSES, number=NUMBERS)
def test_an_opening_brings_its_body(size, address, number):
    body = bytes(min(size, OPENING_BYTES))
    raw = write(MessageStart(number=number, address=address, message_bytes=size, body=memoryview(body)))
    assert len(raw) <= MOST_FRAME_BYTES
    found = read(memoryview(raw))
    assert isinstance(found, MessageStart) and (found.number, found.address, found.message_bytes) == (
        number,
        address,
        size,
    )
    assert bytes(found.body) == body


@given(number=NUMBERS, name=st.binary(min_size=1, max_size=MOST_NAME_BYTES))
def test_a_want_brings_its_name(number, name):
    want = RequestFrame(number=number, name=name)
    assert read(memoryview(write(want))) == want


def test_a_numbered_frame_holds_the_largest_frame():
    inner = write(
        MessageStart(
            number=1, address=MessageAddress(1, 5, 2, 3, 4), message_bytes=2**40, body=memoryview(bytes(OPENING_BYTES))
        )
    )
    raw = write(NumberedFrame(number=7, frame=memoryview(inner)))
    assert len(raw) == MOST_FRAME_BYTES
    found = read(memoryview(raw))
    assert isinstance(found, NumberedFrame) and found.number == 7 and bytes(found.frame) == bytes(inner)


@pytest.mark.parametrize(("path", "num_paths"), [(0, 0), (4, 4), (0, MOST_PATHS + 1)])
def test_a_path_out_of_its_range_is_refused(path, num_paths):
    hello = Hello(replica=0, num_replicas=2, incarnation=bytes(16))
    raw = write(PathHello(hello=hello, session=bytes(SESSION_BYTES), path=path, num_paths=num_paths))
    with pytest.raises(FrameError, match="path"):
        read(memoryview(raw))


def test_a_hello_of_an_unknown_role_is_refused_with_those_that_there_are():
    raw = write(Hello(replica=1, num_replicas=2, incarnation=bytes(16), role="reader"))
    assert read(memoryview(raw)).role == "reader"
    raw[12] = 9
    with pytest.raises(
        FrameError, match="a hello of which there is no role '9'; allowed are replica, stage, server, cl"
    ):
        read(memoryview(raw))


@pytest.mark.parametrize("size", [1, PART_BYTES - 1, PART_BYTES])
def test_a_part_brings_its_body(size):
    found = read(memoryview(write(MessagePart(number=3, start=5, body=memoryview(bytes([7]) * size)))))
    assert isinstance(found, MessagePart) and (found.number, found.start, len(found.body)) == (3, 5, size)
    assert set(found.body) == {7}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"tw\x02",
        b"TW\x02\x08",
        b"tw\x01\x08",
        b"tw\x02\x00",
        b"tw\x02\x0b",
        b"tw\x02\x09",
        write(RequestFrame(number=0, name=b"")),
        write(RequestFrame(number=0, name=bytes(MOST_NAME_BYTES + 1))),
        b"tw\x02\x08 ",
        bytes(MOST_FRAME_BYTES + 1),
        write(MessagePart(number=0, start=0, body=memoryview(b""))),
        write(MessagePart(number=0, start=0, body=memoryview(bytes(PART_BYTES + 1)))),
        write(MessageStart(number=0, address=HERE, message_bytes=2, body=memoryview(b"a"))),
        write(MessageStart(number=0, address=HERE, message_bytes=1, body=memoryview(b"ab"))),
        write(MessageStart(number=0, address=HERE, message_bytes=2**60, body=memoryview(bytes(OPENING_BYTES)))),
        bytes(write(Receipt(number=0, is_matched=True)))[:-1] + b"\x02",
    ],
)
def test_what_is_no_frame_is_refused(raw):
    with pytest.raises(FrameError):
        read(memoryview(raw))


@given(st.binary(max_size=200))
def test_no_bytes_lead_to_anything_but_a_frame_or_a_frame_error(raw):
    for given_bytes in (raw, b"tw\x02" + raw):
        try:
            found = read(memoryview(given_bytes))
        except FrameError:
            continue
        assert write(found) == given_bytes


@given(FRAMES, st.data())
def test_a_frame_that_is_cut_or_grown_is_refused(frame, data):
    raw = bytes(write(frame))
    cut = data.draw(st.integers(0, len(raw) - 1))
    for wrong in (raw[:cut], raw + b"\x00"):
        with pytest.raises(FrameError):
            read(memoryview(wrong))
