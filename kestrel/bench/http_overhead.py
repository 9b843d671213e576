"""What HTTP adds to a request, and what it leaves of the engine's throughput, with the embedded model on this machine.

    python -m kestrel.bench.http_overhead --output bench/results/http.csv

`kestrel serve` runs beside an engine that is called directly, with the same settings and the same requests; this
process drives both in short turns, so that other work on the machine hits both alike: the same turn was seen to take
114 and 183 ms of CPU a request within half a minute. In one thing they differ: on a CPU under Linux the server's model
has a process of its own, which the engine called directly has not. The shares of throughput are those of what users
get, not of HTTP alone.
- latency: one request after the other; the median over the rounds of each side's p50, and of their difference
- throughput: many callers at once; the median over the rounds of each side's rate, and of their ratio
Both are started several times, since a process may be a tenth slower or faster than another of the same program.
CPU seconds are those of the server's and of the engine's process; the client's own are not among them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from kestrel.bench.http_sides import DirectEngine, HttpServer, Round, serve_turns
from kestrel.bench.http_workloads import WORKLOADS, Workload
from kestrel.bench.rows import append_row, environment


@dataclass(frozen=True)
class Comparison:
    direct: list[Round]
    http: list[Round]

    def rows(self, workload: Workload) -> list[dict[str, object]]:
        name = {"workload": workload.name, "concurrency": workload.concurrency, "rounds": len(self.http)}
        return [{**name, "metric": metric, "value": value} for metric, value in self.figures(workload).items()]

    def figures(self, workload: Workload) -> Mapping[str, float]:
        pairs = list(zip(self.direct, self.http, strict=True))
        cpu = {
            "engine_cpu_ms": median(r.cpu_s for r in self.direct) * 1000,
            "http_cpu_ms": median(r.cpu_s for r in self.http) * 1000,
        }
        if workload.concurrency == 1:
            return {
                "engine_p50_ms": median(r.p50_s for r in self.direct) * 1000,
                "http_p50_ms": median(r.p50_s for r in self.http) * 1000,
                "http_adds_ms": median(http.p50_s - direct.p50_s for direct, http in pairs) * 1000,
                **cpu,
            }
        return {
            "engine_requests_per_s": median(r.requests_per_s for r in self.direct),
            "http_requests_per_s": median(r.requests_per_s for r in self.http),
            "http_share": median(http.requests_per_s / direct.requests_per_s for direct, http in pairs),
            **cpu,
        }


def measure(numbers: Sequence[int], rounds: int, starts: int) -> dict[int, Comparison]:
    """Both sides in turns; who goes first changes from round to round. The first turns of a start do not count."""
    found = {number: Comparison([], []) for number in numbers}
    for _ in range(starts):
        with ExitStack() as stack:
            http, direct = stack.enter_context(HttpServer()), stack.enter_context(DirectEngine())
            for number, taken in found.items():
                sides: list[tuple[DirectEngine | HttpServer, list[Round]]] = [
                    (direct, taken.direct),
                    (http, taken.http),
                ]
                for side, _ in sides:
                    side.turn(number)
                for index in range(rounds):
                    for side, turns in sides if index % 2 == 0 else reversed(sides):
                        turns.append(side.turn(number))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="per start")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--workload", type=int, action="append", choices=range(len(WORKLOADS)), help="default: all")
    parser.add_argument("--output", type=Path, help="CSV file that gets a row per figure")
    parser.add_argument("--direct-engine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.direct_engine:
        torch.set_num_threads(1)
        asyncio.run(serve_turns())
        return
    measured_on = {**environment(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    found = measure(args.workload or range(len(WORKLOADS)), args.rounds, args.starts)
    rows = itertools.chain.from_iterable(found[number].rows(WORKLOADS[number]) for number in found)
    for row in rows:
        print(f"{row['workload']}, {row['concurrency']} at once: {row['metric']} {row['value']:.4g}")
        if args.output is not None:
            append_row(args.output, {**measured_on, **row})


if __name__ == "__main__":
    main()
