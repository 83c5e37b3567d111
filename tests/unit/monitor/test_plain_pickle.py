"""Pickles of data are read as Python's own unpickler reads them; one that could run anything is refused."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from thinwire.runlog.plain_pickle import plain_value


def drawn(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(9 if depth else 6)
    if kind == 6:
        return [drawn(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 7:
        return {f"k{n}": drawn(rng, depth - 1) for n in range(rng.randrange(5))}
    if kind == 8:
        return tuple(drawn(rng, depth - 1) for _ in range(rng.randrange(5)))
    return [None, True, rng.randrange(-(2**70), 2**70), rng.randrange(300), rng.random(), "wörd" * rng.randrange(90)][
        kind
    ]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_values_are_those_of_pythons_unpickler(protocol: int) -> None:
    rng = random.Random(protocol)
    for _ in range(100):
        shared = drawn(rng, 2)
        value = {"entries": [drawn(rng, 3), shared, shared], "rank": 3}
        assert plain_value(pickle.dumps(value, protocol=protocol)) == value


def test_a_dump_of_torch_is_read(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        data = torch._C._distributed_c10d._dump_fr_trace()  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()
    assert plain_value(data) == pickle.loads(data)


class Runs:
    def __reduce__(self) -> Any:
        return print, ("was run",)


def test_what_could_run_is_refused_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    for protocol in (2, 4):
        for value in (Runs(), {"entries": [Runs()]}, {1, 2}, b"bytes"):
            with pytest.raises(ValueError, match="none of data"):
                plain_value(pickle.dumps(value, protocol=protocol))
    assert capsys.readouterr().out == ""


def test_damaged_pickles_end_in_one_error() -> None:
    whole, rng = pickle.dumps({"a": [1, 2.5, ("x", None)], "b": {"c": [True] * 3}}, protocol=2), random.Random(0)
    refused = 0
    for _ in range(3000):
        data = bytearray(whole[: rng.randrange(len(whole) + 1)])
        for _ in range(rng.randrange(3)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            plain_value(bytes(data))
        except ValueError:
            refused += 1
    assert refused > 2000


def test_a_key_that_holds_others_is_refused() -> None:
    # its hash would visit each of 2**60 texts
    with pytest.raises(ValueError, match="a key is no text and no number"):
        plain_value(b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"K\x01s.")
