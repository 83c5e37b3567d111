"""What `connect` refuses before it touches the network, and the tags of messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from thinwire.errors import ConnectError, DataError
from thinwire.events import TransferLog
from thinwire.transport.addresses import RENDEZVOUS_FILE
from thinwire.transport.connect import (
    GLOO_INTERFACE,
    NCCL_INTERFACE,
    TRAFFIC_PLAN_VARIABLE,
    address_at,
    connect,
    keep_nccl_on_loopback,
)
from thinwire.transport.job_environment import REQUIRED, job_place
from thinwire.transport.secret import make_secret


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*REQUIRED, GLOO_INTERFACE, TRAFFIC_PLAN_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_without_an_environment_this_process_is_the_only_replica() -> None:
    log = TransferLog()
    transport = connect(log=log)
    assert (transport.replica, transport.num_replicas) == (0, 1)
    assert transport.log is log
    transport.close()


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize("name", REQUIRED)
def test_a_half_set_environment_is_refused_with_what_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=rf"^{name} must be set where .* is; start with torchrun"):
        connect()


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("RANK", "two", "RANK must be a whole number of at least 0, got 'two'"),
        ("RANK", "-1", "RANK must be a whole number of at least 0, got '-1'"),
        ("RANK", "2", "RANK must be below WORLD_SIZE 2, got 2"),
        ("WORLD_SIZE", "0", "WORLD_SIZE must be a whole number of at least 1, got '0'"),
        ("MASTER_PORT", "70000", "MASTER_PORT must be at most 65535, got 70000"),
        ("MASTER_PORT", "²", "MASTER_PORT must be a whole number"),
        ("MASTER_ADDR", "no-such-host.invalid", "'no-such-host.invalid' cannot be resolved"),
        (GLOO_INTERFACE, "nope0", "there is no interface 'nope0'"),
    ],
)
def test_a_wrong_environment_is_refused_with_its_value(
    name: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=reason):
        connect(deadline_s=1)


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ranks_per_replica": 3}, "ranks_per_replica must divide WORLD_SIZE, got 3 for 2"),
        ({"ranks_per_replica": 0}, "ranks_per_replica must be at least 1, got 0"),
        ({"deadline_s": 0}, "deadline_s must be positive, got 0"),
        ({"interface": "lo", "address": "127.0.0.1"}, "give interface or address, not both"),
        ({"interface": "nope0"}, r"there is no interface 'nope0' on this host; those that exist: .*lo"),
        ({"address": "192.0.2.1"}, r"no interface of this host has the address '192\.0\.2\.1'; those that exist: .*lo"),
        ({"address": "no-such-host.invalid"}, "cannot be resolved"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_value(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        connect(**options)  # type: ignore[arg-type]


def test_ranks_per_replica_needs_other_ranks() -> None:
    with pytest.raises(ValueError, match="ranks_per_replica must divide WORLD_SIZE, got 2 for 1"):
        connect(ranks_per_replica=2)


@pytest.mark.usefixtures("torchrun")
def test_a_meeting_point_that_nobody_serves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConnectError, match=r"meeting point 127\.0\.0\.1:1 .* did not answer within 0\.5 s"):
        connect(deadline_s=0.5)


def test_ranks_that_meet_in_a_file_need_no_port_and_stay_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    # a job's address in the shell that started the launcher is not theirs
    variables = {"RANK": "1", "WORLD_SIZE": "2", RENDEZVOUS_FILE: "/x/store", "MASTER_ADDR": "192.0.2.1"}
    for name, value in {**variables, GLOO_INTERFACE: "eth0"}.items():
        monkeypatch.setenv(name, value)
    place = job_place()
    assert place is not None and (place.rank, place.world_size, place.name) == (1, 2, "/x/store")
    assert address_at(place, interface=None, address=None) == "127.0.0.1"
    with pytest.raises(ConnectError, match=r"rendezvous file /x/store cannot be opened: /x is no folder"):
        connect(deadline_s=1)


def test_nccl_stays_on_loopback_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen, expected in ((None, "lo"), ("eth7", "eth7")):
        monkeypatch.setenv(NCCL_INTERFACE, chosen or "")
        if chosen is None:
            monkeypatch.delenv(NCCL_INTERFACE)
        keep_nccl_on_loopback()
        assert os.environ[NCCL_INTERFACE] == expected


def test_a_traffic_plan_without_a_secret_is_refused(
    torchrun: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="a traffic plan needs a secret"):
        connect(traffic_plan=tmp_path / "plan.json")
    monkeypatch.setenv(TRAFFIC_PLAN_VARIABLE, str(tmp_path / "plan.json"))
    with pytest.raises(ValueError, match="a traffic plan needs a secret"):
        connect()


def test_a_traffic_plan_that_is_none_ends_the_start_at_once(torchrun: None, tmp_path: Path) -> None:
    make_secret(tmp_path / "secret")
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(DataError, match=r"plan\.json is no traffic plan"):
        connect(secret=tmp_path / "secret", traffic_plan=tmp_path / "plan.json", address="127.0.0.1")
