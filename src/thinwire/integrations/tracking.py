"""Numbers of a `DistributedOptimizer` for experiment trackers, as one flat dict a step."""

from __future__ import annotations

from thinwire.sync.optimizer import DistributedOptimizer


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
