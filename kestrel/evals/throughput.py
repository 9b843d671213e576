"""How fast answers came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kestrel.request import RequestMetrics


@dataclass(frozen=True, slots=True)
class Throughput:
    num_requests: int
    seconds: float
    """Wall time during which requests were running; drawing pictures is not in it."""
    requests_per_s: float
    output_tokens: int
    tokens_per_s: float
    p50_latency_ms: float
    """From handing a request over to its whole answer, with all the others around."""
    p95_latency_ms: float


class Tally:
    """Adds up what answers took."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._latencies_s: list[float] = []
        self._output_tokens = 0

    def add(self, latency_s: float, metrics: RequestMetrics) -> None:
        self._latencies_s.append(latency_s)
        self._output_tokens += metrics.output_tokens

    def throughput(self) -> Throughput:
        answered = sorted(self._latencies_s)
        return Throughput(
            num_requests=len(answered),
            seconds=self.busy_s,
            requests_per_s=len(answered) / self.busy_s if self.busy_s else 0.0,
            output_tokens=self._output_tokens,
            tokens_per_s=self._output_tokens / self.busy_s if self.busy_s else 0.0,
            p50_latency_ms=1000 * _quantile(answered, 0.5),
            p95_latency_ms=1000 * _quantile(answered, 0.95),
        )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that this share of all values does not exceed; 0 of nothing."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0
