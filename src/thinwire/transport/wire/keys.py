"""The CURVE keys of a job: one pair a replica and direction, derived from the job's secret.

A replica that is dialled proves its own number with its pair, and so does the one that dials. Who has the secret can
derive all pairs, so the number is a protection against mistakes, not against holders of the secret.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import zmq
from zmq.utils import z85

from thinwire.transport.secret import Secret

Role = Literal["door", "dialler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A CURVE key pair, as libzmq takes it.

    Attributes:
        public: 40 characters of Z85.
        private: 40 characters of Z85.
    """

    public: bytes
    private: bytes = field(repr=False)

    @property
    def public_bytes(self) -> bytes:
        """The public key's 32 bytes, as libzmq shows them to who decides about a connection."""
        decoded: bytes = z85.decode(self.public)
        return decoded


def key_pair(secret: Secret, *, replica: int, role: Role) -> KeyPair:
    """Return the keys of a replica.

    Args:
        secret: The job's.
        replica: Whose keys.
        role: For the side that is dialled, or the one that dials.

    Example:
        >>> secret = Secret(key=bytes(32))
        >>> one, two = (key_pair(secret, replica=number, role="door") for number in (0, 1))
        >>> len(one.public), one.public == two.public
        (40, False)
    """
    private = z85.encode(secret.derive(f"thinwire wire v1 {role} {replica}"))
    return KeyPair(public=zmq.curve_public(private), private=private)
