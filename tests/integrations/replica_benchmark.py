"""How much more several engines of a cluster do than one, where each step only sleeps.

    python -m tests.integrations.replica_benchmark --output bench/results/replicas.csv

One cluster after the other, each with HAProxy. 64 clients ask about 64 pictures, each client again as soon as it is
answered. The machine computes next to nothing, so what is lost is lost by routing and transport.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

from ray import cloudpickle

from kestrel.bench.results import append_row, command_parser, environment, machine_load
from kestrel.config import RuntimeConfig
from kestrel.ready_model import ReadyModel
from kestrel.runtime.contract import StepPlan
from kestrel.runtime.fake import FakeRuntime, FakeStep
from tests.engine.fake_engine import fake_limits, fake_ready
from tests.integrations import ray_clusters
from tests.integrations.endpoints import free_port

CLIENTS = 64
PICTURES = 64
NAP_S = 0.2


class SleepingRuntime(FakeRuntime):
    def __init__(self, max_batch_size: int, step_s: float) -> None:
        super().__init__(fake_limits(max_batch_size=max_batch_size), vocab_size=320)
        self._step_s = step_s

    def launch(self, plan: StepPlan) -> FakeStep:
        time.sleep(self._step_s)
        return super().launch(plan)


def load_sleeping(step_s: float, config: RuntimeConfig) -> ReadyModel:
    return fake_ready(SleepingRuntime(config.max_batch_size, step_s))


def seconds_of(num_replicas: int, num_rows: int, num_requests: int, step_s: float) -> float:
    with ray_clusters.ray_cluster(free_port(), haproxy=True) as url:
        ray_clusters.deploy(
            partial(load_sleeping, step_s),
            replicas=num_replicas,
            max_batch_size=num_rows,
        )
        while not ray_clusters.engines_are_up(num_replicas):
            time.sleep(NAP_S)
        asks = [ray_clusters.places_ask(number, stream=False, num_pictures=PICTURES) for number in range(num_requests)]
        began_s = time.monotonic()
        asyncio.run(ray_clusters.crowd(url, asks, CLIENTS))
        return time.monotonic() - began_s


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4], help="engines; the first is compared with")
    parser.add_argument("--rows", type=int, default=8, help="requests that one engine runs at the same time")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--step-ms", type=float, default=100.0, help="that each step sleeps")
    asked = parser.parse_args()
    cloudpickle.register_pickle_by_value(__import__(load_sleeping.__module__, fromlist=["load_sleeping"]))
    first_s = None
    for num_replicas in asked.replicas:
        load = machine_load()
        took_s = seconds_of(num_replicas, asked.rows, asked.requests, asked.step_ms / 1000)
        first_s = first_s or took_s
        row = {
            **environment(), **load, "replicas": num_replicas, "rows": asked.rows, "step_ms": asked.step_ms,
            "clients": CLIENTS, "requests": asked.requests, "seconds": took_s,
            "times": first_s / took_s,
        }  # fmt: skip
        print(f"{num_replicas} engines: {took_s:.1f} s, {first_s / took_s:.2f} times as fast as {asked.replicas[0]}")
        append_row(Path(asked.output) if asked.output else None, row)


if __name__ == "__main__":
    main()
