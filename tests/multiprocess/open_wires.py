"""Replicas of an open set, each with a transport and a library of its own, on this machine's sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.transport.addresses import Address
from thinwire.transport.blob_store import BlobStore
from thinwire.transport.recording import RecordingRequestTransport
from thinwire.transport.secret import Secret
from thinwire.transport.wire.wire_transport import WireTransport

SECRET = Secret(key=bytes(range(32)))
HOST = "127.0.0.1"
SOON_S = 600.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """One replica."""

    wire: WireTransport
    recording: RecordingRequestTransport
    library: BlobStore

    @property
    def replica(self) -> int:
        return self.wire.replica

    @property
    def address(self) -> Address:
        return Address(host=HOST, port=self.wire.port)

    def meet(self, *others: Site) -> None:
        """Let this one know the others; they must be told of this one too."""
        for other in others:
            assert self.wire.add(other.replica, address=other.address)

    def wait_for(self, *others: Site) -> None:
        wanted = tuple(other.replica for other in others)
        assert self.wire.wait_until_connected(wanted, deadline_s=SOON_S) == wanted

    def close(self) -> None:
        self.library.close()
        self.wire.close()


def site(replica: int, *, secret: Secret = SECRET) -> Site:
    wire = WireTransport(replica=replica, num_replicas=4, secret=secret, address=HOST, is_open=True)
    recording = RecordingRequestTransport(wire)
    return Site(wire=wire, recording=recording, library=BlobStore(recording))


@contextlib.contextmanager
def sites(*replicas: int, joined: bool = True) -> Iterator[list[Site]]:
    """Make replicas with these numbers, by default all connected with all."""
    made = [site(replica) for replica in replicas]
    try:
        if joined:
            for one in made:
                one.meet(*(other for other in made if other is not one))
            for one in made:
                one.wait_for(*(other for other in made if other is not one))
        yield made
    finally:
        for one in made:
            one.close()
