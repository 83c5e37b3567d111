"""The address under which this host's replicas and its coordinator are reached by others."""

from __future__ import annotations

import ipaddress

from thinwire.errors import ConnectError
from thinwire.transport.addresses import address_of, address_towards, local_addresses

# Any address on the far side of the default route does: nothing is sent to it.
_FAR = "192.0.2.1"


def own_address(*, address: str | None, interface: str | None) -> str:
    """Return this host's address: the one that was named, that of the default route, or any that is not its own.

    Args:
        address: What the user named.
        interface: Or this.

    Returns:
        An IPv4 address; 127.0.0.1 where this host has no other.
    """
    if address is not None:
        return address
    if interface is not None:
        return address_of(interface)
    try:
        found = address_towards(_FAR)
        if not ipaddress.IPv4Address(found).is_loopback:
            return found
    except (ConnectError, OSError):
        pass
    for addresses in local_addresses().values():
        for one in addresses:
            if not ipaddress.IPv4Address(one).is_loopback:
                return one
    return "127.0.0.1"
