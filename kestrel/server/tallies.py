"""Counters and histograms of what happens on the event loop.

The client library's own take a lock for every number, because any thread may count there. Here one thread counts and
reads, many times for every request, so these are plain numbers, and become the library's samples when someone scrapes.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString

Labels = tuple[str, ...]


def shows_created() -> bool:
    """Whether there are samples of when a series began, by the client library's own variable."""
    return os.environ.get("PROMETHEUS_DISABLE_CREATED_SERIES", "").lower() not in ("true", "1", "t")


class _Series(Collector):
    """Something that is kept for every combination of labels.

    `fixed` are labels with the same value in every sample, and come first.
    """

    def __init__(self, name: str, help_text: str, fixed: dict[str, str], labels: Sequence[str] = ()) -> None:
        self._name, self._help = name, help_text
        self._label_names = [*fixed, *labels]
        self._fixed = tuple(fixed.values())
        self._created_s: dict[Labels, float] = {}
        self._shows_created = shows_created()

    def open(self, *labels: str) -> None:
        """Show it from now on, even at zero."""
        if labels in self._created_s:
            return
        names = self._label_names[len(self._fixed) :]
        if len(labels) != len(names):
            raise ValueError(f"{self._name} has the labels {names} (got the values {list(labels)}); give one for each")
        self._begin(labels)
        self._created_s[labels] = time.time()

    @abstractmethod
    def _begin(self, labels: Labels) -> None: ...


class _Numbers(_Series):
    """A number for every combination of labels."""

    def __init__(self, name: str, help_text: str, fixed: dict[str, str], labels: Sequence[str] = ()) -> None:
        super().__init__(name, help_text, fixed, labels)
        self._values: dict[Labels, float] = {}

    def add(self, amount: float, *labels: str) -> None:
        if labels not in self._values:
            self.open(*labels)
        self._values[labels] += amount

    def _begin(self, labels: Labels) -> None:
        self._values[labels] = 0.0


class Tally(_Numbers):
    """A number that only grows, exposed under `name` with `_total` appended."""

    def add(self, amount: float, *labels: str) -> None:
        if amount < 0:
            raise ValueError(f"{self._name} only grows (got {amount}); use a Level for what also shrinks")
        super().add(amount, *labels)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._label_names)
        for labels, value in self._values.items():
            created_s = self._created_s[labels] if self._shows_created else None
            family.add_metric((*self._fixed, *labels), value, created=created_s)
        yield family


class Level(_Numbers):
    """A number that grows and shrinks, exposed under `name` as it is."""

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._help, labels=self._label_names)
        for labels, value in self._values.items():
            family.add_metric((*self._fixed, *labels), value)
        yield family


class Spread(_Series):
    """How often a number fell between which bounds, and the sum of all, for every combination of labels."""

    def __init__(
        self, name: str, help_text: str, bounds: Sequence[float], fixed: dict[str, str], labels: Sequence[str] = ()
    ) -> None:
        super().__init__(name, help_text, fixed, labels)
        self._bounds = tuple(bounds)
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def add(self, number: float, *labels: str) -> None:
        """A number on a bound belongs below it."""
        if labels not in self._counts:
            self.open(*labels)
        self._counts[labels][bisect_left(self._bounds, number)] += 1
        self._sums[labels] += number

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._label_names)
        for labels, counts in self._counts.items():
            values = (*self._fixed, *labels)
            family.add_metric(values, self._cumulative(counts), self._sums[labels])
            if self._shows_created:
                named = dict(zip(self._label_names, values, strict=True))
                family.add_sample(f"{self._name}_created", named, self._created_s[labels])
        yield family

    def _begin(self, labels: Labels) -> None:
        self._counts[labels] = [0] * (len(self._bounds) + 1)
        self._sums[labels] = 0.0

    def _cumulative(self, counts: Sequence[int]) -> list[tuple[str, float]]:
        bounds = (*self._bounds, INF)
        return [(floatToGoString(bound), float(sum(counts[: i + 1]))) for i, bound in enumerate(bounds)]
