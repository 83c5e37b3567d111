"""From a lab's settings to the words of `ip`, `bridge` and `tc`."""

from __future__ import annotations

import re
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.lab import network_commands as commands
from thinwire.lab import rank_environment
from thinwire.lab.relay import host_of
from thinwire.lab.settings import MAX_HOSTS, Access, LabSettings, Link, Pair

HOSTS = st.integers(0, MAX_HOSTS - 1)


def lab(
    *, hosts: int = 3, up: float | None = None, link: Link | None = None, links: dict[Pair, Link] | None = None
) -> LabSettings:
    access = Access(up_bits_per_s=up, down_bits_per_s=up)
    own = MappingProxyType(links or {})
    return LabSettings(accesses=(access,) * hosts, link=link or Link(), links=own)


def classes(lines: list[str]) -> dict[str, tuple[float, float]]:
    """Return what each class is promised and may have at most."""
    found = {}
    for line in lines:
        match = re.search(r"classid (\S+) htb rate (\d+)bit ceil (\d+)bit", line)
        if match:
            found[match[1]] = (float(match[2]), float(match[3]))
    return found


@given(HOSTS, HOSTS)
def test_no_two_hosts_share_an_address_a_name_or_a_port(host: int, other: int) -> None:
    for name in (
        commands.address_of,
        commands.hardware_address_of,
        commands.name_of,
        commands.port_of,
        commands.tap_of,
    ):
        assert (name(host) == name(other)) is (host == other)
        assert name is commands.address_of or len(name(host)) < 18
    assert len(commands.port_of(host)) < 16 and len(commands.tap_of(host)) < 16, "the kernel's limit"
    assert host_of(bytes.fromhex(commands.hardware_address_of(host).replace(":", ""))) == host


@pytest.mark.parametrize("address", [b"\xff" * 6, b"\x33\x33\x00\x00\x00\x01", b"", b"\x02\x74\x77\x01\x00\x00"])
def test_an_address_that_is_no_hosts_is_nobodys(address: bytes) -> None:
    assert host_of(address) is None


def test_every_host_knows_the_names_of_all() -> None:
    lines = commands.hosts_file(3).splitlines()
    assert lines[0] == "127.0.0.1 localhost"
    for host in range(3):
        assert f"10.77.0.{host + 1} host-{host}" in lines
        assert f"::ffff:10.77.0.{host + 1} host-{host}" in lines


def test_a_host_knows_all_its_neighbours_and_not_itself() -> None:
    neighbours = [line for line in commands.host_lines(lab(), 1) if line.startswith("neighbour")]
    assert len(neighbours) == 2 and all("nud permanent" in line for line in neighbours)
    assert not any(commands.address_of(1) in line for line in neighbours)


def test_without_limits_nothing_is_shaped() -> None:
    assert commands.upload_lines(lab(), 0, has_netem=False) == []
    assert commands.upload_lines(lab(), 0, has_netem=True) == []
    assert commands.download_lines(lab(), 0) == []
    assert commands.segment_lines(lab(), 0) == ["link set eth0 gso_max_segs 65535"]


@given(st.floats(8_000, 32e9))
def test_a_bucket_holds_two_frames_at_least_and_4_ms_of_the_rate_else(rate: float) -> None:
    (line,) = commands.upload_lines(lab(up=rate), 0, has_netem=False)
    match = re.fullmatch(r"qdisc add dev eth0 root handle 1: tbf rate (\d+)bit burst (\d+) limit (\d+)", line)
    assert match
    set_rate, burst, limit = map(int, match.groups())
    assert abs(set_rate - rate) <= 1
    assert burst == max(2 * 1514, round(rate / 8 * 0.004))
    assert limit >= 32 * 1514 and limit >= burst
    assert commands.segment_lines(lab(up=rate), 0) == ["link set eth0 gso_max_segs 1"]


