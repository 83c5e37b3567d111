"""Measuring all hosts of a run together: each one's inner step, and the wires between them."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence

from thinwire.errors import DataError, PayloadError
from thinwire.planning.cluster import Cluster, Machine, read_machine
from thinwire.planning.probe import ProbeBudget, WireMeasurements, probe_wires
from thinwire.training.config import TrainConfig
from thinwire.training.host_benchmark import measure_machine
from thinwire.transport.all_gather_json import tell_all
from thinwire.transport.base import Transport
from thinwire.transport.connect import connect
from thinwire.transport.secret import need_pyzmq, read_secret

_NAMES = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a probe found, the same on all hosts.

    Attributes:
        replica: The number of this host.
        machines: Without their wires, in the replicas' order.
        wires: Between them.
    """

    replica: int
    machines: tuple[Machine, ...]
    wires: WireMeasurements

    @property
    def cluster(self) -> Cluster:
        """Machines and wires together."""
        return self.wires.cluster(self.machines)


def probe_hosts(config: TrainConfig, *, budget: ProbeBudget, step_s: float) -> Probed:
    """Time this host's inner step, join the others, and measure the wires between all.

    All hosts must call this together.

    Args:
        config: Resolved: the model, the batch, the device, and how the others are reached.
        budget: Of the wires' probe.
        step_s: About how long inner steps are timed.

    Raises:
        ThinwireError: A host did not come, was lost, or sent something else.
        ValueError: There is one host only, an option is out of its range, or the secret's file cannot be used.
    """
    if config.run.secret is not None:  # said before the steps are timed, not after
        need_pyzmq()
        read_secret(config.run.secret)
    machine = measure_machine(config, name=socket.gethostname(), seconds=step_s)
    deadline_s = config.run.join_deadline_s
    transport = connect(
        interface=config.run.interface, address=config.run.address, secret=config.run.secret, deadline_s=deadline_s
    )
    try:
        machines = _all_machines(machine, transport, deadline_s=deadline_s)
        wires = probe_wires(transport, budget=budget, deadline_s=deadline_s, number=_NAMES + 1)
    finally:
        transport.close()
    return Probed(replica=transport.replica, machines=tuple(machines), wires=wires)


def _all_machines(own: Machine, transport: Transport, *, deadline_s: float) -> Sequence[Machine]:
    """Tell all replicas of one's own machine, and return theirs under names that differ."""
    told = tell_all(dataclasses.asdict(own), transport=transport, number=_NAMES, deadline_s=deadline_s)
    found = []
    for replica, note in enumerate(told):
        known = {name: value for name, value in note.items() if value is not None}
        try:
            found.append(read_machine(known, where=f"what replica {replica} says of itself"))
        except DataError as error:
            raise PayloadError(f"{error}; run the same thinwire on all hosts") from error
    names = [machine.name for machine in found]
    return [
        dataclasses.replace(machine, name=f"{machine.name}-{replica}") if names.count(machine.name) > 1 else machine
        for replica, machine in enumerate(found)
    ]
