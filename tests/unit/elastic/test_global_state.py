from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from thinwire.elastic.global_state import GlobalState, pack, sha256, unpack, unpack_parameters
from thinwire.errors import PayloadError

HEAD = struct.Struct("<8sIIQQ32s")
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
)  # fmt: skip
NAMES = st.text(min_size=1, max_size=6)
NOTES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits: NaN and negative zero among them."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    raw = draw(st.binary(min_size=(size := math.prod(shape) * dtype.itemsize), max_size=size))
    return torch.tensor(list(raw), dtype=torch.uint8).view(dtype).view(shape)


STATES = st.builds(
    GlobalState,
    step=st.integers(0, (1 << 62) - 1),
    parameters=st.dictionaries(NAMES, tensors(), max_size=4),
    outer=st.dictionaries(NAMES, tensors(), max_size=3),
    note=st.dictionaries(st.text(max_size=3), NOTES, max_size=3),
)


def small() -> GlobalState:
    return GlobalState(
        step=150,
        parameters={"head.weight": torch.randn(3, 5), "empty": torch.empty(0, 7), "norm": torch.randn(7).bfloat16()},
        outer={"momentum.0": torch.randn(13)},
        note={"tokens": 4096, "ledger": [[0, 10], [20, 31]], "options": {"lr": 0.1, "method": None}},
    )


def same_bits(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def assert_same(first: GlobalState, second: GlobalState) -> None:
    assert first.step == second.step and first.note == second.note
    assert repr(json.dumps(first.note, sort_keys=True)) == repr(json.dumps(second.note, sort_keys=True))
    pairs: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = [
        (first.parameters, second.parameters),
        (first.outer, second.outer),
    ]
    for ours, theirs in pairs:
        assert set(ours) == set(theirs)
        assert all(same_bits(ours[name], theirs[name]) for name in ours)


def forged(change: Callable[[dict[str, Any]], None], *, state: GlobalState | None = None) -> Tensor:
    """Return a state's bytes with a header that was changed by one who mends all sizes and hashes behind it."""
    content = bytes(pack(state or small()).numpy())
    size = HEAD.unpack(content[: HEAD.size])[3]
    header = json.loads(content[HEAD.size : HEAD.size + size])
    body = content[-(-(HEAD.size + size) // 64) * 64 :]
    change(header)
    return with_header(json.dumps(header, sort_keys=True, separators=(",", ":")).encode(), body)


def with_header(header: bytes, body: bytes) -> Tensor:
    size = HEAD.size + len(header)
    padding = bytes(-size % 64) if body else b""
    total = size + len(padding) + len(body)
    fields = HEAD.pack(b"THWSTATE", 1, 0, len(header), total, hashlib.sha256(header).digest())
    return torch.tensor(list(fields + header + padding + body), dtype=torch.uint8)


@settings(max_examples=150)
@given(state=STATES)
def test_any_state_comes_back_bit_for_bit(state: GlobalState) -> None:
    vector = pack(state)
    again = unpack(vector)
    assert_same(state, again)
    assert torch.equal(pack(again), vector) and sha256(again) == sha256(state)


@settings(max_examples=150)
@given(state=STATES, data=st.data())
def test_any_damaged_byte_is_noticed(state: GlobalState, data: st.DataObject) -> None:
    vector = pack(state)
    at = data.draw(st.integers(0, vector.numel() - 1))
    vector[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PayloadError, match="the global state"):
        unpack(vector)


@given(state=STATES, data=st.data())
def test_bytes_that_are_cut_or_follow_are_noticed(state: GlobalState, data: st.DataObject) -> None:
    vector = pack(state)
    with pytest.raises(PayloadError):
        unpack(vector[: data.draw(st.integers(0, vector.numel() - 1))])
    with pytest.raises(PayloadError, match="its total is"):
        unpack(torch.cat([vector, torch.zeros(data.draw(st.integers(1, 70)), dtype=torch.uint8)]))


@settings(max_examples=300)
@given(noise=st.binary(max_size=200), header=st.binary(max_size=80) | NOTES.map(lambda note: json.dumps(note).encode()))
def test_noise_is_refused_in_words(noise: bytes, header: bytes) -> None:
    for vector in (torch.tensor(list(noise), dtype=torch.uint8), with_header(header, noise)):
        with pytest.raises(PayloadError):
            unpack(vector)


ENTRY_VALUES = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3) | NOTES


@settings(max_examples=300)
@given(place=st.integers(0, 3), value=ENTRY_VALUES)
def test_whatever_an_entry_says_it_is_refused_or_spelled_as_written(place: int, value: Any) -> None:
    def change(header: dict[str, Any]) -> None:
        header["parameters"][1][place] = value

    vector = forged(change)
    try:
        again = unpack(vector)
    except PayloadError:
        return
    assert torch.equal(pack(again), vector)


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        target: Any = header
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set("step", to=-1), "step must be"),
        (_set("step", to=True), "step must be"),
        (_set("note", to=[1]), "note must be a dict"),
        (_set("outer", to={}), "outer must be a list"),
        (_set("more", to=1), "nothing else"),
        (_set("parameters", 0, to=3), "an entry must be"),
        (_set("parameters", 1, 1, to="object"), "dtype must be one of"),
        (_set("parameters", 1, 1, to="bool"), "dtype must be one of"),
        (_set("parameters", 1, 1, to=["float32"]), "dtype must be one of"),
        (_set("parameters", 1, 2, to=[1 << 40]), "needs 4398046511104 bytes"),
        (_set("parameters", 1, 2, to=[1 << 61]), "is none, or more than"),
        (_set("parameters", 1, 2, to=[0, 1 << 60, 1 << 60]), "is none, or more than"),
        (_set("parameters", 1, 2, to=[-3, -5]), "is none, or more than"),
        (_set("parameters", 1, 2, to=[True, 15]), "is none, or more than"),
        (_set("parameters", 1, 2, to=[3.0, 5]), "is none, or more than"),
        (_set("parameters", 1, 2, to=[3, 4]), "is damaged"),
        (_set("parameters", 1, 3, to="0" * 64), "head.weight.* is damaged"),
        (_set("parameters", 1, 0, to=""), "names of parameters"),
        (_set("parameters", 1, 0, to="zzz"), "not spelled"),
        (_set("outer", to=[]), "bytes follow the last tensor"),
    ],
)
def test_a_header_that_lies_is_refused_by_its_field(change: Callable[[dict[str, Any]], None], named: str) -> None:
    with pytest.raises(PayloadError, match=named):
        unpack(forged(change), source="the state of replica 3")
    assert unpack(forged(lambda header: None)).step == 150


