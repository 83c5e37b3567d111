"""The doctor as a whole: what is looked at, in which order, and what is left out after a fault."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from torch.distributed import TCPStore

from thinwire.monitor.doctor.checks import Check, Verdict, ok, skipped, warning, wrong
from thinwire.monitor.doctor.doctor import DoctorConfig, has_passed, run_checks
from thinwire.monitor.doctor.peer import Info
from thinwire.transport.addresses import Address
from thinwire.version import __version__


@pytest.fixture
def port() -> Iterator[int]:
    with closing(socket.create_server(("127.0.0.1", 0), backlog=16)) as server:
        yield server.getsockname()[1]


def by_name(patient: DoctorConfig, **more: object) -> dict[str, Check]:
    checks = list(run_checks(patient, **more))  # type: ignore[arg-type]
    assert len({check.name for check in checks}) == len(checks), "a name stands for one check"
    return {check.name: check for check in checks}


def test_who_answers_is_asked_for_version_and_clock_at_the_address_that_was_reached(port: int) -> None:
    asked = []

    def ask(address: Address) -> Info:
        asked.append(address)
        return Info(version=__version__, unix_s=time.time() + 3 * 3600)

    found = by_name(DoctorConfig(target=f"tcp://localhost:{port}/job"), ask=ask)
    assert asked == [Address(host="127.0.0.1", port=port)]
    assert found["other version"].verdict is Verdict.OK
    assert found["clock"].verdict is Verdict.WARNING
    # the way there and back is part of what is told, and this host may be slow
    told = re.search(r"(\d+):(\d+):(\d+) ahead of ours", found["clock"].found)
    assert told is not None
    hours, minutes, seconds = map(int, told.groups())
    assert abs(hours * 3600 + minutes * 60 + seconds - 3 * 3600) <= 30


def test_nobody_is_asked_where_there_is_no_connection(port: int) -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))

        def ask(address: Address) -> Info:
            raise AssertionError("asked")

        found = by_name(DoctorConfig(target=f"127.0.0.1:{other.getsockname()[1]}"), ask=ask)
    assert found["TCP connection"].verdict is Verdict.WRONG
    for name in ("torch store", "packet size", "other version", "clock"):
        assert found[name].verdict is Verdict.SKIPPED and found[name].found == "there is no connection"


def test_an_open_store_of_torch_is_told_with_how_to_fence_it(port: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    found = by_name(DoctorConfig(target=f"127.0.0.1:{store.port}"))["torch store"]
    assert found.verdict is Verdict.WARNING and "authenticates no one" in found.found
    for word in ("firewall", "--master-addr", "thinwire train --elastic"):
        assert word in found.remedy
    assert store.get("key") == b"value" and store.num_keys() <= 2, "nothing is changed"
    assert by_name(DoctorConfig(target=f"127.0.0.1:{port}", deadline_s=0.5))["torch store"].verdict is Verdict.OK
    elastic = by_name(DoctorConfig(target=f"thinwire://127.0.0.1:{port}/secret"))["torch store"]
    assert elastic.verdict is Verdict.SKIPPED


def test_a_name_that_cannot_be_resolved_leaves_this_host_to_be_looked_at() -> None:
    found = by_name(DoctorConfig(target="no-such-host.invalid:1"))
    assert found["name of the address"].verdict is Verdict.WRONG
    assert "TCP connection" not in found and "own address" in found and "memory" in found


def test_the_address_that_was_asked_for_is_the_one_that_connections_come_from(port: int) -> None:
    found = by_name(DoctorConfig(target=f"127.0.0.1:{port}", interface="lo"))
    assert found["own address"].found.startswith("127.0.0.1 on lo: --interface")
    assert found["TCP connection"].verdict is Verdict.OK


@pytest.mark.parametrize(
    ("patient", "said"),
    [
        (DoctorConfig(interface="lo", address="127.0.0.1"), "give --interface or --address, not both"),
        (DoctorConfig(deadline_s=0.0), "must be above 0 s, got 0"),
        (DoctorConfig(target="host"), "got 'host'"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_looked_at(patient: DoctorConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_checks(patient)


def test_warnings_and_what_was_skipped_are_still_well() -> None:
    fine = [ok("a", "b"), warning("c", "d", remedy="e"), skipped("f", "g")]
    assert has_passed(fine) and has_passed([])
    assert not has_passed([*fine, wrong("h", "i", remedy="j")])
