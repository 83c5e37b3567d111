"""Devices on which tensors travel in a process group."""

from __future__ import annotations

import pytest
import torch

from thinwire.transport.group_peers import carrier_of


@pytest.mark.parametrize(
    ("backends", "device", "carrier"),
    [
        ("cpu:gloo,cuda:gloo", "cuda", "cpu"),
        ("cpu:gloo", "cuda", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu", None),
        ("cpu:gloo,cuda:nccl", "cuda", None),
        ("cpu:gloo,cuda:nccl", "cpu", None),
        ("cuda:nccl", "cuda", None),
        ("cuda:nccl", "cpu", "cuda"),
        ("cpu:mpi,cuda:mpi", "cuda", None),
    ],
)
def test_tensors_travel_where_a_backend_takes_them(backends: str, device: str, carrier: str | None) -> None:
    wanted = None if carrier is None else torch.device(carrier)
    assert carrier_of(backends, torch.device(device)) == wanted
