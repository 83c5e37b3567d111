"""Wrapped strategies over a grid in this process: exactness, residuals, absent and hostile clients, bytes."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, Krum
from in_process_grid import InProcessGrid, again, walking_app

from thinwire.averaging.aggregation_rules import TrimmedMean
from thinwire.errors import NonFiniteError, PayloadError, ThinwireError
from thinwire.integrations import flower as thin
from thinwire.integrations.flower.strategy import serialised_bytes
from thinwire.integrations.flower.updates import ArrayLayout, Broadcast, UpdateCode, follow
from thinwire.methods.robust import MultiKrum
from thinwire.methods.robust.flag import FlagAggregator
from thinwire.transport.message import HEADER_BYTES, pack

Arrays = dict[str, Any]


def awkward(seed: int = 0) -> Arrays:
    """Return a scalar, an empty array, a counter, a flag, half and double precision."""
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(size=(13, 7)).astype(np.float32), "half": rng.normal(size=(5,)).astype(np.float16),
        "empty": np.zeros((0, 3), np.float32), "scale": np.float32(0.3) * np.ones((), np.float32),
        "norm.num_batches_tracked": np.asarray(17, np.int64), "is_on": np.asarray([True, False]),
        "double": rng.normal(size=(3, 3)),
    }  # fmt: skip


def plain(seed: int = 0, size: int = 257) -> Arrays:
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(size, 3)).astype(np.float32), "b": rng.normal(size=(5,)).astype(np.float32)}


def step(node: int, round: int, arrays: Arrays) -> Arrays:
    """Walk by a tenth of random numbers; every third client walks far, so that medians and Krum have to choose."""
    rng = np.random.default_rng([node, round])
    far = 3.0 if node % 3 == 2 else 0.1
    new = dict(arrays)
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            dtype = np.float32 if array.dtype == np.float64 else array.dtype  # as torch trains what FedAdam sends
            new[name] = (array + far * rng.normal(size=array.shape)).astype(dtype)
    return new


def record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def arrays_of(found: ArrayRecord) -> Arrays:
    return {name: array.numpy() for name, array in found.items()}


def run(strategy: Any, mods: list[Any], start: Arrays, *, rounds: int = 2, nodes: int = 7) -> tuple[Arrays, Any]:
    grid = InProcessGrid(walking_app(mods, step), nodes)
    torch.manual_seed(0)
    result = strategy.start(grid, record(start), num_rounds=rounds)
    return arrays_of(result.arrays), result


STRATEGIES: list[Callable[[], Any]] = [
    lambda: FedAvg(), lambda: FedAdam(eta=0.01), lambda: FedMedian(), lambda: Krum(num_malicious_nodes=2),
]  # fmt: skip


@pytest.mark.parametrize("make", STRATEGIES, ids=["FedAvg", "FedAdam", "FedMedian", "Krum"])
def test_with_float32_a_wrapped_strategy_ends_with_the_same_bits(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.sample", lambda nodes, count: sorted(nodes)[:count])  # one order for both
    up = thin.Uplink("float32")
    for start in (plain(), plain(1, size=1)):
        expected, first = run(make(), [], start)
        found, second = run(thin.wrap(make(), up), [thin.client_mod(up)], start)
        assert {name: (one.dtype, one.tobytes()) for name, one in found.items()} == {
            name: (one.dtype, one.tobytes()) for name, one in expected.items()
        }
        assert second.train_metrics_clientapp == first.train_metrics_clientapp
        assert second.evaluate_metrics_clientapp == first.evaluate_metrics_clientapp


@pytest.mark.parametrize("codec", ["e3m0", "float32", "sign-mean", "chunked-top-k-2bit", "block-int8"])
def test_awkward_arrays_come_back_with_their_types_and_counters_exactly(codec: str) -> None:
    up = thin.Uplink(codec)
    got = []

    class Spy(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            got.extend(arrays_of(reply.content["arrays"]) for reply in replies)
            return None, None

    run(thin.wrap(Spy(), up), [thin.client_mod(up)], awkward(), rounds=1, nodes=2)
    expected = step(0, 1, awkward())
    [own, _] = sorted(got, key=lambda one: abs(one["w"] - expected["w"]).sum())
    assert list(own) == list(expected)
    for name, array in own.items():
        assert (array.dtype, array.shape) == (expected[name].dtype, expected[name].shape)
        if array.dtype.kind != "f" or codec == "float32":
            assert array.tobytes() == expected[name].tobytes()


def test_sent_plus_residual_is_the_difference_plus_the_old_residual_and_survives_serialisation() -> None:
    up, start = thin.Uplink("top-k", density=0.05, values="float32"), plain()
    grid = InProcessGrid(walking_app([thin.client_mod(up)], step), 2)
    strategy = thin.wrap(FedAvg(), up)
    layout, total = ArrayLayout.of(start), {1000: torch.zeros(776), 1001: torch.zeros(776)}
    got: dict[int, torch.Tensor] = {}

    def between(replies: list[Message]) -> list[Message]:
        for reply in replies:
            if "arrays" in reply.content:
                assert list(reply.content["arrays"]) == ["thinwire"]
                assert reply.content["arrays"]["thinwire"].numpy().dtype == np.uint8
                message, node = reply.content["arrays"]["thinwire"].numpy(), reply.metadata.src_node_id
                round = strategy.rounds[-1].round
                content = UpdateCode(up, layout).read(message, sender=node, version=round, base_version=round)
                got[node] = content.vector
        return replies

    grid.between = between
    arrays = record(start)
    for round in (1, 2, 3):
        base = layout.flat(arrays_of(arrays))
        messages = strategy.configure_train(round, arrays, ConfigRecord({}), grid)
        new, _ = strategy.aggregate_train(round, grid.send_and_receive(messages))
        for node in (1000, 1001):
            walked = layout.flat(step(node - 1000, round, arrays_of(arrays))) - base
            left = torch.from_numpy(grid.contexts[node].state["thinwire.residual"]["residual"].numpy().copy())
            # float32: what is sent is taken away exactly, since the top values travel whole
            assert torch.equal(got[node] + left, total[node] + walked)
            assert int((got[node] != 0).sum()) == math.ceil(0.05 * 776)
            total[node] = left
        arrays = new


def test_a_coded_downlink_leaves_server_and_clients_with_the_same_model_also_after_an_absence() -> None:
    up, start = thin.Uplink("e3m0"), plain()
    for keep, wholes in ((20, 3), (1, 4)):
        grid = InProcessGrid(walking_app([thin.client_mod(up)], step), 3)
        strategy = thin.wrap(FedAvg(fraction_evaluate=0.0), up, down=thin.Downlink("e3m0", keep=keep))
        arrays, is_whole = record(start), []
        for round in range(1, 7):
            grid.away = {1002} if round in (3, 4) else set()
            if round == 5:
                del grid.contexts[1001].state["thinwire.held"]  # as of a client that was installed again
            grid.received.clear()
            before = (strategy._broadcast.vectors or [torch.zeros(776)])[0]
            messages = strategy.configure_train(round, arrays, ConfigRecord({}), grid)
            new, _ = strategy.aggregate_train(round, grid.send_and_receive(messages))
            held = {
                node: arrays_of(context.state["thinwire.held"])
                for node, context in grid.contexts.items()
                if node not in grid.away and not (round == 5 and node == 1001)
            }
            [server] = strategy._broadcast.held
            for mine in held.values():
                assert all(mine[name].tobytes() == server[name].tobytes() for name in server)
            is_whole += [message.content["thinwire"]["from"] < 0 for message in grid.received]
            arrays = new
        assert [row.num_stale for row in strategy.rounds] == [0, 0, 0, 0, 1, 0]
        assert [row.clients for row in strategy.rounds] == [3, 3, 2, 2, 2, 3]
        # three first visits, the client that lost its version, and with keep=1 the one that was away
        assert sum(map(bool, is_whole)) == wholes + 1
        last = strategy._broadcast
        error, coded = (last.exact - last.vectors[0]).abs(), (last.exact - before).abs()
        # what E3M0 drops of one difference, and not of six
        assert 0 < float(error.max()) <= float(coded.max()) / 3 * (1 + 1e-6)


def test_an_old_residual_is_dropped_and_counted_and_two_apps_do_not_share_one() -> None:
    up = thin.Uplink("top-k", density=0.05, residual_rounds=2)
    grid = InProcessGrid(walking_app([thin.client_mod(up)], step), 2)
    strategy, arrays = thin.wrap(FedAvg(min_train_nodes=1), up), record(plain())
    for round in range(1, 6):
        grid.away = {1001} if round in (2, 3) else set()
        messages = strategy.configure_train(round, arrays, ConfigRecord({}), grid)
        arrays, _ = strategy.aggregate_train(round, grid.send_and_receive(messages))
    assert [row.num_dropped for row in strategy.rounds] == [0, 0, 0, 1, 0]
    states = [grid.contexts[node].state["thinwire.residual"]["residual"].numpy() for node in (1000, 1001)]
    assert not np.array_equal(*states)


@pytest.mark.parametrize("fate", ["lost", "refused", "NaN"])
def test_an_update_that_did_not_count_is_sent_again(fate: str) -> None:
    up, start = thin.Uplink("top-k", density=0.1, values="float32"), plain()

    def walk(node: int, round: int, arrays: Arrays) -> Arrays:
        is_nan = fate == "NaN" and round in (2, 3) and node == 0
        return {**step(node, round, arrays), **({"b": np.full(5, np.nan, np.float32)} if is_nan else {})}

    grid, layout = InProcessGrid(walking_app([thin.client_mod(up)], walk), 2), ArrayLayout.of(start)
    strategy, counted = thin.wrap(FedAvg(min_train_nodes=1, fraction_evaluate=0.0), up), torch.zeros(776)
    walked = torch.zeros(776)

    def between(replies: list[Message]) -> list[Message]:
        nonlocal counted
        round = strategy.rounds[-1].round
        [mine] = [one for one in replies if one.metadata.src_node_id == 1000]
        if round in (2, 3):
            if fate == "refused":
                mine.content["metrics"] = MetricRecord({"num-examples": math.nan, "loss": 0.0})
            return [one for one in replies if one is not mine or fate != "lost"]
        row = mine.content["arrays"]["thinwire"].numpy()
        found = UpdateCode(up, layout).read(row, sender=1000, version=round, base_version=strategy._broadcast.version)
        counted = counted + found.vector
        return replies

    grid.between, arrays = between, record(start)
    for round in range(1, 6):
        base = arrays_of(arrays)
        if fate != "NaN" or round not in (2, 3):
            walked = walked + layout.flat(step(0, round, base)) - layout.flat(base)
        messages = strategy.configure_train(round, arrays, ConfigRecord({}), grid)
        arrays, _ = strategy.aggregate_train(round, grid.send_and_receive(messages))
    assert [row.clients for row in strategy.rounds] == [2, 1, 1, 2, 2]
    left = torch.from_numpy(grid.contexts[1000].state["thinwire.residual"]["residual"].numpy().copy())
    assert torch.allclose(counted + left, walked, atol=1e-5)  # nothing is lost


def _npy(shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def _with_row(reply: Message, row: np.ndarray | Array) -> None:
    reply.content["arrays"]["thinwire"] = row if isinstance(row, Array) else Array(row)


def _forged(arrays: Arrays, *, codec: str = "e3m0", version: int = 1) -> Callable[[Message], None]:
    """Return what puts a well-formed message of other arrays, codec or round in the place of a reply's."""

    def forge(reply: Message) -> None:
        code, node = UpdateCode(thin.Uplink(codec), ArrayLayout.of(arrays)), reply.metadata.src_node_id
        base = torch.zeros(code.layout.numel)
        _with_row(reply, code.encode(arrays, base, sender=node, version=version, base_version=1)[0])

    return forge


