"""Cost of shaping a link and of reading `TCP_INFO`: programs and getsockopt against pyroute2; see decision 12.

Run as root of a new network namespace, with pyroute2 installed: `unshare -rn python benchmarks/transport/netlink.py`.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import time
from collections.abc import Callable

from thinwire.lab.network_commands import upload_lines
from thinwire.lab.settings import Access, LabSettings, Link
from thinwire.transport.tcp_stats import tcp_info

DEVICE = "eth0"
REMOVE = [f"qdisc replace dev {DEVICE} root pfifo", f"qdisc del dev {DEVICE} root"]


def median_ms(action: Callable[[], object], *, times: int = 30) -> float:
    """Return the median time of an action in milliseconds."""
    taken = []
    for _ in range(times):
        start_s = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start_s)
    return 1e3 * statistics.median(taken)


def batch(tool: str, lines: list[str]) -> None:
    """Run a batch of a program of iproute2."""
    subprocess.run([tool, "-batch", "-"], input="\n".join(lines) + "\n", text=True, check=True, capture_output=True)


def main() -> None:
    """Measure and print."""
    batch("ip", ["link set lo up", f"link add {DEVICE} type veth peer name peer", f"link set {DEVICE} up"])
    one = LabSettings.alike(2, Access(up_bits_per_s=5e6))
    many = LabSettings.alike(9, Access(up_bits_per_s=5e6), link=Link(rate_bits_per_s=1e6))
    for name, settings in (("tbf", one), ("htb of eight links", many)):
        lines = [*REMOVE, *upload_lines(settings, 0, has_netem=False)]
        print(f"tc, {name}: {median_ms(lambda lines=lines: batch('tc', lines)):.2f} ms")

    start_s = time.perf_counter()
    from pyroute2 import DiagSocket, IPRoute, NetlinkError
    from pyroute2.netlink.rtnl.tcmsg import plugins

    print(f"import pyroute2: {1e3 * (time.perf_counter() - start_s):.0f} ms")
    print(f"pyroute2 shapes with: {', '.join(sorted(plugins))}")
    route = IPRoute()
    index = route.link_lookup(ifname=DEVICE)[0]

    def change() -> None:
        with contextlib.suppress(NetlinkError):
            route.tc("del", index=index, root=True)
        route.tc("add", "tbf", index=index, handle=0x10000, rate="5mbit", burst=10_000, limit=100_000)

    print(f"pyroute2, tbf: {median_ms(change):.2f} ms")
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    ends = [socket.create_connection(server.getsockname()) for _ in range(50)]
    ends += [server.accept()[0] for _ in range(50)]
    print(f"getsockopt, one socket: {1e3 * median_ms(lambda: tcp_info(ends[0])):.1f} us")
    print(f"getsockopt, 100 sockets: {median_ms(lambda: [tcp_info(end) for end in ends]):.2f} ms")
    with DiagSocket() as diagnosis:
        diagnosis.bind()
        took_ms = median_ms(lambda: diagnosis.get_sock_stats(family=socket.AF_INET))
    print(f"DiagSocket, all sockets: {took_ms:.1f} ms")


if __name__ == "__main__":
    main()