@given(st.none() | st.floats(8_000, 32e9), st.lists(st.none() | st.floats(8_000, 32e9), min_size=1, max_size=8))
def test_promises_add_up_to_no_more_than_the_access_and_nobody_has_more_than_his_own(
    access: float | None, rates: list[float | None]
) -> None:
    links = {(0, other): Link(rate_bits_per_s=rate) for other, rate in enumerate(rates, start=1)}
    settings = lab(hosts=len(rates) + 1, up=access, links=links)
    found = classes(commands.upload_lines(settings, 0, has_netem=False))
    if not found:
        assert all(rate is None for rate in rates)
        return
    whole = found.pop("1:1")
    assert whole[0] == whole[1] == round(access or 32e9)
    assert sum(promised for promised, _ in found.values()) <= whole[0] + len(found)
    for name, (promised, most) in found.items():
        own = rates[int(name[2:], 16) - 0x10 - 1] if name != "1:2" else None
        assert most == round(min(own or whole[0], access or 32e9)) and 1 <= promised <= most + 1


def test_a_links_class_is_chosen_by_its_destination() -> None:
    lines = commands.upload_lines(lab(links={(0, 2): Link(rate_bits_per_s=1e6)}), 0, has_netem=False)
    filters = [line for line in lines if line.startswith("filter")]
    assert len(filters) == 1 and "match ip dst 10.77.0.3/32 flowid 1:12" in filters[0]
    assert commands.upload_lines(lab(links={(0, 2): Link(rate_bits_per_s=1e6)}), 1, has_netem=False) == []


@pytest.mark.parametrize("has_netem", [False, True])
def test_a_cut_link_ends_in_a_black_hole(has_netem: bool) -> None:
    for settings, count in ((lab(links={(0, 2): Link(is_cut=True)}), 1), (lab(link=Link(is_cut=True)), 2)):
        lines = commands.upload_lines(settings, 0, has_netem=has_netem)
        assert sum("blackhole" in line for line in lines) == count


def test_a_host_whose_cable_is_pulled_is_nowhere_on_the_switch() -> None:
    settings = lab().with_access(1, Access(is_cut=True))
    assert commands.attachment_lines(settings, 1) == ["link set host1 nomaster"]
    assert commands.table_lines(settings, 1) == []
    assert commands.attachment_lines(settings, 0) == ["link set host0 master switch"]
    assert commands.table_lines(settings, 0) == ["fdb replace 02:74:77:00:00:00 dev host0 master static"]


def test_delays_are_the_kernels_where_it_has_netem_and_nobodys_else() -> None:
    link = Link(latency_s=0.04, jitter_s=0.005, loss=0.001)
    lines = commands.upload_lines(lab(link=link), 0, has_netem=True)
    assert any("netem limit 100000 delay 40000us 5000us loss 0.1%" in line for line in lines)
    assert commands.upload_lines(lab(link=link), 0, has_netem=False) == []
    lossy = commands.upload_lines(lab(link=Link(loss=0.5)), 0, has_netem=True)
    assert any(line.endswith("netem limit 100000 loss 50%") for line in lossy)


def test_with_netem_a_link_without_delay_among_delayed_ones_stays_without() -> None:
    settings = lab(link=Link(latency_s=0.04), links={(0, 1): Link()})
    lines = commands.upload_lines(settings, 0, has_netem=True)
    assert [line for line in lines if "parent 1:11" in line and "netem" in line] == []
    assert [line for line in lines if "parent 1:2 " in line and "netem" in line]


def test_a_host_finds_its_rank_and_the_meeting_point_in_its_environment() -> None:
    found = rank_environment(1, 3, port=29_501)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("1", "3", commands.address_of(0))
    assert (found["PET_NODE_RANK"], found["PET_NNODES"]) == ("1", "3")
    assert found["MASTER_PORT"] == found["PET_MASTER_PORT"] == "29501"
    assert found["GLOO_SOCKET_IFNAME"] == commands.INTERFACE