def _half(reply: Message) -> None:
    """Claim float16 for values that only float32 holds."""
    code, node = UpdateCode(thin.Uplink("e3m0"), ArrayLayout.of(plain())), reply.metadata.src_node_id
    huge = {name: np.full_like(array, 1e6) for name, array in plain().items()}
    row, _ = code.encode(huge, torch.zeros(776), sender=node, version=1, base_version=1)
    body = torch.from_numpy(row[HEADER_BYTES:].copy())
    body[1] = 0
    _with_row(reply, pack(body, sender=node, envelope=code.envelope(version=1, base=1, size=len(body))).numpy())


def _metrics(**values: Any) -> Callable[[Message], None]:
    return lambda reply: reply.content.__setitem__("metrics", MetricRecord({"num-examples": 3, "loss": 0.0, **values}))


def _arrays(found: ArrayRecord) -> Callable[[Message], None]:
    return lambda reply: reply.content.__setitem__("arrays", found)


def _moved(key: str, to: str) -> Callable[[Message], None]:
    return lambda reply: reply.content.__setitem__(to, reply.content.pop(key))


def _bad_file(shape: tuple[int, ...], more: bytes = b"") -> Callable[[Message], None]:
    return lambda reply: _with_row(reply, Array("uint8", (1,), "numpy.ndarray", _npy(shape) + more))


