"""`thinwire train --plan` and `--method auto`: options from a plan, or from a probe of the hosts and a plan of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.train_options import is_named, world_size
from thinwire.errors import DataError, excluded, refusal
from thinwire.training.config import TrainConfig, resolve

if TYPE_CHECKING:
    from thinwire.planning.plan import Plan

AUTO = "auto"
# What a plan says whatever the method.
_OF_ANY_METHOD = ("model", "replicas", "seq_len", "steps", "batch_size", "micro_batch", "recompute")
# Less than `thinwire probe` takes, since training is waiting for it.
_WIRES_S, _STEPS_S = 20.0, 3.0
_SHOWN_NAMES = 8


def planned(
    given: TrainConfig, arguments: Sequence[str], *, say: Callable[[str], None]
) -> tuple[TrainConfig, Plan | None]:
    """Fill in the options that a plan decides and the command line does not name.

    Args:
        given: Options of the command line.
        arguments: The command line.
        say: Takes lines for people.

    Returns:
        The options, and the plan where one was made just now.
    """
    is_auto = given.sync.method.lower() == AUTO
    if given.output.resume is not None and (is_auto or given.run.plan is not None):
        why = "a run goes on with its own options"
        raise excluded("--resume", "--plan or --method auto", why=why, remedy="to leave the latter out")
    if is_auto and given.run.plan is not None:
        why = "the plan names the method already"
        raise excluded("--plan", "--method auto", why=why, remedy="to leave --method auto out")
    if given.run.plan is not None:
        return _from_file(given, given.run.plan, arguments, say=say), None
    if not is_auto:
        return given, None
    plan = _plan_here(given, arguments, say=say)
    # what was asked for stays: how long, and with how many
    found = {name: value for name, value in plan.settings().items() if name not in ("steps", "replicas", "model")}
    plain = given.replace(method=found["method"])
    return _filled(plain, found, arguments, step_s=plan.best.prediction.step_s), plan


def _from_file(given: TrainConfig, path: Path, arguments: Sequence[str], *, say: Callable[[str], None]) -> TrainConfig:
    """Fill in what a plan file decides: inside a site, between machines, or both."""
    from thinwire.files import MOST_PLAN_BYTES, read_json
    from thinwire.planning.plan import read_plan
    from thinwire.site.site_plan import FORMAT

    content = read_json(path, most_bytes=MOST_PLAN_BYTES, command="thinwire plan")
    try:
        if isinstance(content, dict) and content.get("format") == FORMAT:
            inside = _site_settings(content, say=say)
            return given.replace(**{name: v for name, v in inside.items() if not is_named(name, arguments)})
        read = read_plan(content)
        inside = _settings_of_sites(content.get("inside"), read.hosts, say=say)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    say(f"the plan is for {', '.join(map(repr, read.hosts))}, in the order of their ranks")
    found = {**read.settings, **inside}
    if given.sync.method.replace("_", "-").lower() == found["method"].replace("_", "-").lower():
        given = given.replace(method=found["method"])  # however it is written
    elif is_named("method", arguments):
        # another method's settings would be refused, though nobody has named them
        found = {name: value for name, value in found.items() if name in _OF_ANY_METHOD or name in inside}
    return _filled(given, found, arguments, step_s=read.prediction.step_s)


def _site_settings(
    content: Mapping[str, Any], *, say: Callable[[str], None], replica: int | None = None
) -> dict[str, Any]:
    """Return the options that a plan inside a site decides, for one replica or for all (None).

    A rank on another host than planned is refused.
    """
    from thinwire.site.site_plan import read_site_plan

    read = read_site_plan(content)
    say(f"each replica has {len(read.rank_order)} ranks, for the devices {_few(read.rank_order)}")
    if replica is None or replica == _own_rank() // len(read.rank_order):
        _check_place(read.rank_order)
    return dict(read.settings)


def _own_rank() -> int:
    """Return torchrun's number of this process, 0 where it does not run."""
    text = os.environ.get("RANK", "") if world_size() is not None else ""
    return int(text) if text.isdecimal() else 0


