"""Commands of `ip` and `tc` for a lab's leaf/spine fabric. Pure: nothing is run here.

All leaves and spines are routers in the switch's own namespace, kept apart by routing tables: a rule picks the table by
the interface that a packet arrives on.

```
 host 0 -- host0 [leaf 0] l0s0 ---- cable ---- s0l0 [spine 0] s0l1 ---- cable ---- l1s0 [leaf 1] host2 -- host 2
                          l0s1 ---- cable ---- s1l0 [spine 1] s1l1 ---- cable ---- l1s1
```

A leaf spreads connections over its spines by the kernel's hash of addresses and ports (`KERNEL_SETTINGS`). A token
bucket limits each end of each cable. Routes leave out a cable that is cut, as a routing protocol would.
"""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.lab.network_commands import address_of, bucket_line, hardware_address_of, port_of
from thinwire.lab.settings import FabricShape, LabSettings

# Files below /proc/sys/net/ipv4, written before any interface exists: later ones take the defaults. Hash policy 3 with
# fields 1+2+4+16+32 hashes addresses, protocol and ports. Policy 1 would do so for packets from a cable, but those of
# another namespace bring a random hash of their socket along, so that a port had no fixed path.
KERNEL_SETTINGS = {
    "ip_forward": "1", "fib_multipath_hash_fields": "55", "fib_multipath_hash_policy": "3",
    "conf/all/rp_filter": "0", "conf/default/rp_filter": "0",
    "conf/all/send_redirects": "0", "conf/default/send_redirects": "0",
    # a packet whose time to live ends is answered by the router at which it arrived, however many end there
    "icmp_errors_use_inbound_ifaddr": "1", "icmp_ratelimit": "0", "icmp_msgs_per_sec": "100000",
    "icmp_msgs_burst": "10000",
}  # fmt: skip
_LEAF_TABLE, _SPINE_TABLE = 1_000, 2_000


def cable_interfaces(leaf: int, spine: int) -> tuple[str, str]:
    """Return the names of a cable's interfaces, at the leaf and at the spine.

    Example:
        >>> cable_interfaces(0, 3)
        ('l0s3', 's3l0')
    """
    return f"l{leaf}s{spine}", f"s{spine}l{leaf}"


def leaf_of(settings: LabSettings, host: int) -> int:
    """Return a host's leaf: the first hosts are on leaf 0, and so on, in equal parts."""
    assert settings.fabric is not None
    return host * settings.fabric.leaves // settings.num_hosts


def port_hardware_address_of(host: int) -> str:
    """Return the link-layer address of a leaf's interface towards a host."""
    return f"02:74:78:00:{host >> 8:02x}:{host & 255:02x}"


def router_address(number: int, *, is_leaf: bool) -> str:
    """Return the address under which a leaf or a spine answers."""
    return f"10.{81 if is_leaf else 80}.0.{number + 1}"


def router_lines(settings: LabSettings) -> list[str]:
    """Return what `ip -batch` makes the cables, rules and fixed routes from, once the hosts' ports exist."""
    fabric = settings.fabric
    assert fabric is not None
    lines = []
    for leaf, spine in _cables(fabric):
        leaf_end, spine_end = cable_interfaces(leaf, spine)
        lines += [
            f"link add {leaf_end} address {_address(leaf, spine, is_leaf=True)} type veth "
            f"peer name {spine_end} address {_address(leaf, spine, is_leaf=False)}",
            f"link set {leaf_end} up",
            f"link set {spine_end} up",
            f"address add {router_address(leaf, is_leaf=True)}/32 dev {leaf_end}",
            f"address add {router_address(spine, is_leaf=False)}/32 dev {spine_end}",
            f"rule add iif {leaf_end} lookup {_LEAF_TABLE + leaf}",
            f"rule add iif {spine_end} lookup {_SPINE_TABLE + spine}",
        ]
    for host in range(settings.num_hosts):
        leaf, port = leaf_of(settings, host), port_of(host)
        lines += [
            f"link set {port} address {port_hardware_address_of(host)}",
            f"neighbour replace {address_of(host)} lladdr {hardware_address_of(host)} dev {port} nud permanent",
            f"address add {router_address(leaf, is_leaf=True)}/32 dev {port}",
            f"route add {address_of(host)}/32 dev {port}",  # for what the routers themselves send
            f"rule add iif {port} lookup {_LEAF_TABLE + leaf}",
            f"route replace {address_of(host)}/32 dev {port} table {_LEAF_TABLE + leaf}",
        ]
        for spine in range(fabric.spines):
            lines.append(_way_down(host, leaf=leaf, spine=spine))
    return lines