HOSTILE: list[tuple[str, Callable[[Message], None]]] = [
    ("payload bytes arrived", lambda reply: _with_row(reply, reply.content["arrays"]["thinwire"].numpy()[:-3])),
    ("codec is", _forged(plain(), codec="block-int4")),
    ("version is 7, expected 1", _forged(plain(), version=7)),
    ("NaN", _forged({**plain(), "b": np.full(5, np.nan, np.float32)})),
    ("elements is", _forged(plain(size=258))),
    ("other names, shapes or tag", _forged({"a": plain()["a"], "c": plain()["b"]})),
    ("NaN or infinity", _half),
    ("claims uint8 of shape (1099511627776,)", _bad_file((1 << 40,), b"x")),
    ("claims uint8 of shape (0, 1180591620717411303424)", _bad_file((0, 1 << 70))),
    ("claims uint8 of shape (1, 1, 1", _bad_file((1,) * 70, b"x")),
    ("of shape (2, 2) in the place of a row", _bad_file((2, 2), b"row!")),
    ("num-examples is nan", _metrics(**{"num-examples": math.nan})),
    ("num-examples is 1e+308", _metrics(**{"num-examples": 1e308})),
    ("num-examples is -1", _metrics(**{"num-examples": -1})),
    ("its metrics have other names", _metrics(another=1)),
    ("its metrics have other names", _metrics(loss=[0.0, 1.0])),
    ("its metrics have other names", _moved("metrics", "more")),
    ("its metrics have other names", _moved("arrays", "others")),
    ("NaN or infinity", _arrays(record({**plain(), "b": np.full(5, np.inf, np.float32)}))),
    ("no .npy file", _arrays(ArrayRecord({"a": Array("float32", (9,), "numpy.ndarray", b"no file")}))),
    ("2 ArrayRecords", lambda reply: reply.content.__setitem__("again", reply.content["arrays"])),
]  # fmt: skip


