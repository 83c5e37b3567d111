"""The secret of a job: 32 random bytes in a file, and what is derived from them.

Whoever has the file can join the job and claim any replica number in it, and can read what the replicas send each
other. It is made once, copied to each host by a safe way (scp), and readable by its owner alone.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.errors import MissingExtra, refusal

SECRET_BYTES = 32
# Environment variables: address of an elastic run, and file of a job's secret.
JOIN_VARIABLE, SECRET_VARIABLE = "THINWIRE_JOIN", "THINWIRE_SECRET_FILE"
# A relay's access token; of the same form as a secret, but another one.
TOKEN_FILE = "relay.token"
_WORD = "thinwire-secret-v1"
_LINE = re.compile(rf"{_WORD} ([0-9a-f]{{{2 * SECRET_BYTES}}})\n?")
_MAX_FILE_BYTES = 1024
_PEOPLE = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A job's secret; its bytes are in no text that is shown.

    Example:
        >>> Secret(key=bytes(32))
        Secret()
    """

    key: bytes = field(repr=False)

    def derive(self, label: str) -> bytes:
        """Return 32 bytes that belong to a label and tell nothing of the secret (HMAC-SHA256)."""
        return hmac.new(self.key, label.encode(), hashlib.sha256).digest()

    @property
    def fingerprint(self) -> str:
        """A text that two hosts can compare in public to see whether they hold the same secret."""
        return self.derive("thinwire fingerprint v1").hex()[:16]


def make_secret(path: Path) -> Secret:
    """Write a new secret to a file that only its owner can read.

    Raises:
        ValueError: There is such a file, or no such folder.
        OSError: It cannot be written.
    """
    secret = Secret(key=secrets.token_bytes(SECRET_BYTES))
    write_secret(path, secret)
    return secret


def write_secret(path: Path, secret: Secret) -> None:
    """Write a secret to a file that only its owner can read.

    Raises:
        ValueError: There is such a file, or no such folder.
        OSError: It cannot be written.
    """
    try:
        # created with its mode: at no time can others read it
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise refusal(
            "the file exists already, and a secret is not overwritten", got=path, allowed="a new file",
            remedy="another name, or to remove the file on all hosts",
        ) from None  # fmt: skip
    except FileNotFoundError:
        raise refusal("the folder of the secret is missing", got=path.parent, allowed="a folder that exists",
                      remedy=f"mkdir -p {path.parent}") from None  # fmt: skip
    with os.fdopen(file, "w") as opened:
        opened.write(f"{_WORD} {secret.key.hex()}\n")
        opened.flush()
        os.fsync(opened.fileno())


def read_secret(path: Path) -> Secret:
    """Read the secret that `make_secret` wrote, here or on another host.

    Raises:
        ValueError: There is none, others can read it, or it holds no secret; with the remedy.
    """
    try:
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise refusal("the secret is no file", got=path, allowed="a regular file",
                              remedy="thinwire secret FILE")  # fmt: skip
            if status.st_mode & _PEOPLE:
                raise refusal(
                    "others on this host can use the secret",
                    got=f"{path} with mode {stat.S_IMODE(status.st_mode):04o}", allowed="mode 0600 or 0400",
                    remedy=f"chmod 600 {path}",
                )  # fmt: skip
            text = opened.read(_MAX_FILE_BYTES).decode("ascii", errors="replace")
    except FileNotFoundError:
        raise refusal(
            "there is no secret on this host", got=path, allowed="a file that thinwire secret wrote",
            remedy=f"thinwire secret {path}, and copy it to every host",
        ) from None  # fmt: skip
    except OSError as error:
        raise refusal("the secret cannot be read", got=f"{path}: {error.strerror}", allowed="a file of your own",
                      remedy="thinwire secret FILE, or to run as the owner of the file") from None  # fmt: skip
    found = _LINE.fullmatch(text)
    if found is None:
        raise refusal(
            f"{path} holds no secret", got=f"{len(text)} other characters",
            allowed=f"{_WORD!r} and {2 * SECRET_BYTES} hexadecimal digits",
            remedy="to copy the file again, or thinwire secret FILE",
        )  # fmt: skip
    return Secret(key=bytes.fromhex(found[1]))


def need_pyzmq() -> None:
    """Check that what a secret is used with is installed.

    Raises:
        MissingExtra: It is not; with the command that installs it.
    """
    try:
        importlib.import_module("zmq")
    except ModuleNotFoundError:
        raise MissingExtra.of("pyzmq", extra="wire") from None
