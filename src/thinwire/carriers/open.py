"""Addresses of stores, `s3://bucket/prefix#SECRET`, and the carriers that they open."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from thinwire.carriers.base import Carrier
from thinwire.carriers.bucket import BucketCarrier
from thinwire.carriers.folder import FolderCarrier
from thinwire.carriers.memory import MemoryCarrier, MemoryStore
from thinwire.carriers.sealed import SealedCarrier
from thinwire.errors import refusal
from thinwire.transport.addresses import read_host_port
from thinwire.transport.secret import SECRET_BYTES, Secret

_ADDRESS = re.compile(r"(?P<place>(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>[^#\s]*))(?:#(?P<secret>[A-Za-z2-7]*))?")
_STORES: dict[str, MemoryStore] = {}  # `memory://NAME` is the same store in the whole process


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrierAddress:
    """A store and the secret of the run in it.

    Example:
        >>> address = CarrierAddress(place="s3://bucket/run", secret=Secret(key=bytes(32)))
        >>> address, read_address(address.text()) == address, address.text() == "s3://bucket/run#" + 52 * "a"
        (CarrierAddress(place='s3://bucket/run'), True, True)
    """

    place: str
    secret: Secret | None = field(default=None, repr=False)

    def text(self) -> str:
        """Return the whole address. Treat it as a secret: anyone who has it can join and decrypt the traffic."""
        if self.secret is None:
            return self.place
        return f"{self.place}#{base64.b32encode(self.secret.key).decode().rstrip('=').lower()}"


def read_address(text: str) -> CarrierAddress:
    """Parse an address; the secret may be missing.

    `s3://bucket/prefix#SECRET`, `file:///folder#SECRET`, `hosts://a:7700,b:7700,c:7700#SECRET`, `memory://name#SECRET`.

    Raises:
        ValueError: It is malformed, or holds credentials, which have no place in an address.
    """
    found = _ADDRESS.fullmatch(text.strip())
    place = text.partition("#")[0]
    if "@" in place.partition("://")[2].partition("/")[0] and not place.startswith(("abfs", "sftp", "ssh")):
        raise refusal("the address holds credentials", got=f"{place.partition('://')[0]}://...@...",
                      allowed="an address without them", remedy="the store's own variables")  # fmt: skip
    if "?" in place:
        raise refusal("the address holds a query, in which credentials may be", got=place.partition("?")[0] + "?...",
                      allowed="an address without one", remedy="the store's own variables")  # fmt: skip
    if found is None or (found["scheme"] not in ("memory", "file") and not found["rest"]):
        raise refusal("the address of the store cannot be read", got=repr(place[:60]),
                      allowed="s3://BUCKET/PREFIX#SECRET, gs://, az://, file:///FOLDER, hosts://HOST:PORT,HOST:PORT,...",
                      remedy="the whole address that the first host printed")  # fmt: skip
    if not found["secret"]:
        return CarrierAddress(place=found["place"])
    word = found["secret"]
    try:
        key = base64.b32decode(word.upper() + "=" * (-len(word) % 8))
    except binascii.Error:
        key = b""
    if len(key) != SECRET_BYTES:
        raise refusal("the secret behind # is cut or changed", got=f"{len(word)} letters and digits", allowed="52",
                      remedy="the whole address that the first host printed")  # fmt: skip
    return CarrierAddress(place=found["place"], secret=Secret(key=key))


def open_carrier(
    address: CarrierAddress | str, *, may_create: bool, options: Mapping[str, Any] | None = None,
    requests_per_hour: float = float("inf"),
) -> SealedCarrier:  # fmt: skip
    """Open the sealed carrier of a run.

    Args:
        address: With the run's secret.
        may_create: Whether to begin a run if the store holds none.
        options: Settings of the store's client, such as `region` and `endpoint`; it reads its own variables without.
        requests_per_hour: Budget of this member; see `RequestBudget`.

    Raises:
        ValueError: The address is malformed or has no secret, or the store writes twice what was to be new.
        WrongSecret: The store holds a run with another secret.
        NotThere: It holds none, and none may be created.
        ConnectError: There is no such bucket, or it lies in another region.
        AccessRefused: The store refuses the credentials.
    """
    known = read_address(address) if isinstance(address, str) else address
    if known.secret is None:
        raise refusal("the address has no secret", got=known.place, allowed=f"{known.place}#SECRET",
                      remedy="the whole address that the first host printed")  # fmt: skip
    scheme, _, rest = known.place.partition("://")
    inner: Carrier
    if scheme == "memory":
        inner = MemoryCarrier(_STORES.setdefault(rest, MemoryStore()))
    elif scheme == "file":
        folder = folder_of(known.place)
        if not folder.parent.is_dir():
            raise refusal("the folder's parent does not exist", got=folder.parent, allowed="a folder that exists",
                          remedy=f"mkdir -p {folder.parent}")  # fmt: skip
        inner = FolderCarrier(folder)
    elif scheme == "hosts":
        from thinwire.carriers.hosts import HostsCarrier  # needs pyzmq

        listed, _, place = rest.rstrip("/").partition("/")
        addresses = [read_host_port(one, what="a host of the store") for one in listed.split(",")]
        inner = HostsCarrier(addresses, secret=known.secret, folder=place)
    else:
        inner = BucketCarrier(known.place.rstrip("/"), options=options, requests_per_hour=requests_per_hour)
        inner.check_create_only()
    return SealedCarrier(inner, known.secret, may_create=may_create)


def folder_of(place: str) -> Path:
    """Return the folder of an address `file:///FOLDER`; `%20` is a space."""
    host, _, path = place.partition("://")[2].partition("/")
    folder = Path("/" + unquote(path))
    if host not in ("", "localhost") or path == "":
        raise refusal("the folder's address cannot be read", got=place, allowed="file:///FOLDER, from the root",
                      remedy="file:///shared/run")  # fmt: skip
    return folder
