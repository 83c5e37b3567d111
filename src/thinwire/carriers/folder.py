"""Carrier in a folder that all members reach: a local disk, or a file system that several hosts mount."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from thinwire.carriers.base import (
    Carrier,
    CarrierCost,
    CostMeter,
    Entry,
    Limits,
    Payload,
    as_bytes,
    as_tensor,
    check_name,
    check_size,
)
from thinwire.errors import NotThere, TransportError
from thinwire.files import open_regular, sync_folder

# Files that are being written: a name that no blob can have, since none begins with a dot.
_PARTIAL = ".partial-"
# The file server's clock is read from a file that it stamps, and then kept by this host's steady clock.
_CLOCK_S = 60.0


class FolderCarrier(Carrier):
    """Blobs as files: written beside their place, brought to the disk, then linked (only new) or renamed into it.

    Args:
        root: The folder; it is made if its parent exists.

    Raises:
        ValueError: The parent does not exist.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self._root = root
        self._meter = CostMeter()
        self._clock: tuple[float, float] | None = None  # steady clock then, and the store's minus it

    def __repr__(self) -> str:
        return f"file://{self._root}"

    def put(self, name: str, payload: Payload, *, only_new: bool) -> bool:
        data, path = as_bytes(payload), self._root / check_name(name)
        self._meter.count("put", sent_bytes=len(data))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f"{_PARTIAL}{secrets.token_hex(8)}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if only_new:
                os.link(temporary, path)  # unlike a rename it fails if the name exists
            else:
                temporary.replace(path)
        except FileExistsError:
            return False
        except OSError as error:
            raise TransportError(f"cannot write blob {name} to {self._root}: {error.strerror or error}") from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
        return True

    def get(self, name: str, *, most_bytes: int, deadline_s: float) -> torch.Tensor:
        path = self._root / check_name(name)
        try:
            with open_regular(path) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                check_size(name, num_bytes, most_bytes=most_bytes)
                data = file.read(num_bytes)
        except (FileNotFoundError, NotADirectoryError):
            self._meter.count("get")
            raise NotThere(f"there is no blob {name} in {self._root} now") from None
        except OSError as error:
            raise TransportError(f"cannot read blob {name} of {self._root}: {error.strerror or error}") from None
        self._meter.count("get", received_bytes=len(data))
        return as_tensor(data)

    def listing(self, prefix: str, *, after: str = "") -> list[Entry]:
        self._meter.count("list")
        found = []
        for folder, folders, files in os.walk(self._root / check_name(prefix)):
            below = Path(folder).relative_to(self._root).as_posix()
            folders[:] = [one for one in folders if not one.startswith(".")]
            for file in files:
                name = f"{below}/{file}"
                if file.startswith(".") or name <= after:
                    continue
                with contextlib.suppress(OSError):  # deleted since
                    status = (self._root / name).lstat()
                    found.append(Entry(name=name, num_bytes=status.st_size, modified_s=status.st_mtime))
        return sorted(found)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._meter.count("delete")
            with contextlib.suppress(FileNotFoundError):
                (self._root / check_name(name)).unlink()

    def now(self) -> float:
        steady_s = time.monotonic()
        if self._clock is None or steady_s - self._clock[0] > _CLOCK_S:
            stamped = self._root / f"{_PARTIAL}{secrets.token_hex(8)}"
            stamped.touch()
            self._clock = steady_s, stamped.stat().st_mtime - steady_s
            stamped.unlink()
        return steady_s + self._clock[1]

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def limits(self) -> Limits:
        return Limits(least_poll_s=0.02, most_poll_s=0.5)

    def cost(self) -> CarrierCost:
        return self._meter.total()
