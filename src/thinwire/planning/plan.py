"""Result of the planner, and its file: the chosen candidate, the other simulated ones, and reasons for rejections."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from thinwire.errors import DataError
from thinwire.files import LARGEST_NUMBER, MOST_PLAN_BYTES, read_json, short, write_json
from thinwire.planning.candidates import Candidate
from thinwire.planning.loss_penalty import LossPenalty, compute_worth
from thinwire.planning.predict import Prediction

FORMAT, VERSION = "thinwire-plan", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A candidate that was simulated."""

    candidate: Candidate  # what runs
    prediction: Prediction  # what the simulator says of it
    penalty: LossPenalty | None  # what was published of its loss; None where nothing was

    @property
    def equal_loss_s(self) -> float:
        """Seconds of training, with what it takes to make the loss as low as data-parallel training's.

        Infinity if no loss is published.
        """
        if self.penalty is None:
            return math.inf
        return self.prediction.total_s * compute_worth(self.penalty.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why something is not in the plan."""

    what: str  # one candidate or machine of those that share the reason
    reason: str  # in a line
    count: int = 1  # how many share it


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Changes that would reach a compute utilisation."""

    compute_utilisation: float  # the one that is wanted, as a part of `limit`
    limit: float  # what the machines reach on wires without a limit: below 1 where they differ in speed
    # by how much all wires would have to be faster for the chosen candidate; below 1 where they have more than it takes
    rate_factor: float
    # the least H with which the chosen method reaches it on these wires; None where none does
    sync_interval: int | None
    penalty: float | None  # the loss penalty of that interval, where it is published


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenBatches:
    """Batches by the speed of unequal machines, which end a step together. Elastic runs take them."""

    sequences: Mapping[str, int]  # of a step of each machine
    speedup: float  # tokens computed a second, in those of the plan's equal batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Chosen candidate and all that was considered."""

    model: str  # its name, as `thinwire train` takes it
    num_parameters: int  # of the model
    tokens: float  # of all replicas together
    seq_len: int  # tokens of a sequence
    min_utilisation: float  # the least compute utilisation that was wished
    outlooks: tuple[Outlook, ...]  # all that was simulated, best first; the first is the plan
    alone: Outlook | None  # the fastest machine without any wire, for comparison with the others; None where it cannot
    rejections: tuple[Rejection, ...]  # what was left out, and why
    needs: Needs | None = None  # what it would take
    uneven: UnevenBatches | None = None  # batches by speed, where they compute clearly more than the plan's equal ones

    @property
    def best(self) -> Outlook:
        """Chosen candidate, or the nearest one if none meets the constraints."""
        return self.outlooks[0]

    @property
    def is_met(self) -> bool:
        """Whether the best one computes for as long as was wished."""
        return self.best.prediction.compute_utilisation >= self.min_utilisation

    def settings(self) -> dict[str, Any]:
        """Return the options of `thinwire train` that the plan decides, by their names."""
        best = self.best
        found = best.candidate.settings()
        if "overlap_steps" in found:
            found["overlap_steps"] = str(found["overlap_steps"])
        return {
            "model": self.model, "method": best.candidate.method, "replicas": best.candidate.num_replicas,
            "seq_len": self.seq_len, "steps": best.prediction.num_steps, **found,
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the file's content."""
        return {
            "format": FORMAT, "version": VERSION, "train": self.settings(),
            "hosts": list(self.best.candidate.replicas),
            "predicted": {
                **asdict(self.best.prediction),
                "compute_utilisation": self.best.prediction.compute_utilisation,
                "loss_penalty": None if self.best.penalty is None else self.best.penalty.share,
            },
            "tokens": self.tokens, "num_parameters": self.num_parameters,
            "simulated": [_entry(outlook) for outlook in self.outlooks],
            "left_out": [asdict(rejection) for rejection in self.rejections],
            "what_it_would_take": None if self.needs is None else asdict(self.needs),
            "uneven_batches": None if self.uneven is None else asdict(self.uneven),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """Contents of a plan file that a run uses."""

    settings: Mapping[str, Any]  # options of `thinwire train`, by their names
    hosts: tuple[str, ...]  # the machines' names, in the replicas' order
    prediction: Prediction  # what was simulated


def save_plan(plan: Plan, path: Path) -> None:
    """Write the plan, whole or not at all.

    Raises:
        OSError: The place cannot be written.
    """
    write_json(path, plan.to_json())


def load_plan(path: Path) -> PlannedRun:
    """Read what a plan file decides.

    Raises:
        DataError: There is no such file, or it is no plan; names the place and the value.
    """
    content = read_json(path, most_bytes=MOST_PLAN_BYTES, command="thinwire plan")
    try:
        return read_plan(content)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


# What a plan may decide, and the kind of each value. Nothing else of a run can be changed by such a file.
_SETTINGS: Mapping[str, type] = {
    "model": str, "method": str, "replicas": int, "seq_len": int, "steps": int, "batch_size": int,
    "sync_interval": int, "overlap_steps": str, "codec": str, "exchange": str, "layers_per_fragment": int,
    "micro_batch": int, "recompute": bool,
}  # fmt: skip
_NEEDED = ("model", "method", "replicas", "seq_len", "steps", "batch_size")


def read_plan(content: object) -> PlannedRun:
    """Check a plan file's content.

    Raises:
        DataError: It is no plan; names the place, the value and the limit.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise DataError(f'this is no plan between sites: it must have "format": "{FORMAT}", got {short(found)}')
    if content.get("version") != VERSION or isinstance(content["version"], bool):
        raise DataError(f"the plan has version {short(content.get('version'))}; this thinwire reads {VERSION}")
    settings = _checked_settings(content.get("train"))
    hosts = content.get("hosts")
    if not isinstance(hosts, list) or not all(isinstance(name, str) for name in hosts):
        raise DataError(f"hosts must be a list of names, got {short(hosts)}")
    if len(hosts) != settings["replicas"]:
        raise DataError(f"hosts must name the {short(settings['replicas'])} replicas, got {len(hosts)} names")
    return PlannedRun(settings=settings, hosts=tuple(hosts), prediction=_prediction(content.get("predicted")))


def _checked_settings(found: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise DataError(f"train must be an object of options, got {short(found)}")
    for name, value in found.items():
        if name not in _SETTINGS:
            raise DataError(f"train has {short(name)}, which a plan does not decide; there are {', '.join(_SETTINGS)}")
        if type(value) is not _SETTINGS[name]:
            raise DataError(f"train.{name} must be a {_SETTINGS[name].__name__}, got {short(value)}")
    if missing := [name for name in _NEEDED if name not in found]:
        raise DataError(f"train lacks {missing[0]!r}")
    return dict(found)


def _prediction(found: object) -> Prediction:
    if not isinstance(found, dict):
        raise DataError(f"predicted must be an object of numbers, got {short(found)}")
    values: dict[str, Any] = {}
    for field in fields(Prediction):
        value = found.get(field.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_NUMBER:
            raise DataError(f"predicted.{field.name} must be a number of at least 0, got {short(value)}")
        values[field.name] = int(value) if field.name in ("num_steps", "simulated_steps") else float(value)
    if not 0 < values["compute_s"] <= values["step_s"] * (1 + 1e-9):
        raise DataError(
            f"predicted.compute_s must be above 0 and at most step_s ({values['step_s']}), got {values['compute_s']}"
        )
    return Prediction(**values)


def _entry(outlook: Outlook) -> dict[str, Any]:
    penalty = outlook.penalty
    return {
        "candidate": {"method": outlook.candidate.method, **outlook.candidate.settings()},
        "hosts": list(outlook.candidate.replicas),
        **asdict(outlook.prediction), "compute_utilisation": outlook.prediction.compute_utilisation,
        "loss_penalty": None if penalty is None else penalty.share,
        "equal_loss_s": None if penalty is None else outlook.equal_loss_s,
        "notes": [] if penalty is None else list(penalty.notes),
    }  # fmt: skip


def pareto(outlooks: Sequence[Outlook]) -> list[Outlook]:
    """Return those that no other one beats in both time and loss, fastest first.

    Where nothing is published of a loss, a candidate is left out.
    """
    # times that differ by rounding alone are one time
    known = sorted(
        (float(f"{one.prediction.total_s:.3g}"), one.penalty.share, place)
        for place, one in enumerate(outlooks)
        if one.penalty is not None
    )
    front: list[Outlook] = []
    least = math.inf
    for _, share, place in known:
        if share < least:
            least = share
            front.append(outlooks[place])
    return front