def test_hostile_clients_are_refused_by_name_while_the_round_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.integrations.flower.strategy._MOST_NAMED", 30)
    up, start, honest = thin.Uplink("e3m0"), plain(), range(len(HOSTILE), len(HOSTILE) + 5)

    def lie(replies: list[Message]) -> list[Message]:
        nodes = {reply.metadata.src_node_id - 1000: reply for reply in replies}
        if "arrays" not in replies[0].content:
            nodes[1].content = RecordDict()
            nodes[2].content["metrics"] = MetricRecord({"num-examples": 1, "total": [1.0]})
            return [*replies, *[nodes[3]] * 5]
        good, last = again(nodes[0]), nodes[honest[-1]]
        for node, (_, spoil) in enumerate(HOSTILE):
            spoil(nodes[node])
        stranger = Message(RecordDict(), dst_node_id=999_999, message_type="train")
        # a good message of a node that sent a bad one, replays, and a stranger
        return [*replies, good, *[last] * 10_000, Message(RecordDict(), reply_to=stranger)]

    grid = InProcessGrid(walking_app([thin.client_mod(up)], step), len(HOSTILE) + len(honest))
    grid.between = lie
    strategy = thin.wrap(FedAvg(), up)
    result = strategy.start(grid, record(start), num_rounds=1)
    [row] = strategy.rounds
    assert (row.clients, row.num_rejected) == (len(honest), len(HOSTILE) + 1 + 10_000 + 1 + 2 + 5)
    for node, (words, _) in enumerate(HOSTILE):
        assert words in row.rejected[1000 + node], (node, row.rejected[1000 + node])
    assert "it has replied before" in row.rejected[1000 + honest[-1]] and "was not asked" in row.rejected[999_999]
    assert "node 1003: " in strategy.report() and f"  {row.num_rejected}\n" in strategy.report()
    # the honest clients alone are the mean, up to what E3M0 drops of their differences; node n has n + 1 examples
    weights = np.array([node + 1 for node in honest]) / sum(node + 1 for node in honest)
    for name, found in arrays_of(result.arrays).items():
        moved = [step(node, 1, start)[name] - start[name] for node in honest]
        expected = sum(weight * one for weight, one in zip(weights, moved, strict=True))
        error = np.linalg.norm(found - start[name] - expected)
        assert error < 0.3 * np.linalg.norm(expected), (name, error)
    assert result.evaluate_metrics_clientapp[1]["total"] < math.inf


