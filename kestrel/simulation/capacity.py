"""The two questions that a simulation answers by search: how many GPUs, and how many requests a second."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kestrel.errors import ConfigError
from kestrel.simulation.cluster import Cluster, Figures
from kestrel.simulation.costs import StepCosts
from kestrel.simulation.traffic import MAX_REQUESTS, Traffic

SECONDS = 20.0
"""Of traffic that is simulated for a rate when nothing else is said."""
STEP = 0.05
"""Rates are tried in round steps of at most this share of what the GPUs answer when all requests come at once."""
MAX_GPUS, MAX_STEPS = 1024, 1000


def requests_of(rate: float) -> int:
    return round(min(MAX_REQUESTS, max(1.0, rate * SECONDS)))


def round_step(most: float) -> float:
    """The largest of 1, 2 and 5 times a power of ten that is not above."""
    power = 10.0 ** math.floor(math.log10(most))
    return max(digit * power for digit in (1, 2, 5) if digit * power <= most)


@dataclass(frozen=True)
class Question:
    """What is to hold. The rate of `traffic` is not looked at; `requests` of None: as many as come in `SECONDS`."""

    costs: StepCosts
    traffic: Traffic
    max_batch_size: int
    p99_ms: float
    requests: int | None = None

    def fewest_gpus(self, rate: float) -> Figures:
        """Of the fewest GPUs that answer so many requests a second in time."""
        self._check_alone()
        if rate * self.traffic.picture_s > 1:
            needed = rate * self.traffic.picture_s * self.traffic.link_gbit
            raise ConfigError(
                "link_gbit", f"{rate:g} pictures a second need {needed:.2g}; raise it, or send smaller ones"
            )
        start = min(MAX_GPUS, math.ceil(rate / self._flood_rate()))
        return self._search(lambda gpus: self.at(rate, gpus), start, MAX_GPUS, -1)[1]

    def most_requests(self, gpus: int) -> tuple[float, Figures]:
        """The highest rate that so many GPUs answer in time, and how."""
        self._check_alone()
        most = self._flood_rate() * gpus
        step = round_step(STEP * most)
        steps, figures = self._search(lambda steps: self.at(step * steps, gpus), int(0.9 * most / step), MAX_STEPS, 1)
        return step * steps, figures

    def _search(self, simulate: Callable[[int], Figures], start: int, most: int, better: int) -> tuple[int, Figures]:
        """The best number from 1 to `most` that is in time; `better` is 1 where larger ones are better, else -1."""
        tried: dict[int, Figures] = {}
        kept = late = None
        number, stride = start, 1
        while kept is None or late is None:
            tried[number] = simulate(number)
            way = better if self._holds(tried[number]) else -better
            kept, late = (number, late) if way == better else (kept, number)
            following = min(most, max(1, number + way * stride))
            if following == number:
                break
            number, stride = following, 2 * stride
        if kept is None:
            raise ConfigError("p99", f"{self.p99_ms:g} ms is not kept with any number that was tried; raise it")
        while late is not None and abs(late - kept) > 1:
            number = (kept + late) // 2
            tried[number] = simulate(number)
            kept, late = (number, late) if self._holds(tried[number]) else (kept, number)
        return kept, tried[kept]

    def at(self, rate: float, gpus: int) -> Figures:
        requests = self.requests or requests_of(rate)
        return Cluster(self.costs, replace(self.traffic, rate=rate, requests=requests), gpus, self.max_batch_size).run()

    def _holds(self, figures: Figures) -> bool:
        return figures.latency_p99_ms <= self.p99_ms

    def _check_alone(self) -> None:
        alone = Cluster(self.costs, replace(self.traffic, rate=None, requests=1), 1, self.max_batch_size).run()
        if not self._holds(alone):
            raise ConfigError(
                "p99", f"one request alone takes {alone.latency_p99_ms:.0f} ms; ask for no less than that"
            )

    def _flood_rate(self) -> float:
        """Requests a second of one GPU when all come at once."""
        flood = replace(self.traffic, rate=None, requests=6 * self.max_batch_size)
        return Cluster(self.costs, flood, 1, self.max_batch_size).run().req_per_s
