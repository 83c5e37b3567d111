"""Names of a run's samples and of its metric in metrics lines and summaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TOKENS = "tokens"
# Longest name of a unit or a metric that a reader takes from a file.
_LONGEST_NAME = 40


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
    """Return a line with `samples`, `samples_per_s` and `metric_value` for the names of its own units.

    A line without a unit counts tokens, as all lines of earlier versions do.

    Raises:
        ValueError: A name is no short text.
    """
    unit, metric = values.get("unit", _TOKENS), values.get("metric", "")
    for name in (unit, metric):
        if not isinstance(name, str) or len(name) > _LONGEST_NAME:
            raise ValueError(f"unit and metric must be names of at most {_LONGEST_NAME} characters")
    names = {unit: "samples", f"{unit}_per_s": "samples_per_s"} | ({metric: "metric_value"} if metric else {})
    return {names.get(name, name): value for name, value in values.items()}