def _check_place(rank_order: Sequence[str]) -> None:
    """Refuse a rank on another host than planned; a site whose nodes are not called as hosts tells nothing."""
    own, rank = socket.gethostname(), _own_rank()
    nodes = [device.rpartition("/")[0] for device in rank_order]
    wanted = nodes[rank % len(nodes)]
    if world_size() is None or own not in nodes or own == wanted:
        return
    order = list(dict.fromkeys(nodes))
    raise refusal(
        f"the plan places rank {rank} on another host", got=own, allowed=wanted,
        remedy=f"torchrun on the hosts in the order {_few(order)}: --node-rank {order.index(own)} here",
    )  # fmt: skip


def _settings_of_sites(found: object, hosts: Sequence[str], *, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the options that the plans inside the sites of a plan between them decide; none without sites."""
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(found.get(name), dict) for name in hosts):
        raise DataError(f"inside must hold the plan of each of {_few(hosts)}; plan again with thinwire plan --inside")
    settings = [_site_settings(found[name], say=say, replica=number) for number, name in enumerate(hosts)]
    for name, own in zip(hosts, settings, strict=True):
        other = next((key for key in own if own[key] != settings[0].get(key)), None)
        if other is not None:
            raise DataError(
                f"replicas are cut alike, and {other} is {settings[0].get(other)} in {hosts[0]!r} and {own[other]} in "
                f"{name!r}; plan with the same site file for both"
            )
    return settings[0]


def _few(names: Sequence[str]) -> str:
    return " ".join(names) if len(names) <= _SHOWN_NAMES else f"{' '.join(names[:_SHOWN_NAMES])} ..."


def _filled(given: TrainConfig, found: Mapping[str, Any], arguments: Sequence[str], *, step_s: float) -> TrainConfig:
    """Put in what is not named; where nothing else runs than was planned, also how long a step should take."""
    own = {name: value for name, value in found.items() if not is_named(name, arguments)}
    filled = given.replace(**own)
    is_planned = all(filled.option(name) == value for name, value in found.items() if name != "steps")
    if not is_planned or "method" not in found or is_named("expected_step_s", arguments):
        return filled
    return filled.replace(expected_step_s=step_s)


def _plan_here(given: TrainConfig, arguments: Sequence[str], *, say: Callable[[str], None]) -> Plan:
    """Probe the hosts of this run and plan for them; the same plan comes out on all of them."""
    from thinwire.planning.probe import ProbeBudget
    from thinwire.planning.search import PlanConstraints, make_plan
    from thinwire.planning.training_task import TrainingTask
    from thinwire.training.build import check_device
    from thinwire.training.config import validate
    from thinwire.training.probe_hosts import probe_hosts
    from thinwire.workloads.language import build_model

    ranks = world_size()
    if ranks in (None, 1):
        raise refusal(
            "--method auto probes the wires between hosts", got="one host", allowed="torchrun on 2 or more, or a lab",
            remedy="thinwire lab --hosts 2 --rate 20mbit -- thinwire train --method auto",
        )  # fmt: skip
    plain = given.replace(method="iso-loco")
    config = resolve(plain, world_size=ranks, cores=os.cpu_count() or 1, home=Path.home())
    validate(config)
    check_device(config.model.device)
    assert config.data.batch_size is not None and config.model.seq_len is not None
    say("probing the wires between the hosts")
    found = probe_hosts(config, budget=ProbeBudget(seconds=_WIRES_S), step_s=_STEPS_S)
    model = build_model(config.model.name, max_seq_len=config.model.seq_len, device="meta")
    tokens = float(config.run.steps * config.num_replicas * config.data.batch_size * config.model.seq_len)
    workload = TrainingTask(
        name=config.model.name, model=model, tokens=tokens, seq_len=config.model.seq_len,
        batch_size=config.data.batch_size,
    )  # fmt: skip
    # the hosts are here, so all of them take part, whatever it costs in loss; and what was named is not to be chosen
    named: dict[str, Any] = {
        wish: (given.option(option),)
        for wish, option in (("intervals", "sync_interval"), ("layers", "layers_per_fragment"), ("codecs", "codec"))
        if given.option(option) is not None
    }
    if isinstance(given.sync.overlaps, int):
        named["overlaps"] = (given.sync.overlaps,)
    wishes = PlanConstraints(min_replicas=config.num_replicas, max_penalty=1.0, **named)
    plan = make_plan(workload, found.cluster, wishes)
    best = plan.best
    say(
        f"plan: {best.candidate.describe()}; {best.prediction.compute_utilisation:.0%} of the time computing, "
        f"{best.prediction.step_s:.3g} s a step"
    )
    return plan
