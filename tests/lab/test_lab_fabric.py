"""A lab with leaves and spines: hashed and planned paths, and a cable that is cut while flows run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.lab import Access, FabricShape, Lab, LabSettings, rank_environment
from thinwire.lab.network_commands import router_address
from thinwire.lab.path_probe import SINK_PORT, PortTransfer, Transfers, probe_paths

ROOT = Path(__file__).parents[2]
RATE = 10e6
SHAPE = FabricShape(leaves=2, spines=4, uplink_bits_per_s=RATE)
PAIRS = [(0, 2), (0, 3), (1, 2), (1, 3)]


def up_rates(lab: Lab, *, seconds: float) -> list[float]:
    """Return the rate of each uplink of leaf 0 over some time, as a share of its limit."""
    before, began_s = lab.cable_bytes(), time.monotonic()
    time.sleep(seconds)
    after, elapsed_s = lab.cable_bytes(), time.monotonic() - began_s
    return [(after[0, spine][0] - before[0, spine][0]) * 8 / elapsed_s / RATE for spine in range(SHAPE.spines)]


def until_rates(lab: Lab, are_enough: Callable[[list[float]], bool]) -> list[float]:
    """Return the first rates that are enough, or the third ones: on a busy machine a sender may stand for a while."""
    for _ in range(3):
        shares = up_rates(lab, seconds=2.0)
        if are_enough(shares):
            break
    return shares


def takes_spine(lab: Lab, transfers: Transfers, transfer: PortTransfer, spine: int) -> bool:
    """Return whether a source port takes a spine; that of spine 2 must keep it while spine 1 is cut off.

    The kernel then divides its range of hashes anew: spines 0 and 3, at its ends, keep what they had.
    """
    for is_cut in (False, True) if spine == 2 else (False,):
        if is_cut:
            lab.cut_cable(0, 1)
        ends = {"source": transfer.source, "destination": transfer.destination}
        found = probe_paths(lab, transfers, **ends, ports=[transfer.port])
        if is_cut:
            lab.join_cable(0, 1)
        if found[transfer.port] != spine:
            return False
    return True


def test_planned_source_ports_fill_all_spines_and_a_cut_cable_loses_nothing() -> None:
    with Lab.of(LabSettings.alike(4, Access(), fabric=SHAPE)) as lab:
        transfers = Transfers(lab)
        planned = []
        for number, (source, destination) in enumerate(PAIRS):
            first = 40_000 + 100 * number
            for port in range(first, first + 60):
                if takes_spine(lab, transfers, PortTransfer(source=source, destination=destination, port=port), number):
                    break
            else:
                pytest.fail("60 ports that all miss one of four spines")
            planned.append(PortTransfer(source=source, destination=destination, port=port))
        running = [transfers.send(transfer, seconds=20.0) for transfer in planned]  # longer than what is measured
        time.sleep(1.5)
        shares = until_rates(lab, lambda shares: sum(shares) >= 0.95 * 4)
        assert sum(shares) >= 0.95 * 4, shares
        lab.cut_cable(0, 1)
        time.sleep(2.0)
        left = until_rates(lab, lambda left: left[1] < 0.01 and sum(left) >= 0.9 * 3)
        assert left[1] < 0.01 and sum(left) >= 0.9 * 3, left
        sent = {}
        for transfer, (process, path) in zip(planned, running, strict=True):
            assert process.wait(deadline_s=60) == 0, path.read_text()
            sent[transfer.port] = int(path.read_text())
        received = transfers.received_bytes(2) | transfers.received_bytes(3)
        assert {port: received[port] for port in sent} == sent


PROBE = """
# begins with torch loaded
import json, sys
from thinwire.traffic.source_ports import probe_source_ports
print(json.dumps(probe_source_ports(sys.argv[1], int(sys.argv[2]), source_ports=range(*map(int, sys.argv[3:5])))))
"""


def test_the_spines_that_answer_a_probe_are_those_that_the_bytes_cross() -> None:
    ports = range(41_000, 41_008)
    with Lab.of(LabSettings.alike(4, Access(), fabric=SHAPE)) as lab:
        transfers = Transfers(lab)
        words = [lab.address(0), str(SINK_PORT), str(ports.start), str(ports.stop)]
        output = lab.folder / "probe.json"
        with output.open("wb") as file:
            process = lab.start([sys.executable, "-c", PROBE, *words], host=2, stdout=file, stderr=file)
            assert process.wait(deadline_s=60) == 0, output.read_text()
        answered = json.loads(output.read_text())
        crossed = probe_paths(lab, transfers, source=2, destination=0, ports=ports)
    spine_of = {router_address(spine, is_leaf=False): spine for spine in range(SHAPE.spines)}
    assert {int(port): spine_of[router] for port, router in answered.items()} == crossed


def test_timing_finds_the_same_paths_as_the_spines_that_answer(tmp_path: Path) -> None:
    words = ["traffic", "probe", "--fabric", str(ROOT / "examples/traffic/fabric-2x4.json"), "--port", "29600"]
    probe = [sys.executable, "-m", "thinwire.cli.main", *words, "--source-ports", "20000-20015"]

    def routers(lab: Lab, way: str, number: int) -> dict[tuple[str, str, str], str]:
        out = tmp_path / f"{way}-{number}"
        for one in lab.run([*probe, "--by", way, "--out", str(out)], deadline_s=300):
            if one.exit_code != 0 and ("disturbed the probe" in one.stderr or "every source port" in one.stderr):
                return {}
            assert one.exit_code == 0, one.stderr
        found = {name: json.loads((out / f"{name}.json").read_text())["routers"] for name in ("host-2", "host-3")}
        return {
            (source, destination, port): path
            for source, paths_to in found.items() for destination, paths in paths_to.items()
            for port, path in paths.items()
        }  # fmt: skip

    with Lab.of(LabSettings.alike(4, Access(), fabric=SHAPE)) as lab:
        answered = routers(lab, "time-to-live", 0)
        for number in range(3):  # on a busy machine ports of other paths can be slow in many loads
            timed = routers(lab, "timing", number)
            if len(timed) >= 60:
                break
    assert len(timed) >= 60, "at most a few of 64 are left out, where something else was slow"
    pairs = {(path, answered[ends]) for ends, path in timed.items()}
    assert len(pairs) == len({path for path, _ in pairs}) == len({router for _, router in pairs}) == SHAPE.spines


ALL_REDUCES = """
# begins with torch loaded
import json, os, torch, torch.distributed as dist
def sent():
    lines = open("/proc/net/dev").read().splitlines()
    return {line.split(":")[0].strip(): int(line.split(":")[1].split()[8]) for line in lines[2:]}