@pytest.mark.parametrize(
    "up",
    [
        thin.Uplink("e3m0"), thin.Uplink("top-k", density=0.1), thin.Uplink("top-k", density=0.1, values="clusters"),
        thin.Uplink("sign-mean"), thin.Uplink("chunked-top-k-2bit"), thin.Uplink("block-int8"), thin.Uplink("float16"),
    ],
    ids=lambda up: f"{up.codec} {up.values or ''}",
)  # fmt: skip
def test_damaged_messages_are_refused_or_decode_to_finite_arrays_of_the_layout(up: thin.Uplink) -> None:
    start, rng = awkward(), np.random.default_rng(0)
    layout = ArrayLayout.of(start)
    code, base = UpdateCode(up, layout), layout.flat(awkward(1))
    row, _ = code.encode(start, base, sender=1, version=3, base_version=2)
    for _ in range(40):  # without the sender's key to the checksum, each change is refused
        bad = row.copy()
        bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        with pytest.raises((PayloadError, NonFiniteError)):
            code.decode(bad, base, sender=1, version=3, base_version=2)
    decoded = 0
    for trial in range(120):  # a liar sets the checksum right
        body = row[HEADER_BYTES:].copy()
        for _ in range(1 + trial % 4):
            body[rng.integers(len(body))] = rng.integers(256)
        body = body[: rng.integers(len(body))] if trial % 5 == 0 else body
        envelope = code.envelope(version=3, base=2, size=len(body))
        bad = pack(torch.from_numpy(body), sender=1, envelope=envelope).numpy()
        try:
            found, _ = code.decode(bad, base, sender=1, version=3, base_version=2)
        except (PayloadError, NonFiniteError):
            continue
        decoded += 1
        assert ArrayLayout.of(found) == layout
        assert all(np.isfinite(array).all() for array in found.values())
        assert set(found["is_on"].view(np.uint8)) <= {0, 1}
    assert decoded < 120


@pytest.mark.parametrize("aggregate", [None, MultiKrum(num_bad=2)], ids=["no reply", "too few for a rule"])
def test_a_round_without_enough_good_replies_keeps_the_model(aggregate: Any) -> None:
    up = thin.Uplink("e3m0")
    grid = InProcessGrid(walking_app([thin.client_mod(up)], step), 3)
    grid.between = lambda replies: [one for one in replies if aggregate or "arrays" not in one.content]
    strategy = thin.wrap(FedAvg(), up, aggregate=aggregate)
    result = strategy.start(grid, record(plain()), num_rounds=2)
    assert not result.arrays and not result.train_metrics_clientapp
    assert [row.clients for row in strategy.rounds] == [3 if aggregate else 0] * 2


