"""What a user waits for and what it takes: the embedded model on this machine's CPU.

    python -m kestrel.bench.embedded --output bench/results/embedded.csv

The demonstration is timed from the start of its process to its end. The other figures come from a process of its own
as well: loading an engine, a query about a picture of 640 x 480 once the engine is warm (a fresh picture each time, so
that nothing comes from the prefix cache), and the memory that process held at most. Every time comes with the seconds
of CPU that it took, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kestrel.bench.processes import status_mib
from kestrel.bench.results import append_row, command_parser, environment, machine_load
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine

WIDTH, HEIGHT = 640, 480
QUESTION = "How many stars are there?"


@dataclass(frozen=True, slots=True)
class Took:
    seconds: float
    cpu_seconds: float
    """Of all threads together."""


@dataclass(frozen=True, slots=True)
class EngineFigures:
    load: Took
    warm_query: Took
    """Medians."""
    peak_rss_gb: float


def time_demo() -> Took:
    """From the start of `kestrel demo` to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kestrel.main", "demo", "--save", str(Path(folder) / "demo.png")]
        start, cpu_start = time.perf_counter(), children_cpu_seconds()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return Took(time.perf_counter() - start, children_cpu_seconds() - cpu_start)


async def measure_engine(num_queries: int, size: tuple[int, int] = (WIDTH, HEIGHT)) -> EngineFigures:
    start, cpu_start = time.perf_counter(), time.process_time()
    async with await InferenceEngine.create(RuntimeConfig(model="kestrel-tiny", device="cpu")) as engine:
        load = Took(time.perf_counter() - start, time.process_time() - cpu_start)
        pictures = [made_picture(seed, size) for seed in range(num_queries + 1)]
        _, *warm = [await time_query(engine, picture) for picture in pictures]
    query = Took(statistics.median(t.seconds for t in warm), statistics.median(t.cpu_seconds for t in warm))
    return EngineFigures(load, query, peak_rss_gb())


async def time_query(engine: InferenceEngine, picture: NDArray[np.uint8]) -> Took:
    start, cpu_start = time.perf_counter(), time.process_time()
    result = await engine.query(picture, QUESTION, reasoning=False, temperature=0.0, max_new_tokens=8)
    assert result.metrics.cached_tokens == 0, "part of a fresh picture came from the cache"
    return Took(time.perf_counter() - start, time.process_time() - cpu_start)


def made_picture(seed: int, size: tuple[int, int] = (WIDTH, HEIGHT)) -> NDArray[np.uint8]:
    """Coarse patches of chance colours: what it shows does not matter to the time."""
    width, height = size
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 40, width // 40, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize(size))


def children_cpu_seconds() -> float:
    """Of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peak_rss_gb() -> float:
    """The most memory this process held. Linux: since its program started, where `ru_maxrss` also counts the one that
    started it. Elsewhere the unit is a kilobyte, on macOS a byte."""
    peak_mib = status_mib("VmHWM")
    if not math.isnan(peak_mib):
        return peak_mib * 2**20 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def measure_engine_apart(num_queries: int, size: tuple[int, int] = (WIDTH, HEIGHT)) -> EngineFigures:
    """In a process that has done nothing else."""
    options = ["--queries", str(num_queries), "--size", *map(str, size)]
    command = [sys.executable, "-m", "kestrel.bench.embedded", "--engine-only", *options]
    told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return EngineFigures(Took(**told["load"]), Took(**told["warm_query"]), told["peak_rss_gb"])


def rows(demo: Took, engine: EngineFigures, num_queries: int) -> list[dict[str, object]]:
    query = f"warm query, fresh {WIDTH}x{HEIGHT} picture, p50 of {num_queries}"
    times = {
        "kestrel demo, process start to end": demo,
        "InferenceEngine.create": engine.load,
        query: engine.warm_query,
    }
    return [
        *({"workload": name, "metric": "seconds", "value": took.seconds} for name, took in times.items()),
        *({"workload": name, "metric": "cpu_seconds", "value": took.cpu_seconds} for name, took in times.items()),
        {"workload": f"process after {num_queries} queries", "metric": "peak_rss_gb", "value": engine.peak_rss_gb},
    ]


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--queries", type=int, default=10)
    parser.add_argument("--size", type=int, nargs=2, default=(WIDTH, HEIGHT), help=argparse.SUPPRESS)
    parser.add_argument("--engine-only", action="store_true", help="print the engine's figures as JSON and stop")
    args = parser.parse_args()
    if args.engine_only:
        print(json.dumps(asdict(asyncio.run(measure_engine(args.queries, tuple(args.size))))))
        return
    measured_on = {**environment(), **machine_load()}
    found = rows(time_demo(), measure_engine_apart(args.queries), args.queries)
    for row in found:
        print(f"{row['workload']}: {row['value']:.3g} {row['metric']}")
        append_row(args.output, {**measured_on, **row})


if __name__ == "__main__":
    main()
