"""Solo worlds of real processes: the replicas exchange, and a library in one of them sees that replica alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run, values
from test_connect import swap

from thinwire.integrations.ray import connect as connect_in_ray
from thinwire.transport.connect import connect
from thinwire.transport.secret import make_secret

pytestmark = pytest.mark.multiprocess
SEEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def join_alone(secret: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {"whole": []}
    for _ in range(2):  # the second time, the environment holds nothing any more
        transport = connect(solo=True, deadline_s=600, secret=Path(secret) if secret else None)
        found["seen"] = {name: os.environ[name] for name in SEEN if name in os.environ}
        found["has_group"] = dist.is_initialized()
        found["place"] = [transport.replica, transport.num_replicas]
        found["whole"].append(swap(transport, 200_000))
        transport.close()
    try:
        connect(deadline_s=600)
    except ValueError as error:
        found["refusal"] = str(error)
    # a script's own lines find a world of this process
    dist.init_process_group("gloo")
    found["own"] = dist.get_world_size()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("has_secret", [False, True])
def test_two_replicas_exchange_while_a_library_sees_one_process(has_secret: bool, tmp_path: Path) -> None:
    arguments = {"secret": ""}
    if has_secret:
        make_secret(tmp_path / "secret")
        arguments["secret"] = str(tmp_path / "secret")
    environment = {"TORCHELASTIC_RUN_ID": "job", "OMPI_COMM_WORLD_RANK": "0"}
    found = values(run(join_alone, num_ranks=2, arguments=arguments, environment=environment))
    assert [one["place"] for one in found] == [[0, 2], [1, 2]]
    for one in found:
        assert one["own"] == 1 and one["seen"] == {} and not one["has_group"] and one["whole"] == [True, True]
        assert "solo=True before" in one["refusal"] and "try connect(solo=True) at every call" in one["refusal"]


def join_by_twos() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    transport = connect(solo=True, ranks_per_replica=2, deadline_s=600)
    dist.init_process_group("gloo")  # a script's own line finds the group that is there
    total = torch.full((1,), float(rank))
    dist.all_reduce(total)  # within the replica
    try:
        dist.init_process_group("gloo", rank=rank, world_size=4)
    except ValueError as error:
        assert "got world_size=4; allowed 2" in str(error) and "delete the line init_process_group" in str(error)
    else:
        raise AssertionError("a world of all replicas was not refused")
    whole = swap(transport)
    seen = {name: os.environ[name] for name in SEEN if name in os.environ}
    transport.close()
    # a library that makes a group of its own meets the same ranks
    dist.init_process_group("gloo")
    again = torch.full((1,), float(rank))
    dist.all_reduce(again)
    dist.destroy_process_group()
    return {"whole": whole, "total": float(total), "again": float(again), "seen": seen, "replica": transport.replica}


def test_a_replica_of_two_ranks_is_the_whole_world_to_its_libraries() -> None:
    found = values(run(join_by_twos, num_ranks=4))
    assert [one["replica"] for one in found] == [0, 0, 1, 1]
    assert [one["total"] for one in found] == [one["again"] for one in found] == [1.0, 1.0, 5.0, 5.0]
    for rank, one in enumerate(found):
        assert one["whole"]
        place = {name: one["seen"][name] for name in SEEN[:4]}
        assert place == {"RANK": str(rank % 2), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    assert found[0]["seen"]["MASTER_PORT"] == found[1]["seen"]["MASTER_PORT"] != found[2]["seen"]["MASTER_PORT"]


def join_too_late() -> list[Any]:
    dist.init_process_group("gloo")
    dist.barrier()  # or the one that is refused first leaves while gloo still connects the other
    found: list[Any] = []
    try:
        connect(solo=True, deadline_s=600)
    except ValueError as error:
        found.append(str(error))
    # the remedy in a worker of Ray, which cannot come first
    transport = connect_in_ray(deadline_s=600)
    found += [dist.is_initialized(), os.environ.get("WORLD_SIZE"), swap(transport)]
    transport.close()
    return found


def test_a_default_group_before_a_solo_world_is_refused_with_the_order_and_replaced_for_ray() -> None:
    for text, *replaced in values(run(join_too_late, num_ranks=2)):
        assert "got a group of 2 ranks" in text and "connect(solo=True) before init_process_group" in text
        assert "in a worker of Ray, thinwire.integrations.ray.connect()" in text
        assert replaced == [False, None, True]
