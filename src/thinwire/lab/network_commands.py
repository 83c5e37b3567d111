"""Commands of `ip`, `bridge` and `tc` for a lab's settings. Pure: nothing is run here.

```
 host 0                the switch's own namespace                host 1
 eth0 ---- cable ---- host0 [ bridge "switch" ] host1 ---- cable ---- eth0
   |                    |
   up: on the way out   down: on the way to the host
```

A cable is a pair of virtual Ethernet devices; in a lab with delays, losses or jitter it is a pair of TAP devices with
our relay between them, unless the kernel has `netem`. Rates are token buckets: `tbf` where one limit holds for all a
host sends, `htb` with a class a destination where links have limits of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_network

from thinwire.lab.settings import FabricShape, LabSettings, Link

BRIDGE = "switch"
# Of a host: the first, and the second rail in a fabric that has two.
INTERFACE, _SECOND = "eth0", "eth1"
MTU_BYTES = 1500
FRAME_BYTES = MTU_BYTES + 14
_FIRST_ADDRESS = (10, 77, 0, 1)
_PREFIX_BITS = 24
# A bucket this deep lets an average over 100 ms exceed the rate by 4 % at most; a slow link's must hold two frames.
_BUCKET_S = 0.004
# What home routers and switches hold back before they drop, in time at the link's rate.
_QUEUE_S = 0.2
_FEWEST_QUEUED_FRAMES = 32
_UNLIMITED_BITS_PER_S = 32e9
_NETEM_PACKETS = 100_000
_TAP_QUEUE_PACKETS = 10_000


def address_of(host: int, rail: int = 0) -> str:
    """Return the IPv4 address of a host's interface; each rail is a network.

    Example:
        >>> address_of(0), address_of(2, rail=1)
        ('10.77.0.1', '10.77.1.3')
    """
    first, second, third, number = _FIRST_ADDRESS
    return ".".join(map(str, (first, second, third + rail, number + host)))


def interface_of(rail: int) -> str:
    """Return the name of a host's interface."""
    return _SECOND if rail else INTERFACE


def hardware_address_of(host: int, rail: int = 0) -> str:
    """Return the address of a host's interface on the link layer; its last two bytes are the host's number."""
    return f"02:74:77:{rail:02x}:{host >> 8:02x}:{host & 255:02x}"


def name_of(host: int) -> str:
    """Return a host's name."""
    return f"host-{host}"


def port_of(host: int, rail: int = 0) -> str:
    """Return the name of the switch's interface towards a host's interface."""
    return f"host{host}" + (f"rail{rail}" if rail else "")


def hosts_file(num_hosts: int) -> str:
    """Return the text of every host's `/etc/hosts`."""
    lines = ["127.0.0.1 localhost"]
    for host in range(num_hosts):
        # the second form is what a socket for both versions of IP asks for
        lines += [f"{address_of(host)} {name_of(host)}", f"::ffff:{address_of(host)} {name_of(host)}"]
    return "\n".join(lines) + "\n"


def switch_lines() -> list[str]:
    """Return what `ip -batch` makes the bridge from."""
    # a switch that listened to multicast would report so to every host, and be counted
    bridge = f"link add {BRIDGE} type bridge forward_delay 0 mcast_snooping 0"
    return ["link set lo up", bridge, f"link set {BRIDGE} up"]


def cable_lines(host: int, *, network_path: str, is_relayed: bool) -> list[str]:
    """Return what `ip -batch` joins a host with the switch by, in the switch's namespace.

    Args:
        host: The host.
        network_path: Path of its network namespace.
        is_relayed: Whether the devices are there already, as the relay's TAP devices.
    """
    port = port_of(host)
    if is_relayed:
        made = [f"link set {tap_of(host)} netns {network_path} name {INTERFACE} address {hardware_address_of(host)}"]
        made.append(f"link set {port} txqueuelen {_TAP_QUEUE_PACKETS}")
    else:
        end = f"name {INTERFACE} address {hardware_address_of(host)} netns {network_path}"
        made = [f"link add {port} type veth peer {end}"]
    return [*made, f"link set {port} up"]


def congestion_command(host: int, rail: int, name: str) -> list[str]:
    """Return the command by which a host's connections over a rail use a congestion control, also a restricted one."""
    address = address_of(host, rail)
    network = ip_network(f"{address}/{_PREFIX_BITS}", strict=False)
    words = f"ip route replace {network} dev {interface_of(rail)} proto kernel scope link src {address} congctl"
    return [*words.split(), name]


def second_rail_lines(host: int, *, network_path: str) -> list[str]:
    """Return what `ip -batch` joins a host's second interface by, in the switch's namespace."""
    port = port_of(host, 1)
    end = f"name {_SECOND} address {hardware_address_of(host, 1)} netns {network_path}"
    return [f"link add {port} type veth peer {end}", f"link set {port} up"]


def tap_of(host: int) -> str:
    """Return the name of a host's TAP device before it moves to the host."""
    return f"tap{host}"