def test_a_name_that_stands_twice_is_refused() -> None:
    state = GlobalState(step=1, parameters={"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(PayloadError, match="not spelled"):
        unpack(forged(_set("parameters", 1, 0, to="a"), state=state))


def test_a_header_of_endless_depth_is_refused() -> None:
    for depth in (900, 100_000):
        header = b'{"note":{"a":' + b"[" * depth + b"]" * depth + b'},"outer":[],"parameters":[],"step":1}'
        with pytest.raises(PayloadError):
            unpack(with_header(header + b" ", b""))


def test_the_header_cannot_claim_more_than_has_arrived() -> None:
    content = bytearray(pack(small()).numpy())
    struct.pack_into("<Q", content, 16, 1 << 60)
    with pytest.raises(PayloadError, match=r"header's 1152921504606846976 bytes are more than"):
        unpack(torch.frombuffer(content, dtype=torch.uint8))


def test_bytes_between_tensors_must_be_zero() -> None:
    vector = pack(GlobalState(step=1, parameters={"a": torch.ones(1), "b": torch.ones(1)}))
    vector[-10] = 1
    with pytest.raises(PayloadError, match="not zero"):
        unpack(vector)


def test_another_version_is_refused_with_the_remedy() -> None:
    vector = pack(small())
    vector[8] = 2
    with pytest.raises(PayloadError, match=r"version 1, found b'THWSTATE' version 2; run the same thinwire"):
        unpack(vector)


def test_the_bytes_do_not_depend_on_order_strides_or_kinds_of_dicts() -> None:
    a, b = torch.randn(4, 6), torch.randn(5)
    first = GlobalState(step=2, parameters={"a": a, "b": b}, note={"x": 1, "y": {"p": 1, "q": 2}})
    turned = a.t().contiguous().t()
    assert not turned.is_contiguous()
    second = GlobalState(
        step=2,
        parameters=MappingProxyType({"b": nn.Parameter(b), "a": turned}),
        note=MappingProxyType({"y": {"q": 2, "p": 1}, "x": 1}),
    )
    assert torch.equal(pack(first), pack(second)) and sha256(first) == sha256(second)


@pytest.mark.parametrize(
    "other",
    [
        {"step": 3},
        {"parameters": {"a": torch.tensor([0.0])}},
        {"parameters": {"b": torch.tensor([-0.0])}},
        {"parameters": {"a": torch.tensor([[-0.0]])}},
        {"outer": {"momentum.0": torch.empty(0)}},
        {"note": {"x": 1.0}},
    ],
)
def test_states_that_differ_in_anything_have_another_hash(other: dict[str, Any]) -> None:
    own: dict[str, Any] = {"step": 2, "parameters": {"a": torch.tensor([-0.0])}, "outer": {}, "note": {"x": 1}}
    assert sha256(GlobalState(**own)) != sha256(GlobalState(**{**own, **other}))


def test_the_layout_of_the_bytes_is_held() -> None:
    """Bytes that were written must stay readable: a change of these needs another version."""
    state = GlobalState(step=7, parameters={"w": torch.tensor([1.0, -2.0])}, outer={}, note={"tokens": 3})
    content = bytes(pack(state).numpy())
    digest = hashlib.sha256(struct.pack("<2f", 1, -2)).hexdigest()
    header = f'{{"note":{{"tokens":3}},"outer":[],"parameters":[["w","float32",[2],"{digest}"]],"step":7}}'.encode()
    assert content[:64] == HEAD.pack(b"THWSTATE", 1, 0, len(header), len(content), hashlib.sha256(header).digest())
    assert content[64 : 64 + len(header)] == header
    assert content[-8:] == struct.pack("<2f", 1, -2) and (len(content) - 8) % 64 == 0
    assert sha256(state) == hashlib.sha256(content[: 64 + len(header)]).hexdigest()


def test_tied_parameters_come_back_under_each_name() -> None:
    weight = torch.randn(4, 3)
    again = unpack(pack(GlobalState(step=0, parameters={"embedding.weight": weight, "head.weight": weight})))
    assert torch.equal(again.parameters["head.weight"], weight)
    assert torch.equal(again.parameters["embedding.weight"], weight)


@pytest.mark.parametrize("numel", [0, 1, 2, 15, 16, 17, 997, 1 << 14])
def test_tensors_are_views_of_the_vector_whatever_their_size(numel: int) -> None:
    vector = pack(GlobalState(step=0, parameters={"a": torch.randn(numel), "b": torch.randn(numel).bfloat16()}))
    again = unpack(vector)
    begin, end = vector.data_ptr(), vector.data_ptr() + vector.numel()
    for tensor in again.parameters.values():
        assert tensor.numel() == numel
        assert numel == 0 or (begin <= tensor.data_ptr() < end and tensor.data_ptr() % tensor.element_size() == 0)


@pytest.mark.parametrize("offset", [1, 3, 56])
def test_a_vector_behind_a_message_header_of_any_size_is_unpacked(offset: int) -> None:
    state = small()
    message = torch.cat([torch.zeros(offset, dtype=torch.uint8), pack(state)])
    assert_same(unpack(message[offset:]), state)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"step": -1}, "step"),
        ({"step": 1.0}, "step"),
        ({"step": True}, "step"),
        ({"parameters": {"": torch.ones(1)}}, "names of parameters"),
        ({"parameters": {"w": torch.ones(1, dtype=torch.complex64)}}, r"parameters\['w'\].*complex64"),
        ({"parameters": {"w": torch.ones(1, device="meta")}}, "on meta"),
        ({"outer": {"m": torch.eye(2).to_sparse()}}, r"outer\['m'\]"),
        ({"note": {"a": [1, (2,)]}}, r"\(2,\) at note\['a'\]\[1\]"),
        ({"note": {"a": float("nan")}}, "nan at note"),
        ({"note": {1: 2}}, "keys of a note"),
        ({"note": []}, "note must be a dict"),
    ],
)
def test_what_bytes_cannot_hold_is_refused_at_once(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        GlobalState(**{"step": 1, "parameters": {}, **fields})


def test_a_note_that_no_header_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="note less"):
        pack(GlobalState(step=1, parameters={}, note={"ledger": "x" * (1 << 24)}))


