"""`thinwire relay`: where hosts of elastic runs meet that can only dial out."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path

from thinwire.cli.argument_parsing import command
from thinwire.cli.output import log
from thinwire.options import option
from thinwire.transport.secret import TOKEN_FILE, Secret, make_secret, read_secret


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """Join hosts that can only dial out: run it on a machine that all of them reach, then thinwire train --elastic
    --relay HOST:PORT on the first host.

    It sees encrypted bytes only, and keeps nothing on disk but the token that opens it.
    """

    port: int = option(29500, least=0, most=65535)
    """Port to listen on; 0 takes a free one."""
    address: str = "::"
    """IP address to listen on; :: is all."""
    token: tuple[Path, ...] = (Path(TOKEN_FILE),)
    """File of the access token, made if it is missing; several for runs that must not meet."""
    most_connections: int = option(256, least=1)
    """Connections at once of the hosts of one token."""


@command("relay", RelayOptions)
def main(options: RelayOptions) -> int:
    """Run the relay until SIGINT or SIGTERM."""
    tokens = [read_secret(path) if path.exists() else make_secret(path) for path in options.token]
    return asyncio.run(_serve(tokens, options))


async def _serve(tokens: list[Secret], options: RelayOptions) -> int:
    from thinwire.transport.relay.server import RelayLimits, RelayServer

    most = options.most_connections
    limits = RelayLimits(most_names=most, most_pairs=most, most_pairs_in_all=max(1024, most))
    server = RelayServer(tokens, limits=limits, say=lambda text: log(text, command="relay"))
    port = await server.start(address=options.address, port=options.port)
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    files = ", ".join(map(str, options.token))
    print(
        f"relay at port {port}; copy its token ({files}) to the first host of the run, then start there:\n"
        f"thinwire train --elastic --relay HOST:{port} --relay-token {options.token[0].name}",
        flush=True,
    )
    await ended.wait()
    await server.close()
    return 0
