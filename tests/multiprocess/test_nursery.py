"""What tests know of the processes that are forked for them."""

from __future__ import annotations

import json
import socket

from nursery import Child, Nursery


def test_a_child_with_the_number_of_an_earlier_one_has_not_ended() -> None:
    # the kernel gives numbers out again, and a run of all tests uses many
    nursery = Nursery()
    nursery._connection, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with told, nursery._connection:
        for message in ({"pid": 7}, {"pid": 7, "code": 3}):
            told.send(json.dumps(message).encode())
        earlier = Child(nursery, 7)
        assert earlier.poll() == 3
        told.send(json.dumps({"pid": 7}).encode())
        nursery.listen(1.0)
        assert Child(nursery, 7).poll() is None
        told.send(json.dumps({"pid": 7, "code": -9}).encode())
        assert Child(nursery, 7).wait(1.0) == -9