def host_lines(settings: LabSettings, host: int) -> list[str]:
    """Return what `ip -batch` sets up inside a host: its address, and its neighbours, which spares ARP requests."""
    lines = [
        "link set lo up",
        f"link set {INTERFACE} txqueuelen {_TAP_QUEUE_PACKETS} up",
        f"address add {address_of(host)}/{_PREFIX_BITS} dev {INTERFACE}",
    ]
    for other in range(settings.num_hosts):
        if other != host:
            neighbour = f"{address_of(other)} lladdr {hardware_address_of(other)}"
            lines.append(f"neighbour replace {neighbour} dev {INTERFACE} nud permanent")
    return lines


def attachment_lines(settings: LabSettings, host: int) -> list[str]:
    """Return what `ip -batch` plugs a host's cable in or pulls it by; a pulled one drops everything in silence."""
    is_cut = settings.accesses[host].is_cut
    if settings.fabric is not None:  # no bridge
        state = "down" if is_cut else "up"
        return [f"link set {port_of(host, rail)} {state}" for rail in range(settings.fabric.rails)]
    return [f"link set {port_of(host)} " + ("nomaster" if is_cut else f"master {BRIDGE}")]


def table_lines(settings: LabSettings, host: int) -> list[str]:
    """Return what `bridge -batch` gives the switch as a host's port, so that it does not flood all others."""
    if settings.accesses[host].is_cut or settings.fabric is not None:
        return []
    return [f"fdb replace {hardware_address_of(host)} dev {port_of(host)} master static"]


def segment_lines(settings: LabSettings, host: int) -> list[str]:
    """Return what `ip -batch` limits the kernel's super-packets by: on a shaped host they would leave in bursts."""
    is_shaped = settings.accesses[host].up_bits_per_s is not None or bool(_own_links(settings, host))
    is_shaped |= settings.fabric is not None
    return [f"link set {INTERFACE} gso_max_segs {1 if is_shaped else 65_535}"]


def upload_lines(settings: LabSettings, host: int, *, has_netem: bool) -> list[str]:
    """Return what `tc -batch` shapes all that a host sends by, in the host; the interface has no discipline before."""
    rate = settings.accesses[host].up_bits_per_s
    links = _own_links(settings, host, has_netem=has_netem)
    usual = _netem(settings.link) if has_netem else ""
    if not links and not usual:
        return [] if rate is None else [bucket_line(INTERFACE, rate)]
    whole = rate or _UNLIMITED_BITS_PER_S
    # a class may always send at the rate it is promised, so the promises must not add up to more than the access
    share = whole / (len(links) + 1)
    lines = [
        f"qdisc add dev {INTERFACE} root handle 1: htb default 2",
        _class(whole, at="1:", name="1:1"),
        _class(whole, at="1:1", name="1:2", promised=share),
        _leaf(whole, at="1:2", handle=2, netem=usual),
    ]
    for other, link in links.items():
        handle = 0x10 + other
        own = min(whole, link.rate_bits_per_s or whole)
        netem = _netem(link) if has_netem else ""
        lines += [
            _class(own, at="1:1", name=f"1:{handle:x}", promised=min(own, share)),
            _blackhole(handle) if link.is_cut else _leaf(own, at=f"1:{handle:x}", handle=handle, netem=netem),
            f"filter add dev {INTERFACE} parent 1: protocol ip prio 1 u32 "
            f"match ip dst {address_of(other)}/32 flowid 1:{handle:x}",
        ]
    return lines


def download_lines(settings: LabSettings, host: int) -> list[str]:
    """Return what `tc -batch` shapes all that a host receives by, at the switch; no discipline is there before."""
    rate = settings.accesses[host].down_bits_per_s
    return [] if rate is None else [bucket_line(port_of(host), rate)]


def _own_links(settings: LabSettings, host: int, *, has_netem: bool = False) -> dict[int, Link]:
    """Return the destinations whose packets a host's queue has to treat apart."""
    found = {}
    for (source, other), link in sorted(settings.links.items()):
        is_apart = link.is_cut or link.rate_bits_per_s is not None or (has_netem and link != settings.link)
        if source == host and is_apart:
            found[other] = link
    if settings.link.is_cut or settings.link.rate_bits_per_s is not None:
        others = (other for other in range(settings.num_hosts) if other != host)
        found = {other: settings.between(host, other) for other in others}
    return found


def bucket_line(interface: str, rate: float) -> str:
    """Return what `tc -batch` limits an interface by, with a token bucket."""
    return (
        f"qdisc add dev {interface} root handle 1: tbf rate {rate:.0f}bit burst {_bucket_bytes(rate)} "
        f"limit {_queue_bytes(rate)}"
    )


def _class(rate: float, *, at: str, name: str, promised: float | None = None) -> str:
    least = rate if promised is None else promised
    return (
        f"class add dev {INTERFACE} parent {at} classid {name} htb rate {least:.0f}bit ceil {rate:.0f}bit "
        f"burst {_bucket_bytes(least)} cburst {_bucket_bytes(rate)} quantum {FRAME_BYTES}"
    )


def _leaf(rate: float, *, at: str, handle: int, netem: str) -> str:
    kind = netem or f"bfifo limit {_queue_bytes(rate)}"
    return f"qdisc add dev {INTERFACE} parent {at} handle {handle:x}: {kind}"


