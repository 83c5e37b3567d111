"""Names of a run's samples and of its metric in metrics lines and summaries."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TOKENS = "tokens"
_USUAL = (("unit", _TOKENS), ("metric", ""), ("metric_unit", ""))
# Names of units and metrics that a reader takes from a file; they become names of metrics elsewhere.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_UNIT_OF_METRIC = re.compile(r"[ -~]{0,20}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number of an evaluation beside the loss.

    Attributes:
        name: A word for tables and keys of JSON, such as accuracy.
        unit: % for a share in [0, 1], which is shown in percent; else the number's unit.
    """

    name: str
    unit: str = ""

    def show(self, value: float) -> str:
        """Return a value for readers.

        Example:
            >>> Metric(name="accuracy", unit="%").show(0.9417), Metric(name="error", unit="m").show(0.25)
            ('94.2 %', '0.2500 m')
        """
        return f"{100 * value:.1f} %" if self.unit == "%" else f"{value:.4f} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Units of a run.

    Attributes:
        samples: What is counted, in the plural with an s: tokens, images.
        metric: What an evaluation measures beside the loss.
    """

    samples: str = _TOKENS
    metric: Metric | None = None

    def counted(self, samples: int, *, per_s: float | None = None) -> dict[str, Any]:
        """Return keys of a line for a number of samples, and for so many a second.

        Example:
            >>> Measures().counted(640), Measures(samples="images").counted(64, per_s=8.0)
            ({'tokens': 640}, {'unit': 'images', 'images': 64, 'images_per_s': 8.0})
        """
        unit = {} if self.samples == _TOKENS else {"unit": self.samples}
        return {**unit, self.samples: samples, **({} if per_s is None else {f"{self.samples}_per_s": per_s})}

    def evaluated(self, shown: Sequence[float]) -> dict[str, Any]:
        """Return keys of a line for an evaluation's loss and metric.

        Example:
            >>> Measures(metric=Metric(name="accuracy", unit="%")).evaluated([0.5, 0.9])
            {'val_loss': 0.5, 'metric': 'accuracy', 'metric_unit': '%', 'accuracy': 0.9}
        """
        values: dict[str, Any] = {"val_loss": shown[0]}
        if self.metric is not None:
            values |= {"metric": self.metric.name, "metric_unit": self.metric.unit, self.metric.name: shown[1]}
        return values


def in_general(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line with `samples`, `samples_per_s`, and `metric` as (name, unit, value), whatever it calls them.

    A line without a unit counts tokens, as all lines of earlier versions do.

    Raises:
        ValueError: A name is no short word.

    Example:
        >>> in_general({"tokens": 9})
        {'samples': 9}
        >>> in_general({"unit": "images", "images": 7, "metric": "accuracy", "accuracy": 0.5})
        {'unit': 'images', 'samples': 7, 'metric': ('accuracy', '', 0.5)}
    """
    unit, metric, of_metric = (values.get(name, usual) for name, usual in _USUAL)
    for name, allowed in ((unit, _NAME), (_TOKENS if metric == "" else metric, _NAME), (of_metric, _UNIT_OF_METRIC)):
        if not isinstance(name, str) or not allowed.fullmatch(name):
            raise ValueError(f"unit and metric must be short words, got {str(name)[:80]!r}")
    names = {unit: "samples", f"{unit}_per_s": "samples_per_s"}
    found = {names.get(name, name): value for name, value in values.items() if name not in ("metric_unit", metric)}
    return found | ({"metric": (metric, of_metric, values.get(metric))} if metric else {})


def per_sample(unit: str) -> str:
    """Return the unit of a loss.

    Example:
        >>> per_sample("tokens")
        'nats per token'
    """
    return f"nats per {unit.removesuffix('s')}"


def shown_metric(metric: tuple[str, str, float]) -> str:
    """Return the value of a metric (name, unit, value) for readers."""
    name, unit, value = metric
    return Metric(name=name, unit=unit).show(value)
