"""URI of a job: address of its coordinator, the coordinator's public key, and the secret of the job."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from thinwire.errors import refusal
from thinwire.transport.addresses import Address, RelayPlace, host_port
from thinwire.transport.secret import SECRET_BYTES, Secret

_SCHEME = "thinwire://"
_TEXT = re.compile(
    r"(?:thinwire://)?(?:(?P<key>[A-Za-z2-7]+)@)?(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})"
    r"(?:/(?P<secret>[A-Za-z2-7]+))?(?:/relay/(?P<token>[A-Za-z2-7]+))?/?"
)
# A store that all hosts reach. No user information: credentials have no place in an address.
_CARRIER = re.compile(r"(?P<carrier>(?!thinwire://)[a-z][a-z0-9+]*://[^#@\s]*)(?:#(?P<secret>[A-Za-z2-7]+))?")
_NO_NAME = re.compile(r"[^A-Za-z0-9._]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Address of a coordinator, its public key, and the secret of its job.

    Example:
        >>> text = Invitation(host="10.0.0.1", port=29400, secret=Secret(key=bytes(32))).text()
        >>> text == "thinwire://10.0.0.1:29400/" + 52 * "a", read_invitation(text).secret.key == bytes(32)
        (True, True)
        >>> Invitation(host="10.0.0.1", port=1, coordinator_key=bytes(32)).text() == f"thinwire://{52 * 'a'}@10.0.0.1:1"
        True
        >>> Invitation(host="10.0.0.1", port=1, relay_token=Secret(key=bytes(32))).text().replace(52 * "a", "TOKEN")
        'thinwire://10.0.0.1:1/relay/TOKEN'
    """

    host: str = ""  # name or address of the coordinator's host
    port: int = 0
    secret: Secret | None = field(default=None, repr=False)  # the job's secret, None if the URI does not contain it
    # the public key that the coordinator must prove, 32 bytes; empty for one that has no key of its own, whose key
    # follows from the secret
    coordinator_key: bytes = b""
    # URI of the carrier on which the run lives, with no host: file:///... or s3://...
    carrier: str = ""
    # token of the relay that is at host and port, and leads to the coordinator; None where the coordinator is there
    relay_token: Secret | None = field(default=None, repr=False)

    @property
    def place(self) -> str:
        """Name of the coordinator's place in messages."""
        return self.carrier or f"{self.host}, port {self.port}"

    @property
    def folder_name(self) -> str:
        """Name of a joining host's folder."""
        return _NO_NAME.sub("-", self.carrier or f"{self.host}-{self.port}").strip("-")

    @property
    def relay(self) -> RelayPlace | None:
        """The relay by which the coordinator is reached."""
        if self.relay_token is None:
            return None
        return RelayPlace(address=Address(host=self.host, port=self.port), token=self.relay_token)

    @property
    def loop_folder(self) -> Path:
        """Folder of the coordinator of training loops of one's own, on its host."""
        return Path("runs") / f"joined-{self.host}-{self.port}"

    def by(self, relay: RelayPlace | None) -> Invitation:
        """Return the address of the same coordinator by a relay; with None, this one."""
        if relay is None:
            return self
        return replace(self, host=relay.address.host, port=relay.address.port, relay_token=relay.token)

    def text(self) -> str:
        """Return the URI; any host that has one with the secret can join and decrypt the traffic."""
        if self.carrier:
            return self.carrier if self.secret is None else f"{self.carrier}#{_encoded(self.secret.key)}"
        named = f"{_encoded(self.coordinator_key)}@" if self.coordinator_key else ""
        place = f"{_SCHEME}{named}{host_port(self.host, self.port)}"
        for before, part in (("/", self.secret), ("/relay/", self.relay_token)):
            place += "" if part is None else before + _encoded(part.key)
        return place


def read_invitation(text: str) -> Invitation:
    """Parse a URI of `Invitation.text`, or `HOST:PORT`.

    Raises:
        ValueError: It is malformed; the message names the error and the source of a valid one.
    """
    if (carried := _CARRIER.fullmatch(text.strip())) is not None:
        word = carried["secret"]
        of_run = None if word is None else Secret(key=_decoded(word, what="secret behind"))
        return Invitation(carrier=carried["carrier"].rstrip("/"), secret=of_run)
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise refusal(
            "the address cannot be read", got=repr(text[:60]),
            allowed="HOST:PORT, thinwire://KEY@HOST:PORT/SECRET, or file:///FOLDER#SECRET and other stores",
            remedy="the whole address that the host of thinwire train --elastic printed",
        )  # fmt: skip
    port = int(found["port"])
    if not 0 < port < 1 << 16:
        raise refusal("the address has a wrong port", got=f"{port} in {text[:60]!r}", allowed="1 to 65535",
                      remedy="29400, the usual one")  # fmt: skip
    secret, token = (
        None if found[name] is None else Secret(key=_decoded(found[name], what=f"{what} behind"))
        for name, what in (("secret", "secret"), ("token", "relay's token"))
    )
    key = b"" if found["key"] is None else _decoded(found["key"], what="coordinator's key before")
    return Invitation(
        host=found["host"].strip("[]"), port=port, secret=secret, coordinator_key=key, relay_token=token
    )  # fmt: skip


def _encoded(key: bytes) -> str:
    return base64.b32encode(key).decode().rstrip("=").lower()


def _decoded(word: str, *, what: str) -> bytes:
    try:
        key = base64.b32decode(word.upper() + "=" * (-len(word) % 8))
    except binascii.Error:
        key = b""
    if len(key) != SECRET_BYTES:
        raise refusal(
            f"the {what} the address is cut or changed", got=f"{len(word)} letters and digits", allowed="52",
            remedy="the whole address that the host of thinwire train --elastic printed",
        )  # fmt: skip
    return key
