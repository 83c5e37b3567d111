"""`thinwire doctor HOST:PORT` between every two of three hosts, and what it says of faults made on purpose."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire.lab import Lab

pytestmark = pytest.mark.multiprocess
HOSTS, PORT, CLOSED = 3, 4000, 4001
SERVER = f"import socket, time; s = socket.create_server(('', {PORT}), backlog=64); time.sleep(600)"
WATCH = f"import socket; socket.create_connection(('127.0.0.1', {PORT}), timeout=1)"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(hosts=HOSTS) as made:
        for host in range(HOSTS):
            made.start([sys.executable, "-c", SERVER], host=host)
        for host in range(HOSTS):
            while made.start([sys.executable, "-c", WATCH], host=host).wait(deadline_s=30):
                pass
        yield made


def ask(lab: Lab, host: int, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run the doctor on a host; return its exit code and its checks by name."""
    path = lab.folder / f"doctor-{host}"
    command = [
        sys.executable,
        "-m",
        "thinwire.cli.main",
        "doctor",
        "--json",
        *(words if "--deadline" in words else (*words, "--deadline", "2s")),
    ]
    with path.open("wb") as out:
        code = lab.start(command, host=host, stdout=out).wait(deadline_s=90)
    return code, {check["name"]: check for check in json.loads(path.read_text())}


@pytest.mark.parametrize(("source", "by_name"), [(0, False), (1, True), (2, False)])
def test_every_two_hosts_find_each_other_by_address_and_by_name(lab: Lab, source: int, by_name: bool) -> None:
    for other in set(range(HOSTS)) - {source}:
        code, found = ask(lab, source, f"host-{other}:{PORT}" if by_name else f"{lab.address(other)}:{PORT}")
        assert code == 0, found
        assert found["host name"]["verdict"] == "ok", found["host name"]
        assert lab.address(source) in found["own address"]["found"] and "eth0" in found["own address"]["found"]
        for name in ("listening", "MTU", "TCP connection", "packet size"):
            assert found[name]["verdict"] == "ok", found[name]
        assert "(median of 5)" in found["TCP connection"]["found"]


def test_a_closed_port_a_cut_link_and_a_wrong_address_are_told_apart(lab: Lab) -> None:
    code, found = ask(lab, 0, f"{lab.address(1)}:{CLOSED}")
    assert code == 1 and ": refused" in found["TCP connection"]["found"]
    assert f"nothing listens on port {CLOSED}" in found["TCP connection"]["remedy"]

    lab.cut(0, 1)
    try:
        code, found = ask(lab, 0, f"{lab.address(1)}:{PORT}")
        assert code == 1 and found["TCP connection"]["verdict"] == "wrong"
        assert any(word in found["TCP connection"]["found"] for word in ("timed out", "unreachable"))
        assert "link is cut" in found["TCP connection"]["remedy"] or "cable" in found["TCP connection"]["remedy"]
        assert ask(lab, 0, f"{lab.address(2)}:{PORT}")[0] == 0, "the third host is still reached"
    finally:
        lab.mend(0, 1)

    code, found = ask(lab, 0, f"10.77.0.200:{PORT}", "--deadline", "6s")
    assert code == 1 and ": unreachable" in found["TCP connection"]["found"]
    assert "no host has this address" in found["TCP connection"]["remedy"]

    code, found = ask(lab, 0, f"192.0.2.7:{PORT}")
    assert code == 1 and found["own address"]["found"] == "there is no route to 192.0.2.7"

    code, found = ask(lab, 0)
    assert code == 0 and "no default route" in found["own address"]["found"], "a switch of one's own needs none"
    assert "eth0 (10.77.0.1)" in found["own address"]["found"]

    code, found = ask(lab, 0, f"no-such-host.invalid:{PORT}")
    assert code == 1 and found["name of the address"]["verdict"] == "wrong"


def test_a_port_that_listens_on_loopback_alone_is_refused_with_that_remedy(lab: Lab) -> None:
    script = f"import socket, time; s = socket.create_server(('127.0.0.1', {CLOSED})); time.sleep(600)"
    process = lab.start([sys.executable, "-c", script], host=1)
    try:
        code, found = ask(lab, 2, f"{lab.address(1)}:{CLOSED}")
        assert code == 1 and "not on 127.0.0.1 alone" in found["TCP connection"]["remedy"]
    finally:
        process.kill()


def ip(lab: Lab, host: int, *words: str) -> None:
    assert lab.start(["ip", *words], host=host).wait(deadline_s=20) == 0


def test_a_path_that_carries_smaller_packets_than_the_interface_is_told(lab: Lab) -> None:
    try:
        ip(lab, 0, "route", "add", f"{lab.address(1)}/32", "dev", "eth0", "mtu", "lock", "1300")
        code, found = ask(lab, 0, f"{lab.address(1)}:{PORT}")
        assert code == 0 and found["packet size"]["verdict"] == "warning"
        assert "carries packets of 1,300 bytes, the interface eth0 sends 1,500" in found["packet size"]["found"]
    finally:
        ip(lab, 0, "route", "del", f"{lab.address(1)}/32")


def test_packets_that_vanish_because_they_are_large_are_told(lab: Lab) -> None:
    try:
        ip(lab, 2, "link", "set", "eth0", "mtu", "1000")
        _, found = ask(lab, 0, f"{lab.address(2)}:{PORT}")
        assert "packets of 1,500 bytes are lost where small ones arrive" in found["packet size"]["found"]
        _, found = ask(lab, 2, f"{lab.address(0)}:{PORT}")
        assert found["MTU"]["verdict"] == "warning" and "at most 1000 bytes" in found["MTU"]["found"]
    finally:
        ip(lab, 2, "link", "set", "eth0", "mtu", "1500")


def test_the_example_of_the_page_is_what_the_doctor_says(lab: Lab) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "connect-hosts.md").read_text()
    page = " ".join(page.split())
    code, found = ask(lab, 0, f"{lab.address(1)}:{CLOSED}")
    assert code == 1
    for text in (found["TCP connection"]["found"], found["TCP connection"]["remedy"]):
        assert text.replace(str(CLOSED), "29400") in page
