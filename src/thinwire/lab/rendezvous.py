"""How commands on the hosts of a lab find each other, and whether this machine can hold a lab at all."""

from __future__ import annotations

import shutil
import sys

from thinwire.errors import LabError
from thinwire.lab import network_commands as commands

FIRST_PORT = 29_500
NUM_PORTS = 1_000
TOOLS = {"ip": "iproute2", "bridge": "iproute2", "tc": "iproute2"}


def rendezvous(host: int, num_hosts: int, *, port: int = FIRST_PORT) -> dict[str, str]:
    """Return the variables by which `torchrun`, `thinwire train` or a plain script on a host finds the others.

    A plain script is one rank a host; `torchrun` reads the variables that begin with PET_ and starts ranks of its own.
    """
    first, rank, size = commands.address_of(0), str(host), str(num_hosts)
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank}
    torchrun = {"PET_NNODES": size, "PET_NODE_RANK": rank, "PET_MASTER_ADDR": first, "PET_MASTER_PORT": str(port)}
    interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), commands.INTERFACE)
    meeting = {"MASTER_ADDR": first, "MASTER_PORT": str(port), "THINWIRE_LAB_HOST": rank}
    return {**ranks, **torchrun, **interfaces, **meeting}


def check_machine() -> None:
    """Refuse a machine that cannot hold a lab.

    Raises:
        LabError: Names what is missing, and the remedy.
    """
    if sys.platform != "linux":
        raise LabError(f"a lab is made of Linux network namespaces, and this is {sys.platform}; use a Linux machine")
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise LabError(f"a lab needs the program {tool!r}, which is not here; install it: apt install {package}")
