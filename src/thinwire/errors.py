"""Exceptions of the package: a `ValueError` is for a wrong argument, a `ThinwireError` for a fault while running."""

from __future__ import annotations

import errno
import signal
import threading
import warnings
from collections.abc import Iterable
from typing import Literal

# A full disk, a quota and a file size limit; room may come, so what is to be written is kept until then.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_no_room(error: OSError) -> bool:
    """Return whether a write failed for lack of room, so that the same write may succeed later."""
    return error.errno in _NO_ROOM


def refusal(what: str, *, got: object, allowed: object, remedy: str) -> ValueError:
    """Return the error of a wrong argument, in the form that all of them have.

    Example:
        >>> print(refusal("--steps is too small", got=0, allowed="1 or more", remedy="--steps 300"))
        --steps is too small; got 0; allowed 1 or more; try --steps 300
    """
    return ValueError(f"{what}; got {got}; allowed {allowed}; try {remedy}")


def excluded(one: str, other: str, *, why: str, remedy: str) -> ValueError:
    """Return the error of two arguments that do not go together.

    Example:
        >>> print(excluded("--pace", "--elastic", why="parts are fetched", remedy="to leave --pace out"))
        --pace does not go with --elastic: parts are fetched; got both; allowed one of them; try to leave --pace out
    """
    return refusal(f"{one} does not go with {other}: {why}", got="both", allowed="one of them", remedy=remedy)


def unknown_name(kind: str, name: str, names: Iterable[str], *, others: str = "") -> ValueError:
    """Return the error of a name that nothing has, with the nearest of all names; `others` are further allowed forms.

    Example:
        >>> print(unknown_name("codec", "e3m1", ["float32", "e3m0"]))
        unknown codec; got 'e3m1'; allowed float32, e3m0; try e3m0
    """
    import difflib  # this and others like it: `thinwire --help` shows at once what needs none of them

    known = list(names)
    near = difflib.get_close_matches(name.lower().replace("_", "-"), known, n=2, cutoff=0.4) or known[:1]
    allowed = ", ".join([*known, others] if others else known)
    return refusal(f"unknown {kind}", got=repr(name[:60]), allowed=allowed, remedy=" or ".join(near))


# Methods that earlier versions had, and why they went.
REMOVED = {"pier": "its loss was higher than all-reduce's, for 31 times the bytes of streaming-diloco"}


def unknown_method(name: str, names: Iterable[str]) -> ValueError:
    """Return the error of a method's name that nothing has, or no longer.

    Example:
        >>> print(unknown_method("dilco", ["diloco"]))
        unknown method; got 'dilco'; allowed diloco; try diloco
    """
    reason = REMOVED.get(name.replace("_", "-").lower())
    if reason is None:
        return unknown_name("method", name, names)
    return refusal(
        f"the method was removed: {reason} (docs/experiments/candidates.md)", got=repr(name), allowed=", ".join(names),
        remedy="streaming-diloco or all-reduce",
    )  # fmt: skip


class ThinwireError(RuntimeError):
    """Base of every run-time fault of thinwire; its text names the culprit, the round and the remedy."""


class TransportError(ThinwireError):
    """Bytes did not arrive as they should."""


class ConnectError(TransportError):
    """The replicas could not be joined at the start of a run."""


class WrongCoordinator(ConnectError):
    """Another key answers at a coordinator's address than the one that the address names."""


class PeerLost(TransportError):
    """The connection to a replica broke."""


class DeadlineExceeded(TransportError):
    """A replica did not answer before its deadline."""


class NotThere(TransportError):
    """A replica does not have what it was asked for, and will not have it."""


class AccessRefused(TransportError):
    """A store refuses the credentials, as when they have expired; renew them, and the same request may go on."""

    @classmethod
    def of(cls, store: str, *, operation: str) -> AccessRefused:
        """Name the store, not the credentials.

        Example:
            >>> print(AccessRefused.of("s3", operation="put"))
            s3 refuses the credentials for put; renew them, then go on
        """
        return cls(f"{store} refuses the credentials for {operation}; renew them, then go on")


class WrongSecret(ConnectError):
    """A store holds a run that was begun with another secret."""


