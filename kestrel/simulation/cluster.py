"""Several simulated engines behind the real router: events in the order of their times.

A request leaves its client, goes over the link that all share, is routed by what it is about and by the load, and is
answered by one replica. The router knows at once who has been answered.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kestrel.request import RequestMetrics, StreamUpdate
from kestrel.routing import ContentRouter, ReplicaLoad, prefix_keys
from kestrel.simulation.costs import StepCosts
from kestrel.simulation.replica import Replica
from kestrel.simulation.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to."""

    gpus: int
    requests: int
    seconds: float
    """From the first request to the last answer."""
    req_per_s: float
    latency_p50_ms: float
    latency_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    token_gap_p50_ms: float
    token_gap_p99_ms: float
    gpu_use: float
    """Share of the time."""
    hit_rate: float
    """Positions of prompts that were found in a prefix cache."""
    picture_hit_rate: float
    """Of the requests about a picture that somebody had asked about before, those that found it computed."""
    queue_p50_ms: float
    queue_p99_ms: float
    mean_waiting: float
    """Requests that had been sent and were in no step yet, on average."""
    link_use: float


@dataclass(slots=True)
class _Answer:
    latency_s: float
    metrics: RequestMetrics
    repeats: bool


@dataclass
class Cluster:
    costs: StepCosts
    traffic: Traffic
    gpus: int
    max_batch_size: int

    def __post_init__(self) -> None:
        names = [f"gpu{index}" for index in range(self.gpus)]
        self._replicas = {name: Replica(self.costs, self.max_batch_size, self.traffic.crops) for name in names}
        self._router = ContentRouter()
        for name in names:
            self._router.add_replica(name)
        self._unanswered = dict.fromkeys(names, 0)
        self._answers: list[_Answer] = []
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = count()
        self._sent: dict[str, tuple[float, bool]] = {}
        self._seen: set[str] = set()
        self._link_free_s = 0.0
        self._num_sent = 0
        self.traffic.check(self.costs)
        self._requests = self.traffic.make(self.costs)

    def run(self) -> Figures:
        for sent_s in self.traffic.send_times():
            self._leave_client(sent_s)
        ended_s = 0.0
        while self._events:
            now_s, _, kind, what = heapq.heappop(self._events)
            match kind:
                case "arrives":
                    self._route(now_s, what)
                case "turn":
                    self._turn(now_s, what)
                case _:
                    self._answered(now_s, *what)
                    ended_s = now_s
        return self._figures(ended_s)

    def _at(self, time_s: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), kind, what))

    def _leave_client(self, now_s: float) -> None:
        if self._num_sent < self.traffic.requests:
            self._num_sent += 1
            self._link_free_s = max(now_s, self._link_free_s) + self.traffic.picture_s
            self._at(self._link_free_s, "arrives", now_s)

    def _route(self, now_s: float, sent_s: float) -> None:
        """Requests arrive in the order in which they were sent, and are made when they do."""
        request = next(self._requests)
        request.submitted_s = sent_s
        self._sent[request.request_id] = sent_s, any(digest in self._seen for digest in request.images)
        self._seen.update(request.images)
        keys = prefix_keys({}, list(request.images), adapter=None, tenant=None)
        rows = self.max_batch_size
        loads = {
            name: ReplicaLoad(num_running=min(number, rows), num_waiting=max(0, number - rows), max_running=rows)
            for name, number in self._unanswered.items()
        }
        name = self._router.rank(keys, None, loads)[0]
        self._router.note(name, keys)
        self._unanswered[name] += 1
        replica = self._replicas[name]
        replica.send(now_s, request)
        if replica.is_idle:
            replica.is_idle = False
            self._at(now_s, "turn", name)

    def _turn(self, now_s: float, name: str) -> None:
        replica = self._replicas[name]
        next_s, updates = replica.turn(now_s)
        replica.is_idle = next_s is None
        if next_s is not None:
            self._at(next_s, "turn", name)
        for update in updates:
            if update.finish_reason is not None and next_s is not None:
                self._at(next_s, "answered", (name, update))

    def _answered(self, now_s: float, name: str, update: StreamUpdate) -> None:
        assert update.metrics is not None
        self._unanswered[name] -= 1
        sent_s, repeats = self._sent.pop(update.request_id)
        self._answers.append(_Answer(now_s - sent_s, update.metrics, repeats))
        if self.traffic.clients is not None:
            self._leave_client(now_s)

    def _figures(self, ended_s: float) -> Figures:
        metrics = [answer.metrics for answer in self._answers]
        gaps_ms = [gap * 1e3 for one in metrics for gap in one.token_intervals_s]
        queues_ms = [one.queue_time_ms for one in metrics]
        repeating = [answer for answer in self._answers if answer.repeats]
        positions = int(self.costs.num_image_positions)
        found = sum(answer.metrics.cached_tokens >= positions for answer in repeating)
        latencies_ms = [answer.latency_s * 1e3 for answer in self._answers]
        return Figures(
            gpus=self.gpus,
            requests=len(metrics),
            seconds=ended_s,
            req_per_s=len(metrics) / ended_s,
            latency_p50_ms=percentile(latencies_ms, 50),
            latency_p99_ms=percentile(latencies_ms, 99),
            ttft_p50_ms=percentile([one.ttft_ms for one in metrics], 50),
            ttft_p99_ms=percentile([one.ttft_ms for one in metrics], 99),
            token_gap_p50_ms=percentile(gaps_ms, 50),
            token_gap_p99_ms=percentile(gaps_ms, 99),
            gpu_use=sum(replica.busy_s for replica in self._replicas.values()) / self.gpus / ended_s,
            hit_rate=sum(one.cached_tokens for one in metrics) / sum(one.input_tokens for one in metrics),
            picture_hit_rate=found / len(repeating) if repeating else 0.0,
            queue_p50_ms=percentile(queues_ms, 50),
            queue_p99_ms=percentile(queues_ms, 99),
            mean_waiting=sum(queues_ms) / 1e3 / ended_s,
            link_use=len(metrics) * self.traffic.picture_s / ended_s,
        )


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest ones; 0 where there are none."""
    if not values:
        return 0.0
    ranked = sorted(values)
    place = (len(ranked) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)
