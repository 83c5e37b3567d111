"""Ports and addresses that a wire transport listens on."""

import socket

import pytest
import torch

from thinwire.elastic.invitation import Invitation, read_invitation
from thinwire.errors import ConnectError
from thinwire.transport.addresses import Address
from thinwire.transport.base import Envelope
from thinwire.transport.secret import Secret
from thinwire.transport.streams import CONTROL
from thinwire.transport.wire.wire_transport import WireTransport

SECRET = Secret(key=bytes(32))


@pytest.mark.parametrize(("address", "dialled"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_replicas_listen_on_the_ports_of_a_range_and_reach_each_other(address: str, dialled: str) -> None:
    with socket.create_server((dialled, 0), family=socket.AF_INET6 if ":" in dialled else socket.AF_INET) as taken:
        first = taken.getsockname()[1]
        ports = range(first, min(first + 20, 1 << 16))
        low, high = (
            WireTransport(replica=replica, num_replicas=2, secret=SECRET, address=address, ports=ports)
            for replica in range(2)
        )
        try:
            assert first < low.port < high.port < ports.stop
            high.dial({0: Address(host=dialled, port=low.port)}, deadline_s=20)
            envelope = Envelope(stream=CONTROL, key=(1,), numel=3, payload_bytes=3)
            arriving = low.receive(source=1, envelope=envelope)
            high.send(torch.ones(3, dtype=torch.uint8), to=0, envelope=envelope)
            assert arriving.wait(deadline_s=20).payload.tolist() == [1, 1, 1]
            with pytest.raises(ConnectError, match=f"cannot listen on its address {address}, port {low.port}"):
                WireTransport(replica=0, num_replicas=1, secret=SECRET, address=address, ports=(low.port,))
        finally:
            high.close()
            low.close()


def test_an_invitation_to_an_ipv6_address_is_read_again() -> None:
    invitation = Invitation(host="fd00::1", port=29400, secret=SECRET)
    assert invitation.text() == f"thinwire://[fd00::1]:29400/{52 * 'a'}"
    assert read_invitation(invitation.text()) == invitation
    assert read_invitation("[::1]:5").host == "::1"