class Throttled(TransportError):
    """A store asks for fewer requests; `retry_after_s` says when the next one may come."""

    retry_after_s: float = 1.0

    @classmethod
    def of(cls, store: str, *, retry_after_s: float) -> Throttled:
        """Name the store and the pause.

        Example:
            >>> print(Throttled.of("s3", retry_after_s=2.0))
            s3 asks for fewer requests; go on in 2 s, or lower the budget of requests
        """
        error = cls(f"{store} asks for fewer requests; go on in {retry_after_s:g} s, or lower the budget of requests")
        error.retry_after_s = retry_after_s
        return error


class PayloadError(TransportError):
    """A message is corrupt, of another version, or not of the expected size."""


class Expelled(ThinwireError):
    """An elastic run goes on without this replica; it may join again, with a new number."""


class DroppedBadParts(Expelled):
    """An elastic run dropped this replica because its parts were bad, as with NaN; it must fetch the state again."""


class Refused(ThinwireError):
    """An elastic run does not take this replica, and will not on another try either."""


class RunOver(ThinwireError):
    """An elastic run has come to its end; a replica that joins now is too late."""


class CameTooLate(RunOver, SystemExit):
    """A process came after the end of an elastic run: where its script does not catch this, it exits with 0."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = None


class DesyncError(ThinwireError):
    """Replicas that must hold the same global parameters do not."""


class StreamError(ThinwireError):
    """A stream of published weights is another one, of a newer format, or does not verify."""


class StaleWeights(StreamError):
    """Published weights are too many versions behind, or no newer ones come."""


class NonFiniteError(ThinwireError):
    """A replica's payload holds NaN or infinity."""


class DataError(ThinwireError):
    """A corpus cannot be read, or holds too little."""


class CheckpointError(ThinwireError):
    """A checkpoint is missing, incomplete, corrupt, or of another run."""


class MissingExtra(ThinwireError):
    """An optional dependency is not installed; the text holds the command that installs it."""

    @classmethod
    def of(cls, package: str, *, extra: str) -> MissingExtra:
        """Name the package and the command that installs it.

        Example:
            >>> print(MissingExtra.of("datasets", extra="hf"))
            datasets is not installed; install it with: pip install 'thinwire[hf]'
        """
        return cls(f"{package} is not installed; install it with: pip install 'thinwire[{extra}]'")

    @classmethod
    def check(cls, package: str, *, extra: str) -> None:
        """Raise it unless the package is installed, without importing the package, which may take seconds."""
        import importlib.util

        if importlib.util.find_spec(package) is None:
            raise cls.of(package, extra=extra)


class LabError(ThinwireError):
    """A lab cannot be made on this machine, or broke while it ran."""


class WorkerFailed(ThinwireError):
    """A worker process of a local run died."""


class Stopped(ThinwireError):
    """A signal asked a local run to stop; all its workers have ended."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


UntestedPath = Literal["nccl inspector", "nccl ras", "gpu ranks", "gpu over gloo"]

_UNTESTED: dict[UntestedPath, str] = {
    "nccl inspector": "the reader of NCCL Inspector files was made from NCCL's source and has read no file of a real "
    "GPU job; check findings against the files",
    "nccl ras": "the reader of NCCL RAS answers was made from NCCL's source and has read no answer of a real GPU job; "
    "check findings against `ncclras -v`",
    "gpu ranks": "a replica of several ranks on GPUs has never run on a machine with several GPUs; compare a first "
    "run with one rank a replica",
    "gpu over gloo": "tensors of a GPU that travel over gloo, as copies in pinned memory, have never run on a GPU; "
    "compare a first run with one rank",
}
_warned: set[UntestedPath] = set()
_lock = threading.Lock()


class UntestedWarning(RuntimeWarning):
    """A path that has not run on the hardware it is for; filter it by this class once you have checked it."""


def warn_untested(path: UntestedPath, *, stacklevel: int = 2) -> None:
    """Warn that a path has never run on its hardware, once a process."""
    with _lock:
        if path in _warned:
            return
        _warned.add(path)
    warnings.warn(f"thinwire: {_UNTESTED[path]}", UntestedWarning, stacklevel=stacklevel + 1)
