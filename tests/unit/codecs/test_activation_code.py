"""The code of activations: sizes known before, every shape and dtype, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import thinwire
from thinwire.codec_specs import ACTIVATION_CODECS, activation_bytes
from thinwire.codecs import by_name
from thinwire.codecs.activation_code import ActivationCode
from thinwire.errors import NonFiniteError, PayloadError

SOURCE = "stage 1, micro-batch 3"
PAIRS = [(forward, backward) for forward in ACTIVATION_CODECS["forward"] for backward in ACTIVATION_CODECS["backward"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(0, 5), (1,), (3, 7, 11), (2, 64, 32)])
def test_payloads_of_every_codec_have_the_size_that_is_known_before(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    if len(shape) > 1:
        values = values.transpose(0, 1)
    before = values.clone()
    for forward, backward in PAIRS:
        code = ActivationCode(forward, backward)
        for is_forward, name in ((True, forward), (False, backward)):
            payload = code.encode(values, is_forward=is_forward, source=SOURCE)
            assert payload.dtype == torch.uint8
            assert payload.shape == (code.payload_bytes(values.numel(), is_forward=is_forward),)
            # into a tensor of another layout and the receiver's dtype
            out = torch.full(values.shape, 7.0, dtype=dtype).mT.contiguous().mT if values.dim() > 1 else values + 7
            code.decode(payload, out, is_forward=is_forward, source=SOURCE)
            exact = by_name(name).decode(payload, numel=values.numel()).view(values.shape).to(dtype)
            assert torch.equal(out, exact)
            if name == "float32" and dtype != torch.float64:
                assert torch.equal(out, values)
    assert torch.equal(values, before)


@pytest.mark.parametrize("name", ACTIVATION_CODECS["backward"])
def test_the_size_law_without_torch_is_that_of_the_codec(name: str) -> None:
    for numel in (0, 1, 63, 64, 65, 255, 256, 257, 12_345):
        assert activation_bytes(name, numel) == by_name(name).payload_bytes(numel)


def test_a_leaf_that_requires_a_gradient_is_filled_in_place() -> None:
    out = torch.zeros(3, requires_grad=True)
    code = thinwire.ActivationCode(forward="float32")
    code.decode(code.encode(torch.ones(3), is_forward=True, source=""), out, is_forward=True, source="")
    assert out.is_leaf and out.requires_grad and out.tolist() == [1, 1, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_refused_by_the_sender_with_its_stage_and_micro_batch(
    bad: float, dtype: torch.dtype
) -> None:
    values = torch.ones(70, dtype=dtype)
    values[69] = bad
    for forward, backward in PAIRS:
        with pytest.raises(NonFiniteError, match=r"^stage 1, micro-batch 3: activations hold NaN"):
            ActivationCode(forward, backward).encode(values, is_forward=True, source=SOURCE)
        with pytest.raises(NonFiniteError, match=r"^stage 1, micro-batch 3: gradients of activations hold NaN"):
            ActivationCode(forward, backward).encode(values, is_forward=False, source=SOURCE)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_too_short_or_too_long_is_refused(change: int) -> None:
    code, out = ActivationCode(), torch.zeros(300)
    for is_forward in (True, False):
        size = code.payload_bytes(300, is_forward=is_forward) + change
        with pytest.raises(PayloadError, match=f"^{SOURCE}: .*got {size}"):
            code.decode(torch.zeros(size, dtype=torch.uint8), out, is_forward=is_forward, source=SOURCE)
    huge = torch.full((256,), 2.0**127)  # finite, and more than a block's scale can say
    with pytest.raises(NonFiniteError, match=f"^{SOURCE}: block-int8"):
        code.decode(code.encode(huge, is_forward=True, source=SOURCE), huge, is_forward=True, source=SOURCE)


def test_names_are_refused_with_the_reason_and_a_remedy_that_works() -> None:
    assert ActivationCode("block_int8", "E3M0").name == "block-int8/e3m0"
    for text, reason in {
        "e3m0": "e3m0 carries no forward activations: cost 0.141 nats of 2.077 .* try block-int8",
        "block-2bit/block-int8": "2 bits cost 0.379 nats",
        "top-k": "top-k carries no forward activations: it drops elements",
        "block-int8/dct-top-k": "dct-top-k carries no backward activations: it drops elements",
        "block-int8/block-int5": "unknown codec; got 'block-int5'",
        "block-int8/": "unknown codec; got ''",
        "block-int8/topk": "unknown codec; got 'topk'; allowed float32, .*, e3m0-stochastic; try float32$",
    }.items():
        with pytest.raises(ValueError, match=reason):
            ActivationCode.parse(text)
    assert ActivationCode.parse("block-int8").name == "block-int8/block-int8"
    assert ActivationCode.parse(ActivationCode().name) == ActivationCode()


def test_a_delta_memory_refuses_what_is_not_its_sample_its_visit_or_its_size() -> None:
    code = ActivationCode("block-int4", memory="delta", samples=5, most_memory_bytes=5 * 70 * 2)
    sender, receiver, out = code.make_memory(), code.make_memory(), torch.zeros(2, 7, 10)
    assert sender is not None and receiver is not None
    values = torch.randn(2, 7, 10, generator=torch.Generator().manual_seed(1))
    first = sender.encode(values, [4, 0], source=SOURCE)
    with pytest.raises(PayloadError, match=r"sender has sample 4 after 0 visits, this end sample 3 after 0"):
        receiver.decode(first, out, [3, 0], source=SOURCE)
    for bad in (first[:10], first[:-1], torch.cat([first, torch.ones(1, dtype=torch.uint8)])):
        with pytest.raises(PayloadError, match=f"^{SOURCE}: "):
            receiver.decode(bad, out, [4, 0], source=SOURCE)
    assert receiver.decode(first, out, [4, 0], source=SOURCE) == len(first) and torch.equal(out, values)
    second = sender.encode(values + 0.1, [4, 0], source=SOURCE)
    third = sender.encode(values, [4, 0], source=SOURCE)
    with pytest.raises(PayloadError, match=r"sample 4 after 2 visits, this end sample 4 after 1; .*load_state_dict"):
        receiver.decode(third, out, [4, 0], source=SOURCE)
    receiver.decode(second, out, [4, 0], source=SOURCE)
    assert receiver.visits == [2, 0, 0, 0, 2] and (out - values - 0.1).abs().max() < 0.02
    sender.load_state_dict(None)  # the remedy, and a sample that comes uncoded once more
    receiver.decode(sender.encode(values, [4, 0], source=SOURCE), out, [4, 0], source=SOURCE)
    assert torch.equal(out, values) and torch.equal(sender.state_dict()["last"], receiver.state_dict()["last"])
    with pytest.raises(NonFiniteError, match="65504"):
        sender.encode(values * 1e6, [1, 2], source=SOURCE)
    for wrong in (torch.zeros(3, 70), torch.zeros(2, 71)):
        with pytest.raises(ValueError, match=r"other rows than samples|one shape"):
            sender.encode(wrong, [1, 2], source=SOURCE)
    with pytest.raises(ValueError, match=r"too many bytes on each side of a border; got 710; allowed 700"):
        code.memory_bytes(71)
    with pytest.raises(ValueError, match="too many bytes"):
        code.make_memory().encode(torch.zeros(1, 71), [0], source=SOURCE)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="only a CodedStage has the memory"):
        code.encode(values, is_forward=True, source=SOURCE)
    with pytest.raises(ValueError, match="a memory needs its kind"):
        ActivationCode(memory="delta")
