"""`thinwire dashboard RUN`: one page that shows a run, live or over, on this machine."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from thinwire.cli.argument_parsing import argument, command
from thinwire.cli.output import log
from thinwire.errors import refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardOptions:
    """Show a run of `thinwire train` on a web page, while it trains or afterwards.

    The command prints the address of the page and serves it until Ctrl-C. It only reads the run's folder.
    """

    run: Path = argument("RUN")
    """Folder of the run."""
    port: int = 7878
    """Port to listen on; 0 chooses a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; an address that other machines can reach needs --token-file."""
    token_file: Path | None = None
    """File with the token that readers of the page need: one line, readable only by its owner."""


@command("dashboard", DashboardOptions)
def main(options: DashboardOptions) -> int:
    """Run `thinwire dashboard`."""
    from thinwire.monitor.dashboard.server import DashboardServer, Feed
    from thinwire.monitor.dashboard.snapshot import RunFollower

    if not 0 <= options.port < 1 << 16:
        raise refusal("--port is no port", got=options.port, allowed="0 to 65535", remedy="--port 7878")
    token = None if options.token_file is None else _token(options.token_file)
    feed = Feed(RunFollower(options.run))
    server = DashboardServer(feed, host=options.host, port=options.port, token=token)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(server.url, flush=True)
    log("Ctrl-C ends the page, and not the run")
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        feed.close()
        server.server_close()
    return 0


def _token(path: Path) -> str:
    """Return the token of a file that only its owner can read."""
    from thinwire.monitor.dashboard.server import check_token

    try:
        with path.open("rb") as file:
            mode, content = path.stat().st_mode, file.read(4096)
    except OSError as error:
        raise refusal("--token-file cannot be read", got=f"{path}: {error.strerror}",
                      allowed="a file that only you can read",
                      remedy=f"(umask 077; openssl rand -hex 24 > {path})") from None  # fmt: skip
    if mode & 0o077:
        raise refusal("--token-file can be read by others", got=f"{path} with mode {mode & 0o777:04o}",
                      allowed="mode 0600", remedy=f"chmod 600 {path}")  # fmt: skip
    try:
        return check_token(content.decode("ascii"))
    except UnicodeDecodeError:
        raise refusal("--token-file holds other characters than ASCII", got=path, allowed="letters, digits and -_.",
                      remedy=f"(umask 077; openssl rand -hex 24 > {path})") from None  # fmt: skip
