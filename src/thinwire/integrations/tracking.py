"""One rule for who writes what: the lead, folders of replicas, names in trackers; and numbers for trackers.

`thinwire.connect(solo=True)` makes every process the main process of its libraries. What they derive from the rank,
such as output folders and runs of a tracker, follows from here instead.
"""

from __future__ import annotations

from pathlib import Path

from thinwire.sync.optimizer import DistributedOptimizer
from thinwire.transport.base import Transport
from thinwire.transport.default_group import rank_or_zero


def is_lead(transport: Transport) -> bool:
    """Return whether this process does what only one of a run may do: upload a model, print a summary.

    It is the first rank of replica 0. After the final exchange its global parameters are those of all replicas. In an
    elastic run replica 0 may have left: let each replica save to its own folder there.

    Example:
        >>> from thinwire.transport.loopback import LoopbackWorld
        >>> [is_lead(transport) for transport in LoopbackWorld(2).transports]
        [True, False]
    """
    ranks = getattr(getattr(transport, "inner", transport), "ranks_per_replica", 1)
    return transport.replica == 0 and rank_or_zero() % ranks == 0


def replica_folder(path: Path | str, transport: Transport) -> Path:
    """Return the folder in which a replica writes: `path/replica-N`, or `path` itself where it is the only one.

    Example:
        >>> from thinwire.transport.loopback import LoopbackWorld
        >>> [str(replica_folder("runs/a", transport)) for transport in LoopbackWorld(2).transports]
        ['runs/a/replica-0', 'runs/a/replica-1']
    """
    return Path(path) / f"replica-{transport.replica}" if transport.num_replicas > 1 else Path(path)


def tracker_names(name: str, transport: Transport) -> dict[str, str]:
    """Return group and name of a replica's run, as `wandb.init` takes them: one group for all replicas.

    Example:
        >>> from thinwire.transport.loopback import LoopbackWorld
        >>> tracker_names("lora", LoopbackWorld(2).transports[1])
        {'group': 'lora', 'name': 'lora-replica-1'}
    """
    return {"group": name, "name": f"{name}-replica-{transport.replica}"}


def metrics(optimizer: DistributedOptimizer) -> dict[str, float]:
    """Return the counters of a replica so far, under the names of the run log.

    Log the result at any step: all values are totals since the optimizer was made, except `rounds_in_flight`.

    Args:
        optimizer: The replica's optimizer.

    Returns:
        `step`, `rounds_launched`, `rounds_applied`, `rounds_missed`, `rounds_in_flight`, `stalled_s`, `exchanging_s`
        and `missing_steps` (local steps that the global parameters lack); with a transport that counts, as
        `thinwire.connect` returns, also `sent_bytes` and `received_bytes`.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = thinwire.DistributedOptimizer(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), method=thinwire.methods.diloco(sync_interval=2)
        ... )
        >>> with optimizer:
        ...     for _ in range(3):
        ...         model(torch.ones(1, 3)).sum().backward()
        ...         optimizer.step()
        ...     found = metrics(optimizer)
        >>> found["step"], found["rounds_applied"], found["missing_steps"]
        (3, 1, 1)
    """
    statistics, work = optimizer.statistics, optimizer.engine.state.work
    found: dict[str, float] = {
        "step": optimizer.steps_done,
        "rounds_launched": statistics.rounds_launched,
        "rounds_applied": statistics.rounds_applied,
        "rounds_missed": statistics.rounds_missed,
        "rounds_in_flight": len(optimizer.rounds_in_flight),
        "stalled_s": round(statistics.stalled_s, 4),
        "exchanging_s": round(statistics.exchanging_s, 4),
        "missing_steps": work.num_missing_steps,
    }
    log = getattr(optimizer.transport, "log", None)
    if log is not None:
        found |= {f"{direction}_bytes": log.totals(direction).wire_bytes for direction in ("sent", "received")}
    return found