def test_only_bytes_are_unpacked() -> None:
    for wrong in (torch.zeros(100), torch.zeros(10, 10, dtype=torch.uint8), pack(small())[::2]):
        with pytest.raises(ValueError, match="uint8"):
            unpack(wrong)


@given(state=STATES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_first_bytes_give_the_parameters_or_are_too_few(state: GlobalState, data: st.DataObject) -> None:
    vector = pack(state)
    size = data.draw(st.integers(0, vector.numel()))
    found = unpack_parameters(vector[:size].clone(), num_bytes=vector.numel())
    if found is None:
        last = pack(GlobalState(step=state.step, parameters=state.parameters, note=state.note))
        assert size < vector.numel() and (size < last.numel() or state.outer)
    else:
        assert set(found) == set(state.parameters)
        assert all(same_bits(found[name], tensor) for name, tensor in state.parameters.items())
    assert unpack_parameters(vector, num_bytes=vector.numel()) is not None


def test_first_bytes_that_are_damaged_are_refused() -> None:
    vector = pack(small())
    vector[-20] ^= 1  # in the momentum, which is not looked at
    assert unpack_parameters(vector, num_bytes=vector.numel()) is not None
    vector[vector.numel() - 13 * 4 - 64] ^= 1
    with pytest.raises(PayloadError, match="damaged"):
        unpack_parameters(vector, num_bytes=vector.numel())
    with pytest.raises(PayloadError, match="bytes arrived, its total is"):
        unpack_parameters(vector, num_bytes=vector.numel() + 1)
