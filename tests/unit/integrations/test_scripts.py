"""Shares, folders and checkpoints that a replica of an unmodified script gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire.integrations.scripts import ScriptReplica
from thinwire.transport.loopback import LoopbackWorld

datasets = pytest.importorskip("datasets", reason="needs datasets: pip install 'thinwire[hf]'")


def replicas(number: int = 2, **more: Any) -> list[ScriptReplica]:
    options: dict[str, Any] = {"data_split": "auto", "out": Path("runs"), "report": print, **more}
    return [
        ScriptReplica(method=thinwire.methods.diloco, transport=transport, **options)
        for transport in LoopbackWorld(number).transports
    ]


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(7))


@pytest.mark.parametrize(
    ("whole", "sizes"),
    [
        (list(range(7)), (3, 3)),
        (datasets.Dataset.from_dict({"x": list(range(7))}), (3, 3)),
        (datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=2), (4, 4)),
        (Stream(), (4, 3)),
        ({"a": list(range(4)), "b": list(range(6))}, (2, 2)),
    ],
)
def test_shares_are_disjoint_and_of_one_size_where_it_is_known(whole: Any, sizes: tuple[int, int]) -> None:
    shares = [one.share(whole, name="data") for one in replicas()]
    if isinstance(whole, dict):
        assert [{name: len(share) for name, share in own.items()} for own in shares] == [{"a": 2, "b": 3}] * 2
        shares = [own["a"] for own in shares]
    found = [[row["x"] if isinstance(row, dict) else row for row in share] for share in shares]
    assert tuple(map(len, found)) == sizes
    assert not set(found[0]) & set(found[1])


def test_a_share_is_not_shared_again_and_none_leaves_data_alone() -> None:
    one, data = replicas()[0], list(range(6))
    share = one.share(data, name="data")
    assert one.share(share, name="data") is share
    assert replicas(data_split="none")[0].share(data, name="data") is data
    assert replicas(1)[0].share(data, name="data") is data
    with pytest.raises(ValueError, match="fewer examples than there are replicas; got 1"):
        one.share([0], name="data")


def test_an_elastic_replica_gets_all_examples_in_an_order_of_its_own() -> None:
    elastic = ScriptReplica(
        method=thinwire.methods.diloco, transport=None, uri="127.0.0.1:1", begin_with=2, data_split="auto",
        out=Path("runs"), report=print,
    )  # fmt: skip
    found = list(elastic.share(list(range(50)), name="data"))
    assert found != sorted(found) == list(range(50))
    joining = elastic.joining()
    assert (joining["uri"], joining["options"], joining["transport"]) == ("127.0.0.1:1", {"replicas": 2}, None)
    with pytest.raises(ValueError, match=r"would all read this stream alike; got Stream.*--data-split none"):
        elastic.share(Stream(), name="data")


def test_folders_and_checkpoints_are_those_of_the_replica(tmp_path: Path) -> None:
    other = replicas()[1]
    assert other.folder_of("out") == "out/replica-1" == other.folder_of("out/replica-1")
    (tmp_path / "out/replica-1/checkpoint-8").mkdir(parents=True)
    own = str(tmp_path / "out/replica-1/checkpoint-8")
    for given in ("out/checkpoint-8", "out/replica-0/checkpoint-8", "out/replica-1/checkpoint-8"):
        assert other.own_checkpoint(str(tmp_path / given)) == own
    (tmp_path / "step_8/replica-1").mkdir(parents=True)
    assert other.own_checkpoint(tmp_path / "step_8") == str(tmp_path / "step_8/replica-1")
    assert other.own_checkpoint(True) is True
    assert [one.is_for_lead("model") for one in replicas()] == [False, True]
    assert not other.is_for_lead("out/replica-1/model")
