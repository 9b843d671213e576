"""What HTTP adds to a request, and what it leaves of the engine's throughput, with the embedded model on this machine.

    python -m kestrel.bench.http_overhead --output bench/results/http.csv

`kestrel serve` runs beside engines that are called directly, with the same settings and the same requests; this
process drives all of them in short turns, so that other work on the machine hits them alike: the same turn was seen to
take 114 and 183 ms of CPU a request within half a minute. The engines are two: `engine` is one as it comes, and
`apart` has its model in a process of its own, as the server has on a CPU under Linux: there it is like for like.
- latency: one request after the other; the median over the rounds of each side's p50, and of their differences
- throughput: many callers at once; the median over the rounds of each side's rate, and of their ratios
All are started several times, since a process may be a tenth slower or faster than another of the same program.
CPU seconds are those of the server's and of the engine's processes; the client's own are not among them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, cycle, islice, permutations
from pathlib import Path
from statistics import median

import torch

from kestrel.bench.http_sides import DirectEngine, HttpServer, Round, serve_turns
from kestrel.bench.http_workloads import WORKLOADS, Workload
from kestrel.bench.rows import append_row, environment
from kestrel.config import RuntimeConfig
from kestrel.engine.compute_process import can_compute_apart

HTTP = "http"


@dataclass(frozen=True)
class Comparison:
    """The rounds of each side; those of one number took place one after the other."""

    sides: Mapping[str, list[Round]]

    def rows(self, workload: Workload) -> list[dict[str, object]]:
        name = {"workload": workload.name, "concurrency": workload.concurrency, "rounds": len(self.sides[HTTP])}
        return [{**name, "metric": metric, "value": value} for metric, value in self.figures(workload).items()]

    def figures(self, workload: Workload) -> Mapping[str, float]:
        compare = self._latencies if workload.concurrency == 1 else self._rates
        cpu = {f"{side}_cpu_ms": median(r.cpu_s for r in rounds) * 1000 for side, rounds in self.sides.items()}
        return {**compare(), **cpu}

    def _latencies(self) -> dict[str, float]:
        p50 = {f"{side}_p50_ms": median(r.p50_s for r in rounds) * 1000 for side, rounds in self.sides.items()}
        added = self._of_pairs(lambda engine, http: (http.p50_s - engine.p50_s) * 1000)
        return {**p50, **{f"http_adds_to_{side}_ms": value for side, value in added.items()}}

    def _rates(self) -> dict[str, float]:
        rates = {
            f"{side}_requests_per_s": median(r.requests_per_s for r in rounds) for side, rounds in self.sides.items()
        }
        shares = self._of_pairs(lambda engine, http: http.requests_per_s / engine.requests_per_s)
        return {**rates, **{f"http_share_of_{side}": value for side, value in shares.items()}}

    def _of_pairs(self, compare: Callable[[Round, Round], float]) -> dict[str, float]:
        """The median over the rounds, for each side but the server."""
        http = self.sides[HTTP]
        return {
            side: median(compare(*pair) for pair in zip(rounds, http, strict=True))
            for side, rounds in self.sides.items()
            if side != HTTP
        }


def measure(numbers: Sequence[int], rounds: int, starts: int) -> dict[int, Comparison]:
    """All sides in turns; who goes first, and after whom, changes from round to round. The first turns of a start do
    not count."""
    can_be_apart = can_compute_apart(RuntimeConfig(device="cpu"))
    names = ["engine", "apart", HTTP] if can_be_apart else ["engine", HTTP]
    found = {number: Comparison({name: [] for name in names}) for number in numbers}
    for start in range(starts):
        first_turn = start * (rounds + 1)
        with ExitStack() as stack:
            sides: dict[str, DirectEngine | HttpServer] = {HTTP: stack.enter_context(HttpServer(first_turn))}
            for name in names[:-1]:
                sides[name] = stack.enter_context(DirectEngine(apart=name == "apart", first_turn=first_turn))
            for number, taken in found.items():
                for name in names:
                    sides[name].turn(number)
                for order in islice(cycle(permutations(names)), rounds):
                    for name in order:
                        taken.sides[name].append(sides[name].turn(number))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="per start")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--workload", type=int, action="append", choices=range(len(WORKLOADS)), help="default: all")
    parser.add_argument("--output", type=Path, help="CSV file that gets a row per figure")
    for flag in ("--direct-engine", "--apart"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first-turn", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.direct_engine:
        torch.set_num_threads(1)
        serve_turns(args.apart, args.first_turn)
        return
    measured_on = {**environment(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    found = measure(args.workload or range(len(WORKLOADS)), args.rounds, args.starts)
    rows = chain.from_iterable(found[number].rows(WORKLOADS[number]) for number in found)
    for row in rows:
        print(f"{row['workload']}, {row['concurrency']} at once: {row['metric']} {row['value']:.4g}")
        if args.output is not None:
            append_row(args.output, {**measured_on, **row})


if __name__ == "__main__":
    main()