def test_clients_whose_weights_are_all_zero_are_refused() -> None:
    grid = InProcessGrid(walking_app([thin.client_mod(thin.Uplink("e3m0"))], step), 2)

    def between(replies: list[Message]) -> list[Message]:
        for reply in replies:
            reply.content["metrics"]["num-examples"] = 0
        return replies

    grid.between = between
    strategy = thin.wrap(FedAvg(fraction_evaluate=0.0), thin.Uplink("e3m0"))
    assert not strategy.start(grid, record(plain()), num_rounds=1).arrays
    assert all("is 0, as of all" in reason for reason in strategy.rounds[0].rejected.values())


def test_a_damaged_downlink_is_refused_by_the_client() -> None:
    rng, layout = np.random.default_rng(0), ArrayLayout.of(plain())
    broadcast = Broadcast(down=thin.Downlink("e3m0"))
    helds = []
    for seed in range(4):
        broadcast.advance(plain(seed))
        helds.append(broadcast.held[0])
    code, row = UpdateCode(broadcast.codes[0], layout), broadcast.patch_from(1)
    assert row is not None
    found = follow(code, helds[0], row, version=1, target=4)
    assert all(found[name].tobytes() == one.tobytes() for name, one in helds[3].items())
    third = len(row) // 3
    for bad in (
        row[:-1], row[third:], np.concatenate([row[:third], row[:third], row[2 * third :]]), row[: 2 * third],
        *(np.concatenate([row[:place], row[place : place + 1] ^ 4, row[place + 1 :]]) for place in rng.integers(
            len(row), size=30
        )),
    ):  # fmt: skip
        with pytest.raises((PayloadError, NonFiniteError)):
            follow(code, helds[0], bad, version=1, target=4)
    for text in (
        "{", "[]", "[[1],[2],[3],[4]]", '[["a"],[[-1]],["float"]]', f'[["a"],[[{1 << 70}]],["float"]]',
        '[["a"],[[1]],["object"]]', '[["a"],[[1],[2]],["float"]]', '[["a"],[["x"]],["float"]]',
    ):  # fmt: skip
        with pytest.raises(PayloadError):
            ArrayLayout.from_text(text)


def test_the_report_is_the_sum_of_the_serialised_messages_and_goes_into_the_run_log(tmp_path: Path) -> None:
    up = thin.Uplink("e3m0")
    grid = InProcessGrid(walking_app([thin.client_mod(up)], step), 4)
    counted = {"up": 0}

    def between(replies: list[Message]) -> list[Message]:
        counted["up"] += sum(serialised_bytes(one.content) for one in replies if "arrays" in one.content)
        return replies

    grid.between = between
    strategy = thin.wrap(FedAvg(), up, down=thin.Downlink("e3m0"), log=tmp_path / "rounds.jsonl")
    strategy.start(grid, record(plain(size=4001)), num_rounds=3)
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [(one["round"], one["up_bytes"], one["down_bytes"], one["ratio"]) for one in lines] == [
        (row.round, row.up_bytes, row.down_bytes, row.ratio) for row in strategy.rounds
    ]
    assert sum(row.up_bytes for row in strategy.rounds) == counted["up"]
    assert sum(row.down_bytes for row in strategy.rounds) == sum(serialised_bytes(one.content) for one in grid.received)
    # after the first whole model, both directions cost 4.125 bits; evaluation first, then training needs nothing new
    assert strategy.rounds[0].ratio < 3 and strategy.rounds[-1].ratio > 9, strategy.report()
    assert strategy.report().count("\n") == 3


