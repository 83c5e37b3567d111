"""Coded stages under torch's own schedules, in real processes: gradients of one process, and the bytes of the code."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run, values
from torch import nn

from thinwire.codecs.activation_code import ActivationCode
from thinwire.codecs.channel_bits import AdaptiveBits, channel_payload_bytes
from thinwire.transport.addresses import Address
from thinwire.transport.collective_hooks import CollectiveHooks, GroupCall
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.secret import Secret, make_secret
from thinwire.transport.wire.wire_transport import WireTransport

WIDTH, ROWS, PASSES = 24, 3, 8
SCHEDULES = ("1f1b", "gpipe", "interleaved")
# Bytes of an activation of one micro-batch: 72 elements in blocks of 256 and of 64.
FORWARD_BYTES, BACKWARD_BYTES = 260, 68
DELTA = ActivationCode("block-int4", "float32", memory="delta", samples=2 * PASSES * ROWS)


class RoundTrip(torch.autograd.Function):
    """What a coded border does to activations and their gradients, without a border."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, code: ActivationCode) -> torch.Tensor:
        ctx.code = code
        return _decoded(code, values, is_forward=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _decoded(ctx.code, grad, is_forward=False), None


def _decoded(code: ActivationCode, values: torch.Tensor, *, is_forward: bool) -> torch.Tensor:
    out = torch.empty_like(values)
    code.decode(code.encode(values, is_forward=is_forward, source=""), out, is_forward=is_forward, source="")
    return out


def parts(num_stages: int, dtype: torch.dtype) -> list[nn.Sequential]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(dtype) for _ in range(num_stages)]


def batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    rows, wanted = torch.randn(2, PASSES * ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return rows, wanted


def loss_of(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (found - wanted).pow(2).sum()


def in_one_process(num_stages: int, dtype: torch.dtype, code: ActivationCode | None, sites: list[int]) -> list[Any]:
    stages, (rows, wanted) = parts(num_stages, dtype), batch(dtype)
    for number in range(PASSES):
        own = slice(number * ROWS, (number + 1) * ROWS)
        found = rows[own]
        for place, stage in enumerate(stages):
            if place and code is not None and sites[place - 1] != sites[place]:
                found = RoundTrip.apply(found, code)  # type: ignore[no-untyped-call]
            found = stage(found)
        loss_of(found, wanted[own]).backward()
    return [_gradient(stage) for stage in stages]


def _gradient(stage: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in stage.parameters() if parameter.grad is not None])


class SentBytes:
    """Observer of calls: bytes sent to each rank."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()

    def group(self, number: int, name: str, ranks: tuple[int, ...]) -> None:
        pass

    def posted(self, call: GroupCall) -> None:
        if call.kind == "send":
            assert call.peer is not None
            self.sent[call.peer] += call.num_bytes

    def ended(self, call: GroupCall) -> None:
        pass


def rank(sites: list[int]) -> dict[str, Any]:
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    from thinwire import CodedStage

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    observer = SentBytes()
    hooks = CollectiveHooks(observer)
    for name in SCHEDULES:
        for dtype, code in ((torch.float32, None), (torch.float64, None), (torch.float32, ActivationCode())):
            each = 2 if name == "interleaved" else 1
            chunks = parts(size * each, dtype)[own::size]
            stages = [
                CodedStage(chunk, own + place * size, size * each, torch.device("cpu"), code=code, sites=sites * each)
                for place, chunk in enumerate(chunks)
            ]
            about = {"n_microbatches": PASSES, "loss_fn": loss_of, "scale_grads": False}
            schedule: Any
            if name == "interleaved":
                schedule = ScheduleInterleaved1F1B(stages, **about)  # type: ignore[arg-type]
            else:
                schedule = (Schedule1F1B if name == "1f1b" else ScheduleGPipe)(stages[0], **about)  # type: ignore[arg-type]
            rows, wanted = batch(dtype)
            for _ in range(2):  # the first step asks for shapes too
                observer.sent.clear()
                for chunk in chunks:
                    chunk.zero_grad()
                is_last = own == size - 1
                schedule.step(*((rows,) if own == 0 else ()), **({"target": wanted, "losses": []} if is_last else {}))
            found[f"{name} {dtype} {code is not None}"] = {
                "gradients": [_gradient(chunk).tolist() for chunk in chunks],
                "sent": {str(peer): count for peer, count in observer.sent.items()},
            }
    found["wire"] = over_the_wire(sites, observer)
    found["paths"] = on_full_paths()
    hooks.close()
    other = ActivationCode(backward="e3m0" if own else "block-int4")
    try:
        CodedStage(nn.Linear(2, 2), own, size, torch.device("cpu"), code=other)
    except ValueError as error:
        found["refused"] = str(error)
    dist.destroy_process_group()
    return found


def on_full_paths() -> list[float]:
    """Run all stages for every micro-batch, each on a path of its own; return the gradients' sum."""
    from thinwire.site.skip_paths import SkipNetwork, orders_of, run_paths
    from thinwire.transport.path_runner import PathRunner, PathStep
    from thinwire.transport.process_group import ProcessGroupTransport

    own, size = dist.get_rank(), dist.get_world_size()
    part, (rows, wanted) = parts(size, torch.float32)[own], batch(torch.float32)
    targets, inputs = wanted.split(ROWS), rows.split(ROWS)
    network = SkipNetwork(stages=tuple((node,) for node in range(size)), forward_s=(1.0,) * size,
                          delay_s=((1.0,) * size,) * size, memory=PASSES)  # fmt: skip
    paths = (tuple(range(size)),) * PASSES
    orders = orders_of(run_paths(network, paths, [0.0] * PASSES))
    transport = ProcessGroupTransport(dist.new_group(backend="gloo"))
    runner = PathRunner(
        part, part.parameters(), transport=transport, code=ActivationCode.parse("float32"), device=torch.device("cpu"),
        loss=lambda found, number: loss_of(found, targets[number]),
    )  # fmt: skip
    for number in range(2):
        part.zero_grad()
        step = PathStep(number=number, paths=paths, orders=orders, weights=(1.0,) * PASSES)
        runner.run(step, shapes=[one.shape for one in inputs], inputs=inputs)
    dist.barrier()
    transport.close()
    return (PASSES * _gradient(part)).tolist()


def over_the_wire(sites: list[int], observer: SentBytes) -> dict[str, Any]:
    """Run 1F1B with messages between sites on an encrypted wire."""
    from torch.distributed.pipelining import Schedule1F1B

    from thinwire import CodedStage

    own, size, wire = dist.get_rank(), dist.get_world_size(), open_wire()
    part = parts(size, torch.float32)[own]
    stage = CodedStage(part, own, size, torch.device("cpu"), code=ActivationCode(), sites=sites, wire=wire)
    schedule = Schedule1F1B(stage, PASSES, loss_fn=loss_of, scale_grads=False)
    rows, wanted = batch(torch.float32)
    for _ in range(3):
        observer.sent.clear()
        part.zero_grad()
        more = {"target": wanted, "losses": []} if own == size - 1 else {}
        schedule.step(*((rows,) if own == 0 else ()), **more)
    found = {
        "gradients": [_gradient(part).tolist()],
        "sent": {str(peer): count for peer, count in observer.sent.items()},
        "wire": wire.log.totals("received").payload_bytes,
    }
    dist.barrier()
    wire.close()
    return found


def open_wire() -> RecordingTransport:
    own, size = dist.get_rank(), dist.get_world_size()
    bare = WireTransport(replica=own, num_replicas=size, secret=Secret(key=bytes(range(32))), address="127.0.0.1")
    ports: list[Any] = [None] * size
    dist.all_gather_object(ports, bare.port)
    bare.dial({peer: Address(host="127.0.0.1", port=ports[peer]) for peer in range(own)}, deadline_s=60)
    return RecordingTransport(bare)


@pytest.fixture(scope="module", params=[[0, 1], [0, 0, 1, 1], [0, 1, 2, 3]], ids=str)
def ranks(request: pytest.FixtureRequest) -> tuple[list[int], list[dict[str, Any]]]:
    sites: list[int] = request.param
    return sites, values(run(rank, num_ranks=len(sites), arguments={"sites": sites}))


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_one_process_whose_borders_are_coded_alike(
    name: str, ranks: tuple[list[int], list[dict[str, Any]]]
) -> None:
    sites, found = ranks
    size, each = len(sites), 2 if name == "interleaved" else 1
    limits = {torch.float32: 1e-6, torch.float64: 1e-12}
    for dtype, code in ((torch.float32, None), (torch.float64, None), (torch.float32, ActivationCode())):
        expected = in_one_process(size * each, dtype, code, sites * each)
        for stage, gradient in enumerate(expected):
            own = found[stage % size][f"{name} {dtype} {code is not None}"]["gradients"][stage // size]
            error = (torch.tensor(own, dtype=torch.float64) - gradient.double()).norm() / gradient.double().norm()
            assert error < limits[dtype], (stage, dtype, code)


@pytest.mark.parametrize("name", SCHEDULES)
def test_bytes_of_each_direction_are_those_of_the_code(
    name: str, ranks: tuple[list[int], list[dict[str, Any]]]
) -> None:
    sites, found = ranks
    size, num_stages = len(sites), len(sites) * (2 if name == "interleaved" else 1)
    code = ActivationCode()
    numel = ROWS * WIDTH
    assert [code.payload_bytes(numel), code.payload_bytes(numel, is_forward=False)] == [FORWARD_BYTES, BACKWARD_BYTES]
    for is_coded, dtype in ((False, torch.float32), (False, torch.float64), (True, torch.float32)):
        expected = [Counter[str]() for _ in sites]
        for stage in range(num_stages - 1):
            one, other = stage % size, (stage + 1) % size
            plain = numel * dtype.itemsize
            crosses = is_coded and sites[one] != sites[other]
            expected[one][str(other)] += PASSES * (FORWARD_BYTES if crosses else plain)
            expected[other][str(one)] += PASSES * (BACKWARD_BYTES if crosses else plain)
        for own in range(size):
            assert found[own][f"{name} {dtype} {is_coded}"]["sent"] == expected[own], (own, is_coded)


def test_paths_that_skip_nothing_give_the_gradients_of_1f1b(ranks: tuple[list[int], list[dict[str, Any]]]) -> None:
    for one in ranks[1]:
        expected = torch.tensor(one["1f1b torch.float32 False"]["gradients"][0])
        assert (torch.tensor(one["paths"]) - expected).norm() / expected.norm() < 1e-6


def test_an_encrypted_wire_carries_the_same_payloads_between_sites(
    ranks: tuple[list[int], list[dict[str, Any]]],
) -> None:
    sites, found = ranks
    for own, one in enumerate(found):
        coded = one["1f1b torch.float32 True"]
        assert one["wire"]["gradients"] == coded["gradients"]
        # of three steps; within a site messages take the group, and are not coded
        near = {peer: count for peer, count in coded["sent"].items() if sites[int(peer)] == sites[own]}
        assert one["wire"]["sent"] == near
        far = [other["1f1b torch.float32 True"]["sent"].get(str(own), 0)
               for peer, other in enumerate(found) if sites[peer] != sites[own]]  # fmt: skip
        assert one["wire"]["wire"] == 3 * sum(far)


def test_codes_that_differ_are_refused_on_every_rank_before_the_first_step(
    ranks: tuple[list[int], list[dict[str, Any]]],
) -> None:
    for found in ranks[1]:
        assert "different activation codes; got block-int8/block-int4 over sites 0-1" in found["refused"]
        assert "block-int8/e3m0" in found["refused"] and "try --activation-code" in found["refused"]


def replica_rank(secret: str) -> dict[str, Any]:
    """Train in two replicas of two stages at different sites, over gloo alone and then with a secret."""
    from thinwire.training.build import make_inner_optimizer
    from thinwire.training.config import TrainConfig
    from thinwire.training.parallel_passes import ParallelPasses, cut_model, make_mesh, whole_parameters
    from thinwire.transport.base import all_gather_json
    from thinwire.transport.connect import connect, wire_within
    from thinwire.workloads.language.presets import TransformerConfig
    from thinwire.workloads.language.transformer import build_transformer

    torch.set_num_threads(1)
    shape = TransformerConfig(vocab_size=16, dim=16, layers=4, heads=4, max_seq_len=8)
    config = TrainConfig.of(model="nano", pp=2, batch_size=3, micro_batch=1, activation_code="block-int8/block-int4",
                            lr=1e-2, inner_optimizer="adamw")  # fmt: skip
    tokens = torch.randint(16, (3, 9), generator=torch.Generator().manual_seed(7))
    found: dict[str, Any] = {}
    for name, given in (("gloo", None), ("secret", Path(secret))):
        transport = connect(solo=True, ranks_per_replica=2, secret=given)
        observer = SentBytes()
        hooks = CollectiveHooks(observer)
        mesh = make_mesh(config, device=torch.device("cpu"), wire=wire_within(transport))
        model = cut_model(build_transformer(shape, seed=3), config, mesh)
        passes, inner = ParallelPasses(config, model, mesh), make_inner_optimizer(config, model)
        losses = []
        for number in range(2):
            if number:  # the first step asks for shapes
                observer.sent.clear()
            losses.append(float(passes.backward(tokens[:, :-1], tokens[:, 1:], factor=1.0)[0]))
            inner.step()
            inner.zero_grad(set_to_none=True)
        losses.append(float(passes.held_out(tokens[:, :-1], tokens[:, 1:])))
        whole = whole_parameters(model, mesh)
        border = {way: mesh.border.totals(way).payload_bytes for way in ("sent", "received")}  # type: ignore[arg-type]
        notes = all_gather_json({"losses": losses}, transport=transport, number=1, deadline_s=60)
        found[name] = {
            "losses": losses, "whole": {key: value.tolist() for key, value in whole.items()}, "border": border,
            "gloo": sum(observer.sent.values()), "met": [note["losses"] == losses for note in notes],
            "place": [transport.replica, transport.num_replicas, mesh.rank],
        }  # fmt: skip
        mesh.close()
        hooks.close()
        transport.close()
    return found


def test_with_a_secret_all_that_crosses_a_border_is_on_the_encrypted_wire_and_the_same(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    make_secret(secret)
    found = values(run(replica_rank, num_ranks=4, arguments={"secret": str(secret)}))
    for rank, one in enumerate(found):
        gloo, wire = one["gloo"], one["secret"]
        assert wire["place"] == gloo["place"] == [rank // 2, 2, rank % 2]
        assert wire["losses"] == gloo["losses"] and wire["whole"] == gloo["whole"], rank
        assert wire["met"] == gloo["met"] == [True, True]
        # three micro-batches of 8 x 16, and the copy of an embedding of 16 x 16; the other end counts the same
        coded = ActivationCode()
        sizes = [3 * coded.payload_bytes(128, is_forward=way) + coded.payload_bytes(256, is_forward=way)
                 for way in (True, False)]  # fmt: skip
        assert gloo["gloo"] >= sizes[rank % 2] and wire["gloo"] == 0, "gloo sent it, and no message with a secret"
        assert gloo["border"]["sent"] >= 2 * sizes[rank % 2]
        # with a secret the parameters that each rank gathers at the end cross on the wire too
        assert wire["border"]["sent"] > gloo["border"]["sent"]
        assert wire["border"]["sent"] == found[rank ^ 1]["secret"]["border"]["received"]


def bad_rank() -> None:
    from torch.distributed.pipelining import Schedule1F1B

    from thinwire import CodedStage

    dist.init_process_group("gloo")
    own = dist.get_rank()
    part = parts(2, torch.float32)[own]
    stage = CodedStage(part, own, 2, torch.device("cpu"), code=ActivationCode())
    schedule = Schedule1F1B(stage, 2, loss_fn=loss_of)
    rows, wanted = batch(torch.float32)
    rows[-1, 0] = float("nan")
    schedule.step(*((rows,) if own == 0 else ()), **({"target": wanted, "losses": []} if own else {}))


def test_a_nan_names_its_stage_and_micro_batch() -> None:
    first, second = run(bad_rank, num_ranks=2)
    assert first.error == "NonFiniteError", first.stderr
    assert first.text.startswith("stage 0, micro-batch 1: activations hold NaN")
    assert second.returncode != 0


def with_memory(observer: SentBytes, *, is_wired: bool) -> dict[str, Any]:
    """Train with a delta memory, again from a save in the middle, and from one that a rank has lost."""
    from torch.distributed.pipelining import Schedule1F1B

    from thinwire import CodedStage
    from thinwire.events import TransferLog

    own, log = dist.get_rank(), TransferLog()
    wires: list[RecordingTransport] = []
    rows, wanted = batch(torch.float32)
    found: dict[str, Any] = {"sent": []}

    def start(saved: bytes | None) -> tuple[nn.Module, CodedStage, Any, Any]:
        part = parts(2, torch.float32)[own]
        if is_wired:
            wires.append(open_wire())
        wire = wires[-1] if is_wired else None
        stage = CodedStage(part, own, 2, torch.device("cpu"), code=DELTA, wire=wire, log=log)
        inner = torch.optim.SGD(part.parameters(), lr=1e-3)
        if saved is not None:
            state = torch.load(io.BytesIO(saved), weights_only=True)
            part.load_state_dict(state["model"])
            stage.load_state_dict(state["stage"])
        return part, stage, Schedule1F1B(stage, PASSES, loss_fn=loss_of, scale_grads=False), inner

    def train(part: nn.Module, stage: CodedStage, schedule: Any, inner: Any, steps: range) -> list[Any]:
        for step in steps:
            stage.samples(samples_of(step))
            observer.sent.clear()
            schedule.step(*((rows,) if own == 0 else ()), **({"target": wanted, "losses": []} if own else {}))
            found["sent"].append(observer.sent[1 - own])
            inner.step()
            inner.zero_grad()
        memory = stage.memories[1 - own]
        copies = hashlib.sha256(memory.state_dict()["last"].numpy().tobytes()).hexdigest()
        return [[value.tolist() for value in part.state_dict().values()], memory.visits, copies]

    run = start(None)
    train(*run, range(2))
    file = io.BytesIO()
    torch.save({"model": run[0].state_dict(), "stage": run[1].state_dict()}, file)
    found["whole"] = train(*run, range(2, 4))
    found["received"] = (wires[0].log if is_wired else log).totals("received").payload_bytes
    found["resumed"] = train(*start(file.getvalue()), range(2, 4))
    run = start(file.getvalue())
    run[1].load_state_dict(None if own else run[1].state_dict())  # one rank has none: both drop theirs
    found["dropped"] = run[1].memories[1 - own].visits
    found["lost"] = train(*run, range(2, 4))[1:]
    try:
        run[2].step(*((rows,) if own == 0 else ()), **({"target": wanted, "losses": []} if own else {}))
    except ValueError as error:
        found["refused"] = str(error)
    dist.barrier()
    for wire in wires:
        wire.close()
    return found


def samples_of(step: int) -> list[list[int]]:
    """Return other samples at even and odd steps, of which the last three are in both; rows of micro-batches."""
    numbers = torch.arange(PASSES * ROWS) + (step % 2) * (PASSES * ROWS - 3)
    return numbers.flip(0).view(PASSES, ROWS).tolist()  # type: ignore[no-any-return]


def adaptive_part() -> tuple[nn.Sequential, AdaptiveBits]:
    bits = AdaptiveBits(WIDTH, least=1, most=8)
    with torch.no_grad():
        bits.scores.copy_(torch.linspace(-3, 3, WIDTH))
    return nn.Sequential(parts(2, torch.float32)[0], bits), bits


def adaptive_rank() -> dict[str, Any]:
    from torch.distributed.pipelining import Schedule1F1B

    from thinwire import CodedStage

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own = dist.get_rank()
    observer = SentBytes()
    hooks = CollectiveHooks(observer)
    found: dict[str, Any] = {}
    for name in ("gloo", "wire"):
        part, bits = adaptive_part()
        if own:
            part = parts(2, torch.float32)[1]
        code = ActivationCode("channel-bits", "float32", bits=None if own else bits)
        wire = open_wire() if name == "wire" else None
        stage = CodedStage(part, own, 2, torch.device("cpu"), code=code, wire=wire)
        schedule = Schedule1F1B(stage, PASSES, loss_fn=loss_of, scale_grads=False)
        rows, wanted = batch(torch.float32)
        for _ in range(2):
            observer.sent.clear()
            part.zero_grad()
            schedule.step(*((rows,) if own == 0 else ()), **({"target": wanted, "losses": []} if own else {}))
        found[name] = {"gradient": _gradient(part).tolist(), "sent": observer.sent[1 - own]}
        if wire is not None:
            found[name]["received"] = wire.log.totals("received").payload_bytes // 2
            dist.barrier()
            wire.close()
    try:  # a device whose collectives need equal sizes
        CodedStage(part, own, 2, torch.device("meta"), code=code)
    except ValueError as error:
        found["refused"] = str(error)
    found["delta"] = {name: with_memory(observer, is_wired=name == "wire") for name in ("gloo", "wire")}
    hooks.close()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def changing_sizes() -> list[dict[str, Any]]:
    return values(run(adaptive_rank, num_ranks=2))


def test_a_delta_memory_trains_as_in_one_process_and_goes_on_from_a_save_bit_for_bit(
    changing_sizes: list[dict[str, Any]],
) -> None:
    stages, ends = parts(2, torch.float32), [DELTA.make_memory() for _ in range(2)]
    inner = torch.optim.SGD([weight for stage in stages for weight in stage.parameters()], lr=1e-3)
    (rows, wanted), sizes = batch(torch.float32), []
    for step in range(4):
        inner.zero_grad()
        sizes.append(0)
        for place, numbers in enumerate(samples_of(step)):
            own = slice(place * ROWS, (place + 1) * ROWS)
            sent = stages[0](rows[own])
            payload = ends[0].encode(sent, numbers, source="")
            received = torch.empty_like(sent)
            sizes[-1] += ends[1].decode(payload, received, numbers, source="")
            received.requires_grad_()
            loss_of(stages[1](received), wanted[own]).backward()
            sent.backward(received.grad)
        inner.step()
    assert sizes[0] == PASSES * ROWS * (8 + 4 * WIDTH) and sizes[3] == PASSES * (8 * ROWS + 68)
    back = PASSES * ROWS * WIDTH * 4
    for name in ("gloo", "wire"):
        first, second = (one["delta"][name] for one in changing_sizes)
        assert first["whole"][1:] == second["whole"][1:], "equal counters, equal copies"
        assert first["whole"][1] == ends[0].visits
        for stage, one in zip(stages, (first, second), strict=True):
            for value, found in zip(stage.state_dict().values(), one["whole"][0], strict=True):
                torch.testing.assert_close(torch.tensor(found), value, rtol=1e-6, atol=1e-7)
            assert one["resumed"] == one["whole"]
            assert not any(one["dropped"]) and one["lost"] == first["lost"]
            assert "the samples of this step were not named; got 0" in one["refused"]
        assert first["received"] == 4 * back and second["received"] == sum(sizes)
        if name == "gloo":
            later = (1, 2, 3, 5, 7)  # the first step of a stage asks for shapes too
            expected = [*sizes, *sizes[2:], *sizes[:2]]
            assert [first["sent"][step] for step in later] == [expected[step] for step in later]
            assert {second["sent"][step] for step in later} == {back}


def test_learned_bits_train_across_a_border_as_in_one_process_by_their_byte_law(
    changing_sizes: list[dict[str, Any]],
) -> None:
    found = changing_sizes
    (first, bits), second, (rows, wanted) = adaptive_part(), parts(2, torch.float32)[1], batch(torch.float32)
    for number in range(PASSES):
        own = slice(number * ROWS, (number + 1) * ROWS)
        loss_of(second(first(rows[own])), wanted[own]).backward()
    assert bits.scores.grad is not None and bits.scores.grad.count_nonzero() == WIDTH
    sent = PASSES * channel_payload_bytes(bits.widths(), rows=ROWS), PASSES * ROWS * WIDTH * 4
    for name in ("gloo", "wire"):
        for own, stage in enumerate((first, second)):
            torch.testing.assert_close(torch.tensor(found[own][name]["gradient"]), _gradient(stage), rtol=1e-6, atol=0)
    assert all("payloads of changing size need a wire" in one["refused"] for one in found)
    assert [one["gloo"]["sent"] for one in found] == list(sent)
    assert [one["wire"]["received"] for one in reversed(found)] == list(sent)