def _blackhole(handle: int) -> str:
    return f"qdisc add dev {INTERFACE} parent 1:{handle:x} blackhole"


def _netem(link: Link) -> str:
    if not link.is_delayed:
        return ""
    delay = f" delay {link.latency_s * 1e6:.0f}us" if link.latency_s else ""
    jitter = f" {link.jitter_s * 1e6:.0f}us" if link.jitter_s else ""
    loss = f" loss {link.loss * 100:g}%" if link.loss else ""
    return f"netem limit {_NETEM_PACKETS}{delay}{jitter}{loss}"


def _bucket_bytes(rate: float) -> int:
    return max(2 * FRAME_BYTES, round(rate / 8 * _BUCKET_S))


def _queue_bytes(rate: float) -> int:
    return max(_FEWEST_QUEUED_FRAMES * FRAME_BYTES, round(rate / 8 * _QUEUE_S))


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


def leaf_of(settings: LabSettings, host: int, rail: int = 0) -> int:
    """Return the leaf of a host's interface: the first hosts are on leaf 0, and so on; a second rail on the next."""
    assert settings.fabric is not None
    return (host * settings.fabric.leaves // settings.num_hosts + rail) % settings.fabric.leaves


def port_hardware_address_of(host: int, rail: int = 0) -> str:
    """Return the link-layer address of a leaf's interface towards a host."""
    return f"02:74:78:{rail:02x}:{host >> 8:02x}:{host & 255:02x}"


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
    for host, rail in _interfaces(settings):
        leaf, port, own = leaf_of(settings, host, rail), port_of(host, rail), address_of(host, rail)
        lines += [
            f"link set {port} address {port_hardware_address_of(host, rail)}",
            f"neighbour replace {own} lladdr {hardware_address_of(host, rail)} dev {port} nud permanent",
            f"address add {router_address(leaf, is_leaf=True)}/32 dev {port}",
            f"route add {own}/32 dev {port}",  # for what the routers themselves send
            f"rule add iif {port} lookup {_LEAF_TABLE + leaf}",
            f"route replace {own}/32 dev {port} table {_LEAF_TABLE + leaf}",
        ]
        for spine in range(fabric.spines):
            lines.append(_way_down(own, leaf=leaf, spine=spine))
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
        for host, rail in _interfaces(settings):
            if (other := leaf_of(settings, host, rail)) == leaf:
                continue
            healthy = [s for s in range(fabric.spines) if fabric.cut.isdisjoint({(leaf, s), (other, s)})]
            hops = (
                f"nexthop via {_spine_address(spine)} dev {cable_interfaces(leaf, spine)[0]} onlink"
                for spine in healthy
            )
            to = f"{address_of(host, rail)}/32"
            table = f"table {_LEAF_TABLE + leaf}"
            lines.append(
                f"route replace {to} {table} {' '.join(hops)}" if healthy else f"route replace blackhole {to} {table}"
            )
    for leaf, spine in _cables(fabric):
        # an interface that went down has lost its routes
        if (leaf, spine) not in fabric.cut:
            for host, rail in _interfaces(settings):
                if leaf_of(settings, host, rail) == leaf:
                    lines.append(_way_down(address_of(host, rail), leaf=leaf, spine=spine))
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
    """Return what `ip -batch` sets up inside a host: a second rail, and its neighbours, all behind its leaves."""
    assert settings.fabric is not None
    lines = []
    for rail in range(settings.fabric.rails):
        interface = interface_of(rail)
        if rail:
            lines += [
                f"link set {interface} txqueuelen {_TAP_QUEUE_PACKETS} gso_max_segs 1 up",
                f"address add {address_of(host, rail)}/{_PREFIX_BITS} dev {interface}",
            ]
        lines += [
            f"neighbour replace {address_of(other, rail)} lladdr {port_hardware_address_of(host, rail)} "
            f"dev {interface} nud permanent"
            for other in range(settings.num_hosts)
            if other != host
        ]
    return lines


def _interfaces(settings: LabSettings) -> Iterator[tuple[int, int]]:
    """Yield the interfaces of all hosts: host and rail."""
    assert settings.fabric is not None
    return ((host, rail) for host in range(settings.num_hosts) for rail in range(settings.fabric.rails))


def _cables(fabric: FabricShape) -> Iterator[tuple[int, int]]:
    return ((leaf, spine) for leaf in range(fabric.leaves) for spine in range(fabric.spines))


def _address(leaf: int, spine: int, *, is_leaf: bool) -> str:
    return f"02:74:79:{int(is_leaf):02x}:{leaf:02x}:{spine:02x}"


def _way_down(address: str, *, leaf: int, spine: int) -> str:
    return (
        f"route replace {address}/32 via {_leaf_address(leaf)} dev {cable_interfaces(leaf, spine)[1]} "
        f"onlink table {_SPINE_TABLE + spine}"
    )


def _spine_address(spine: int) -> str:
    return f"10.78.0.{spine + 1}"


def _leaf_address(leaf: int) -> str:
    return f"10.79.0.{leaf + 1}"