def test_a_client_without_the_mod_counts_as_dense_and_a_mod_without_a_wrap_names_the_remedy() -> None:
    up = thin.Uplink("float32")
    expected, _ = run(FedAvg(), [], plain(), rounds=1, nodes=2)
    found, _ = run(thin.wrap(FedAvg(), up), [], plain(), rounds=1, nodes=2)
    assert all(np.allclose(found[name], expected[name], atol=1e-6) for name in found)
    message = Message(RecordDict({"arrays": record(plain())}), dst_node_id=1, message_type="train")
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(ThinwireError, match="wrap the strategy"):
        thin.client_mod(up)(message, context, lambda *_: message)


def test_clients_without_the_mod_take_part_under_any_coded_downlink() -> None:
    up, start = thin.Uplink("float32"), plain()
    for down, clients in (
        (thin.Downlink("e3m0"), [2, 2, 2]),
        (thin.Downlink("top-k", density=0.25, sends="values"), [1, 2, 2]),  # the first masked model is no model to it
    ):
        grid = InProcessGrid(walking_app([of_one_node(thin.client_mod(up))], needs_all), 2)
        strategy, arrays = thin.wrap(FedAvg(fraction_evaluate=0.0), up, down=down), record(start)
        for round in range(1, 4):
            messages = strategy.configure_train(round, arrays, ConfigRecord({}), grid)
            before, (arrays, _) = arrays_of(arrays), strategy.aggregate_train(round, grid.send_and_receive(messages))
        assert [row.clients for row in strategy.rounds] == clients, strategy.report()
        # both clients step by 1 from what they got, and the server adds the step to its own model
        for name, found in arrays_of(arrays).items():
            assert np.allclose(found, before[name] + 1, atol=1e-5)


def of_one_node(mod: Any) -> Any:
    def either(message: Message, context: Context, call_next: Any) -> Any:
        return mod(message, context, call_next) if context.node_id == 1001 else call_next(message, context)

    return either


def needs_all(node: int, round: int, arrays: Arrays) -> Arrays:
    """Step by 1; as `load_state_dict` does, it refuses other names than the model's."""
    assert list(arrays) == list(plain())
    return {name: array + np.float32(1) for name, array in arrays.items()}