def route_lines(settings: LabSettings) -> list[str]:
    """Return what `ip -batch` cuts and joins cables by: their interfaces, and the routes over what is left."""
    fabric = settings.fabric
    assert fabric is not None
    lines = []
    for leaf, spine in _cables(fabric):
        leaf_end, spine_end = cable_interfaces(leaf, spine)
        is_cut = (leaf, spine) in fabric.cut
        lines.append(f"link set {leaf_end} {'down' if is_cut else 'up'}")
        if not is_cut:  # an interface that went down has lost its neighbours
            lines += [
                f"neighbour replace {_spine_address(spine)} lladdr {_address(leaf, spine, is_leaf=False)} "
                f"dev {leaf_end} nud permanent",
                f"neighbour replace {_leaf_address(leaf)} lladdr {_address(leaf, spine, is_leaf=True)} "
                f"dev {spine_end} nud permanent",
            ]
    for leaf in range(fabric.leaves):
        for host in range(settings.num_hosts):
            if (other := leaf_of(settings, host)) == leaf:
                continue
            healthy = [s for s in range(fabric.spines) if fabric.cut.isdisjoint({(leaf, s), (other, s)})]
            hops = (
                f"nexthop via {_spine_address(spine)} dev {cable_interfaces(leaf, spine)[0]} onlink"
                for spine in healthy
            )
            to = f"{address_of(host)}/32"
            table = f"table {_LEAF_TABLE + leaf}"
            lines.append(
                f"route replace {to} {table} {' '.join(hops)}" if healthy else f"route replace blackhole {to} {table}"
            )
    for leaf, spine in _cables(fabric):
        # an interface that went down has lost its routes
        if (leaf, spine) not in fabric.cut:
            for host in range(settings.num_hosts):
                if leaf_of(settings, host) == leaf:
                    lines.append(_way_down(host, leaf=leaf, spine=spine))
    return lines


def cable_bucket_lines(settings: LabSettings, *, before: LabSettings | None = None) -> list[str]:
    """Return what `tc -batch` limits the cables by, each end apart; after a change, only where something changed."""
    fabric = settings.fabric
    assert fabric is not None
    lines = []
    for cable in _cables(fabric):
        is_silent = cable in fabric.silent
        if before is not None and before.fabric is not None and (cable in before.fabric.silent) == is_silent:
            continue
        for end in cable_interfaces(*cable):
            if before is not None:
                # without --force the first error would end it, and there may be nothing to remove
                lines += [f"qdisc replace dev {end} root pfifo", f"qdisc del dev {end} root"]
            if is_silent:
                lines.append(f"qdisc add dev {end} root blackhole")
            elif fabric.uplink_bits_per_s is not None:
                lines.append(bucket_line(end, fabric.uplink_bits_per_s))
    return lines


def neighbour_lines(settings: LabSettings, host: int) -> list[str]:
    """Return what `ip -batch` sets up inside a host: its neighbours are all behind its leaf."""
    return [
        f"neighbour replace {address_of(other)} lladdr {port_hardware_address_of(host)} dev eth0 nud permanent"
        for other in range(settings.num_hosts)
        if other != host
    ]


def _cables(fabric: FabricShape) -> Iterator[tuple[int, int]]:
    return ((leaf, spine) for leaf in range(fabric.leaves) for spine in range(fabric.spines))


def _address(leaf: int, spine: int, *, is_leaf: bool) -> str:
    return f"02:74:79:{int(is_leaf):02x}:{leaf:02x}:{spine:02x}"


def _way_down(host: int, *, leaf: int, spine: int) -> str:
    return (
        f"route replace {address_of(host)}/32 via {_leaf_address(leaf)} dev {cable_interfaces(leaf, spine)[1]} "
        f"onlink table {_SPINE_TABLE + spine}"
    )


def _spine_address(spine: int) -> str:
    return f"10.78.0.{spine + 1}"


def _leaf_address(leaf: int) -> str:
    return f"10.79.0.{leaf + 1}"
