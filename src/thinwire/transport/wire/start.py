"""The start of a run of a fixed set of replicas: all of them are waited for, and who does not come is named."""

from __future__ import annotations

import time
from collections.abc import Mapping

from thinwire.errors import ConnectError
from thinwire.transport.addresses import Address
from thinwire.transport.wire.io_loop import WireLoop

# One failed handshake may be a connection that broke at the wrong moment.
_HANDSHAKES = 2


def wait_for_all(loop: WireLoop, addresses: Mapping[int, Address], *, replica: int, deadline_s: float) -> None:
    """Wait until all replicas that are being dialled have answered.

    Args:
        loop: Which dials them.
        addresses: By replica.
        replica: This one.
        deadline_s: Seconds to wait.

    Raises:
        ConnectError: A replica did not answer in time, or one end did not prove to have the secret.
    """
    end = time.monotonic() + deadline_s
    problems: dict[int, str] = {}
    failed_handshakes = dict.fromkeys(addresses, 0)

    def no_way(peer: int, problem: str) -> ConnectError:
        address = addresses[peer]
        return ConnectError(
            f"replica {replica} could not connect to replica {peer} at {address.host}, port {address.port}: {problem}; "
            f"see its log"
        )

    with loop.changed:
        while missing := [peer for peer in addresses if not loop.links[peer].is_up]:
            left_s = end - time.monotonic()
            for peer in missing:
                problem, is_mistrusted = loop.problems.pop(peer, ("", False))
                problems[peer] = problem or problems.get(peer, f"it did not answer within {deadline_s:g} s")
                failed_handshakes[peer] += is_mistrusted
                if loop.links[peer].is_over:
                    raise no_way(peer, f"it {loop.links[peer].reason}")
                if left_s <= 0 or failed_handshakes[peer] >= _HANDSHAKES:
                    raise no_way(peer, problems[peer])
            loop.changed.wait(min(left_s, 0.2))
