"""`thinwire store`: serves one host's part of a store that outlives the loss of a minority of its hosts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.cli.argument_parsing import command, parse_options
from thinwire.cli.output import log
from thinwire.options import option
from thinwire.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Serve this host's part of a store, for runs that have no bucket and no host that must stay.

    Three hosts that run this hold the run's journal together, and any one of them may be lost for good; five outlive
    the loss of two. Members name all of them: --via hosts://A:7700,B:7700,C:7700. A host that lost its folder must
    not come back under its old address: it would have forgotten what it promised.
    """

    secret: Path
    """File of the run's secret; make it with thinwire secret FILE."""
    folder: Path
    """Folder for what is kept; made where there is none."""
    address: str = "::"
    """IP address to listen on; :: is all."""
    port: int = option(7700, least=0, most=65535)
    """Port to listen on; 0 takes a free one."""
    most_bytes: str = "64GB"
    """Most bytes that large blobs may take on the disk."""


@command("store")
def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire store --help`.

    Returns:
        0 after SIGINT or SIGTERM, 1 for an error while running, 2 for wrong options.
    """
    options = parse_options(StoreOptions, arguments, prog="thinwire store", basic="secret folder port")
    most_bytes = round(parse_bytes(options.most_bytes))
    from thinwire.transport.secret import need_pyzmq, read_secret

    need_pyzmq()
    secret = read_secret(options.secret)
    from thinwire.carriers.host_store import HostStore

    store = HostStore(
        secret=secret, folder=options.folder, address=options.address, port=options.port, most_bytes=most_bytes,
        say=lambda text: log(text, command="store"),
    )  # fmt: skip
    has_ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: has_ended.set())
    print(f"this host's part of the store is at port {store.port}, kept in {options.folder}", flush=True)
    try:
        store.serve(until=has_ended.is_set)
    finally:
        store.close()
    return 0
