"""Joining real processes: torchrun's ways, and every way in which hosts fail to reach each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_processes import DEADLINE_S
from namespaces import ADDRESSES, CABLE, Hosts
from processes import Outcome, Processes, free_port, run, values

from thinwire.errors import ThinwireError
from thinwire.transport.base import Envelope
from thinwire.transport.connect import connect
from thinwire.transport.recording import RecordingTransport
from thinwire.transport.secret import make_secret
from thinwire.transport.streams import ROUNDS
from thinwire.transport.wire import framing

pytestmark = pytest.mark.multiprocess


def swap(transport: RecordingTransport, size: int = 1000, *, rounds: int = 1) -> bool:
    """Exchange messages with the other replica and tell whether they arrived whole."""
    other = 1 - transport.replica
    whole = True
    for round_id in range(rounds):
        envelope = Envelope(stream=ROUNDS, key=(round_id,), payload_bytes=size)
        receive = transport.receive(source=other, envelope=envelope)
        mine = torch.full((size,), transport.replica, dtype=torch.uint8)
        send = transport.send(mine, to=other, envelope=envelope)
        received = receive.wait(deadline_s=30)
        send.wait(deadline_s=30)
        whole = whole and received is not None and bool((received.payload == other).all())
    return whole


def join_and_swap(**options: Any) -> dict[str, Any]:
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    with connect_and_close(**options) as transport:
        return {
            "whole": swap(transport),
            "host": socket.gethostname(),
            "restored": os.environ.get("GLOO_SOCKET_IFNAME") == before,
        }


class connect_and_close:  # noqa: N801 - reads as the verb it is
    def __init__(self, **options: Any) -> None:
        self.transport = connect(**{"deadline_s": 60, **options})

    def __enter__(self) -> RecordingTransport:
        return self.transport

    def __exit__(self, *raised: object) -> None:
        self.transport.close()


def on_two_hosts(hosts: Hosts, function: Any, **options: Any) -> list[Outcome]:
    return run(
        function,
        num_ranks=2,
        place=hosts.place,
        master_address=ADDRESSES[0],
        master_port=29_511,
        arguments=options,
    )


def kernel_bytes(direction: str) -> int:
    return int(Path(f"/sys/class/net/{CABLE}/statistics/{direction}_bytes").read_text())


def join_and_count(size: int, rounds: int) -> dict[str, Any]:
    with connect_and_close() as transport:
        swap(transport, 1)
        dist.barrier()
        kernel = {"sent": kernel_bytes("tx"), "received": kernel_bytes("rx")}
        recorded = {"sent": 0, "received": 0}
        before = {name: transport.log.totals(name).wire_bytes for name in recorded}  # type: ignore[arg-type]
        whole = swap(transport, size, rounds=rounds)
        dist.barrier()
        for name, counter in (("sent", "tx"), ("received", "rx")):
            kernel[name] = kernel_bytes(counter) - kernel[name]
            recorded[name] = transport.log.totals(name).wire_bytes - before[name]  # type: ignore[arg-type]
        return {"whole": whole, "kernel": kernel, "recorded": recorded, "host": socket.gethostname()}


def test_two_hosts_join_over_their_cable_and_the_kernel_counts_what_we_recorded(hosts: Hosts) -> None:
    found = values(on_two_hosts(hosts, join_and_count, size=5_000_011, rounds=4))
    assert [one["host"] for one in found] == ["ada", "bob"]
    for one in found:
        assert one["whole"]
        for direction in ("sent", "received"):
            recorded, kernel = one["recorded"][direction], one["kernel"][direction]
            assert recorded == 4 * (5_000_011 + 56)
            # TCP and IP headers and acknowledgements, gloo's own preambles, the barriers.
            assert recorded <= kernel <= recorded * 1.05 + 65_536


def test_the_interface_may_be_named(hosts: Hosts) -> None:
    for one in values(on_two_hosts(hosts, join_and_swap, interface=CABLE)):
        assert one["whole"] and one["restored"]


def test_a_loopback_address_shown_to_another_host_is_refused_on_both_with_the_remedy(hosts: Hosts) -> None:
    for outcome in on_two_hosts(hosts, join_and_swap, interface="lo"):
        assert outcome.error == "ConnectError" and outcome.returncode == 1
        # Both show loopback; the first rank that finds fault finds the other's.
        assert "replica 1 (rank 1) on host bob advertises 127.0.0.1, which host ada cannot reach" in outcome.text
        assert "pass interface=... or address=..." in outcome.text


def join_from_a_side_address() -> dict[str, Any]:
    return join_and_swap(**({"address": "10.88.0.1"} if os.environ["RANK"] == "0" else {}))


@pytest.mark.parametrize(
    ("route", "reason"),
    [("", "there is no route to it"), ("unreachable", "there is no route to it"), ("dark", "timed out")],
)
def test_an_address_the_other_host_has_no_way_to_is_refused_with_both_ends(
    hosts: Hosts, route: str, reason: str
) -> None:
    hosts.on(0, "ip", "link", "add", "tw-side", "type", "veth", "peer", "name", "tw-other")
    hosts.on(0, "ip", "address", "add", "10.88.0.1/24", "dev", "tw-side")
    for interface in ("tw-side", "tw-other"):
        hosts.on(0, "ip", "link", "set", interface, "up")
    if route == "unreachable":
        hosts.on(1, "ip", "route", "add", "unreachable", "10.88.0.0/24")
    if route == "dark":  # packets leave for a neighbour that does not exist, as behind a firewall that drops them
        hosts.on(1, "ip", "route", "add", "10.88.0.0/24", "via", "10.77.0.9")
        hosts.on(1, "ip", "neighbour", "add", "10.77.0.9", "lladdr", "02:00:00:00:00:09", "dev", CABLE)
    for outcome in on_two_hosts(hosts, join_from_a_side_address):
        assert outcome.error == "ConnectError"
        assert "replica 1 (rank 1) on host bob cannot reach replica 0 (rank 0) on host ada at 10.88.0.1" in outcome.text
        assert reason in outcome.text and "firewall" in outcome.text


def join_with_address_of_own_interface() -> dict[str, Any]:
    return join_and_swap(interface="lo")


def test_processes_of_one_host_may_meet_on_loopback() -> None:
    assert all(one["whole"] and one["restored"] for one in values(run(join_with_address_of_own_interface, num_ranks=2)))


def join_quickly(deadline_s: float) -> None:
    connect(deadline_s=deadline_s)


def test_the_replicas_that_never_come_are_named_by_all_that_came() -> None:
    with Processes(join_quickly, num_ranks=4, ranks=[0, 2], arguments={"deadline_s": 3.0}) as processes:
        for outcome in processes.join():
            assert outcome.error == "ConnectError"
            assert "rank 1 (replica 1), rank 3 (replica 3) did not come" in outcome.text, outcome.text
            assert "4 ranks are expected" in outcome.text


def test_a_first_rank_that_never_comes_is_named() -> None:
    with Processes(join_quickly, num_ranks=2, ranks=[1], arguments={"deadline_s": 1.5}) as processes:
        (outcome,) = processes.join()
        assert outcome.error == "ConnectError"
        assert f"127.0.0.1:{processes.master_port} (MASTER_ADDR, MASTER_PORT) did not answer" in outcome.text
        assert "rank 0" in outcome.text


def test_a_port_in_use_is_named_with_the_remedy() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with Processes(
            join_quickly, num_ranks=2, ranks=[0], arguments={"deadline_s": 20.0}, master_port=port
        ) as processes:
            (outcome,) = processes.join(deadline_s=15)
    assert outcome.error == "ConnectError"
    assert f"port {port} is in use" in outcome.text and "--master-port" in outcome.text


def disagree_on_ranks() -> None:
    connect(ranks_per_replica=2 if os.environ["RANK"] == "0" else 1, deadline_s=30)


def test_ranks_that_disagree_on_the_size_of_a_replica_are_refused() -> None:
    for outcome in run(disagree_on_ranks, num_ranks=2):
        assert outcome.error == "ConnectError" and "ranks_per_replica" in outcome.text


def use_the_groups_of_the_user() -> dict[str, Any]:
    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    total = torch.ones(1)
    with connect_and_close(interface="lo") as transport:
        whole = swap(transport)
    dist.all_reduce(total)  # closing the transport leaves the user's group alone
    dist.destroy_process_group()
    return {"whole": whole, "total": float(total)}


def test_a_default_group_that_exists_is_used_and_outlives_the_transport() -> None:
    assert values(run(use_the_groups_of_the_user, num_ranks=2)) == [{"whole": True, "total": 2.0}] * 2


def join_twice() -> list[bool]:
    whole = []
    for _ in range(2):
        with connect_and_close() as transport:
            whole.append(swap(transport))
            dist.barrier()
    return whole


def test_a_process_may_join_close_and_join_again() -> None:
    assert values(run(join_twice, num_ranks=2)) == [[True, True]] * 2


def test_torchrun_joins_the_ranks_whose_store_its_agent_serves(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    here = str(Path(__file__).parent)
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {here!r})\n"
        "from test_connect import join_and_swap\n"
        "assert os.environ['TORCHELASTIC_USE_AGENT_STORE'] == 'True'\n"
        "assert join_and_swap()['whole']\n"
        "os.write(1, b'joined %s\\n' % os.environ['RANK'].encode())\n"  # whole, beside the other rank's
    )
    for standalone in ([], ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *standalone]
        if not standalone:
            command.append(f"--master-port={free_port()}")
        done = subprocess.run(
            [*command, str(script)],
            check=False,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env=_without_torchrun(),
        )
        assert done.returncode == 0, done.stderr
        assert sorted(line for line in done.stdout.splitlines() if "joined" in line) == ["joined 0", "joined 1"]


def _without_torchrun() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {**{k: v for k, v in os.environ.items() if k not in names}, "OMP_NUM_THREADS": "1"}


def speak_another_version(secret: str) -> list[str]:
    """Connect and exchange, where rank 1 speaks a later version of the format."""
    if os.environ["RANK"] == "1":
        framing.FORMAT_VERSION = 9  # type: ignore[misc]
    texts = []
    try:
        with connect_and_close(secret=Path(secret)) as transport:
            swap(transport)
    except ThinwireError as error:
        texts.append(str(error))
    return texts


def test_hosts_with_different_versions_both_say_so(tmp_path: Path) -> None:
    make_secret(tmp_path / "secret")
    low, high = values(run(speak_another_version, num_ranks=2, arguments={"secret": str(tmp_path / "secret")}))
    for texts in (low, high):
        assert "sent frames of version 2, and this host reads 9; run the same thinwire on all hosts" in texts[0]