dist.init_process_group("gloo")
before, numbers = sent(), torch.ones(250_000)
for _ in range(16):
    dist.all_reduce(numbers)
assert float(numbers[-1]) == 2.0**16
after = sent()
print(json.dumps({name: after[name] - before[name] for name in ("eth0", "eth1")}))
dist.destroy_process_group()
"""


def test_gloo_sends_over_both_rails_and_each_rail_over_its_own_leaf() -> None:
    settings = LabSettings.alike(2, Access(), fabric=FabricShape(leaves=2, spines=2, rails=2))
    with Lab.of(settings) as lab:
        before = lab.cable_bytes()
        outputs = [lab.folder / f"rails-{host}.json" for host in range(2)]
        files = [path.open("wb") for path in outputs]
        command = [sys.executable, "-c", ALL_REDUCES]
        started = [
            lab.start(command, host=host, environment=rank_environment(host, 2, rails=2), stdout=files[host],
                      stderr=files[host])
            for host in range(2)
        ]  # fmt: skip
        for process, path in zip(started, outputs, strict=True):
            assert process.wait(deadline_s=120) == 0, path.read_text()
        after = lab.cable_bytes()
        printed = [path.read_text().splitlines()[-1] for path in outputs]
    for sent in map(json.loads, printed):
        # 16 sums of a million bytes; a ring of two sends each once, half of them over each rail
        assert 0.9 * 8e6 <= sent["eth0"] <= 1.1 * 8e6 and 0.9 * 8e6 <= sent["eth1"] <= 1.1 * 8e6, sent
    # host 0 has its rails on leaves 0 and 1, and host 1 on leaves 1 and 0: all four ends send up
    for leaf in range(2):
        up = sum(after[leaf, spine][0] - before[leaf, spine][0] for spine in range(2))
        assert 0.9 * 16e6 <= up <= 1.15 * 16e6, (leaf, up)


def test_two_rails_are_refused_where_an_access_is_limited() -> None:
    shape = FabricShape(leaves=2, spines=2, rails=2)
    with pytest.raises(ValueError, match="hosts with two rails have no limited access"):
        LabSettings.alike(2, Access(up_bits_per_s=1e6), fabric=shape)


@pytest.mark.parametrize(
    "change", [{"rails": 3}, {"leaves": 0}, {"spines": 33}, {"cut": frozenset({(2, 0)})}, {"uplink_bits_per_s": 1}]
)
def test_a_fabric_out_of_range_is_refused(change: dict) -> None:
    with pytest.raises(ValueError, match=r"out of range|no such cable|no so many rails"):
        FabricShape(**{"leaves": 2, "spines": 4, **change})


def test_the_settings_of_a_fabric_survive_the_way_to_the_daemon() -> None:
    shape = FabricShape(leaves=2, spines=4, uplink_bits_per_s=RATE, cut=frozenset({(1, 3)}), rails=2)
    settings = LabSettings.alike(4, Access(), fabric=shape)
    assert LabSettings.from_json(settings.to_json()) == settings
