"""One-time invitations of an elastic run: each admits one replica, and says nothing of the job's secret.

An invitation is a key. Its holder proves it to the coordinator as others prove the job's secret, and is sent the secret
once it is admitted. The run folder holds public keys only, so that reading the file invites nobody.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from thinwire.errors import PayloadError, refusal
from thinwire.transport.secret import SECRET_BYTES, Secret

INVITATIONS_FILE = "invitations.txt"
_PUBLIC = re.compile(r"[0-9a-f]{64}")
# Of one run; those that have been used count too.
_MAX_INVITATIONS = 4096
# Heartbeats come once a second; one this long after a request shows that the sender lives.
_BEAT_S = 2.0
# Number of who proves the job's secret itself.
NO_INVITATION = 0


def add_invitation(run_dir: Path, *, public_of: Callable[[Secret], bytes]) -> Secret:
    """Add an invitation to a run's folder on the coordinator's host, and return its key.

    Args:
        run_dir: The folder.
        public_of: Returns the public key with which the holder of a key calls the coordinator.

    Raises:
        ValueError: There are as many as there may be.
    """
    path = run_dir / INVITATIONS_FILE
    num_known = len(read_invitations(path))
    if num_known >= _MAX_INVITATIONS:
        raise refusal(
            "the run has no invitation left", got=num_known, allowed=f"{_MAX_INVITATIONS} of a run",
            remedy="to stop the run, and to go on from another folder with a new secret",
        )  # fmt: skip
    key = Secret(key=secrets.token_bytes(SECRET_BYTES))
    is_cut = num_known > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:  # one write a line: commands at the same time lose none
        file.write(("\n" if is_cut else "") + public_of(key).hex() + "\n")
    return key


def read_invitations(path: Path) -> list[bytes]:
    """Return the public keys of a run's invitations, in the order of their numbers.

    A damaged line, as of a full disk, keeps its number and invites nobody: its place is empty.
    """
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [bytes.fromhex(line) if _PUBLIC.fullmatch(line) else b"" for line in lines[:_MAX_INVITATIONS]]


class InvitedCallers(Mapping[bytes, int]):
    """Invitations' numbers by the public keys with which callers may dial; 0 of the key of the job's secret.

    Args:
        public: The public key that follows from the job's secret.
        path: File of the invitations; None where there are none.
    """

    def __init__(self, public: bytes, path: Path | None) -> None:
        self._path = path
        self._public = public
        self._mark = 0.0, 0
        self._numbers = {public: NO_INVITATION}

    def reload(self) -> None:
        """Read the file again if it has changed."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            status = self._path.stat()
            if self._mark != (status.st_mtime, status.st_size):
                self._mark = status.st_mtime, status.st_size
                found = {key: number for number, key in enumerate(read_invitations(self._path), start=1)}
                self._numbers = found | {self._public: NO_INVITATION}

    def __getitem__(self, key: bytes) -> int:
        return self._numbers[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


class UsedInvitations:
    """Invitations that were used, and the address of each; kept in the journal.

    Example:
        >>> used = UsedInvitations()
        >>> about = dict(is_own_host=False, heard_s=None, now_s=9.0)
        >>> used.refusal(b"a", 1, "192.0.2.1", **about), used.take(1, "192.0.2.1")
        ('', True)
        >>> "was used from 192.0.2.1" in used.refusal(b"b", 1, "192.0.2.9", **about)
        True
    """

    def __init__(self) -> None:
        self.used: dict[int, str] = {}
        self._asked_s: dict[bytes, float] = {}  # by connection, when it first asked for a place that is taken

    def refusal(
        self, token: bytes, invitation: int, origin: str, *, is_own_host: bool, heard_s: float | None, now_s: float
    ) -> str | None:
        """Return why no replica may join; empty where one may, None where the next request will show it.

        Args:
            token: The caller's connection.
            invitation: Number of the invitation that was proven, 0 for none.
            origin: IP address of the caller.
            is_own_host: Whether that is the coordinator's own host.
            heard_s: When a replica of this invitation that takes part was heard last, None where there is none.
            now_s: The time.
        """
        again = "ask whoever runs the first host for another one: thinwire invite FOLDER"
        if invitation == NO_INVITATION:
            return "" if is_own_host else f"this run takes new replicas by invitation only; {again}"
        if heard_s is not None:
            if len(self._asked_s) >= _MAX_INVITATIONS:
                self._asked_s.clear()
            # a process started anew asks before its killed predecessor is missed: one that is alive beats again
            if self.used.get(invitation) == origin and heard_s < self._asked_s.setdefault(token, now_s) + _BEAT_S:
                return None
            return f"a replica has joined by this invitation, which admits one; {again}"
        if self.used.get(invitation, origin) != origin:
            return f"this invitation was used from {self.used[invitation]}, and admits one replica; {again}"
        return ""

    def take(self, invitation: int, origin: str) -> bool:
        """Note that an invitation is used; return whether it was not before."""
        is_new = invitation != NO_INVITATION and invitation not in self.used
        if is_new:
            self.used[invitation] = origin
        return is_new


def check_verb(invitation: int, verb: str) -> None:
    """Refuse commands about the run to who only proved an invitation, which may be a used one.

    Raises:
        PayloadError: Names the command.
    """
    if invitation != NO_INVITATION and verb not in ("status", "spare"):
        raise PayloadError(f"a command {verb[:40]!r} by an invitation, which allows status alone")