def test_bytes_of_a_reply_that_is_refused_do_not_count() -> None:
    def bytes_of(*, is_odd: bool) -> tuple[int, int]:
        grid = InProcessGrid(walking_app([thin.client_mod(thin.Uplink("float32"))], step), 3)

        def between(found: list[Message]) -> list[Message]:
            if is_odd and found:
                found[0].content["metrics"]["another"] = 1
            return found

        grid.between = between
        strategy = thin.wrap(FedAvg(fraction_evaluate=0.0), thin.Uplink("float32"))
        strategy.start(grid, record(plain()), num_rounds=1)
        return strategy.rounds[0].clients, strategy.rounds[0].up_bytes

    clients, whole = bytes_of(is_odd=False)
    assert clients == 3 and bytes_of(is_odd=True) == (2, whole * 2 // 3)


def test_clipping_before_coding_works_and_the_other_order_and_secure_aggregation_are_refused_by_name() -> None:
    up, dp = thin.Uplink("e3m0"), LocalDpMod(1.0, 0.0, 1.0, 1e-5)

    def secaggplus_mod(message: Message, context: Context, call_next: Any) -> Message:
        return call_next(message, context)  # as Flower's in its stage of masked vectors

    secaggplus_mod.__qualname__ = secaggplus_mod.__name__
    secaggplus_mod.__code__ = secaggplus_mod.__code__.replace(co_qualname="secaggplus_mod")
    asked = Message(RecordDict({RECORD_KEY_CONFIGS: ConfigRecord({})}), dst_node_id=1, message_type="train")
    with pytest.raises(ValueError, match="masked arrays are added up"):  # a message of its server
        thin.client_mod(up)(asked, Context(1, 1, {}, RecordDict(), {}), lambda *_: asked)
    for mods, clients, remedy in (
        ([thin.client_mod(up), dp], 2, ""), ([dp, thin.client_mod(up)], 0, "try mods=[client_mod(uplink), ...]"),
        ([secaggplus_mod, thin.client_mod(up)], 0, "try mods=[secaggplus_mod]"),
    ):  # fmt: skip
        grid = InProcessGrid(walking_app(mods, step), 2)
        replies: list[Message] = []
        grid.between = lambda found, replies=replies: replies.extend(found) or found  # type: ignore[misc]
        strategy = thin.wrap(FedAvg(fraction_evaluate=0.0), up)
        strategy.start(grid, record(plain()), num_rounds=1)
        assert strategy.rounds[0].clients == clients
        if not clients:
            assert remedy in replies[0].error.reason


def test_another_uplink_at_the_client_is_named() -> None:
    grid = InProcessGrid(walking_app([thin.client_mod(thin.Uplink("e3m0"))], step), 2)
    reasons: list[str] = []
    grid.between = lambda found: reasons.extend(one.error.reason for one in found if one.has_error()) or found  # type: ignore[func-returns-value]
    strategy = thin.wrap(FedAvg(fraction_evaluate=0.0), thin.Uplink("top-k", density=0.1))
    strategy.start(grid, record(plain()), num_rounds=1)
    assert "the same Uplink for client_mod and wrap" in reasons[0] and '"density": 0.1' in reasons[0]


@pytest.mark.parametrize(
    "rule", [TrimmedMean(num_bad=2), MultiKrum(num_bad=2), FlagAggregator()], ids=lambda one: one.name
)
def test_a_robust_rule_joins_the_clients_in_the_strategys_place(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.sample", lambda nodes, count: sorted(nodes)[:count])
    up, start = thin.Uplink("float32"), plain()
    found, _ = run(thin.wrap(FedAvg(), up, aggregate=rule), [thin.client_mod(up)], start, rounds=1, nodes=9)
    layout = ArrayLayout.of(start)
    expected = rule(torch.stack([layout.flat(step(node, 1, start)) for node in range(9)]))
    assert torch.equal(layout.flat(found), expected)
    # FedAdam steps on the rule's result
    adam, _ = run(thin.wrap(FedAdam(), up, aggregate=rule), [thin.client_mod(up)], start, rounds=1, nodes=9)
    assert not np.array_equal(adam["a"], found["a"])


def test_a_layout_that_changed_names_the_array() -> None:
    up = thin.Uplink("e3m0")
    code = UpdateCode(up, ArrayLayout.of(plain()))
    with pytest.raises(PayloadError, match=r"array 'b' is .*6.*, expected .*5"):
        code.encode({**plain(), "b": np.zeros(6, np.float32)}, torch.zeros(776), sender=0, version=1, base_version=1)


def test_options_that_cannot_work_are_refused_with_a_remedy_that_works() -> None:
    for make, remedy in (
        (
            lambda: thin.Uplink("top-k", tiers={"phone": 0.1}),
            lambda: thin.Uplink("top-k", density=0.1, tiers={"phone": 0.1}),
        ),
        (lambda: thin.Uplink("e3m0", density=0.1), lambda: thin.Uplink("top-k", density=0.1)),
        (lambda: thin.Uplink(residual_rounds=0), lambda: thin.Uplink(error_feedback=False)),
        (lambda: thin.Downlink("float32"), lambda: thin.wrap(FedAvg(), thin.Uplink(), down=None)),
        (lambda: thin.Downlink("e3m0", keep=0), lambda: thin.Downlink("e3m0", keep=20)),
        (lambda: thin.Uplink(sends="all"), lambda: thin.Uplink(sends="differences")),  # type: ignore[arg-type]
        (lambda: thin.Uplink("e3m1"), lambda: thin.Uplink("e3m0")),
        (
            lambda: thin.wrap(thin.wrap(FedAvg(), thin.Uplink()), thin.Uplink()),
            lambda: thin.wrap(FedAvg(), thin.Uplink()),
        ),
        (lambda: thin.OrthogonalTasks(eps=1.0), lambda: thin.OrthogonalTasks(eps=0.96)),
    ):
        with pytest.raises(ValueError, match="; try "):
            make()
        remedy()
