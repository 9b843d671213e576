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
import asyncio
import base64
import gc
import io
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from itertools import chain, cycle, islice, permutations
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image

from kestrel.bench.http_load.client import Connection, Target
from kestrel.bench.processes import ServerProcess, cpu_seconds_of, steady_environment
from kestrel.bench.results import append_row, command_parser, environment
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.engine.compute_process import ComputeProcess, can_compute_apart

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


# ---------------------------------------------------------------------- what is asked


WIDTH, HEIGHT = 640, 480
SCENE = Path(__file__).parents[1] / "cli" / "demo_scene.png"
PART_WIDTH, PART_HEIGHT = 372, 279
SKILL = "query"


@dataclass(frozen=True)
class Workload:
    """The same question over and over; its picture, if it has one, is in the prefix cache after the first."""

    name: str
    num_tokens: int | None
    """Of each answer, exactly; None: answers as they come."""
    has_picture: bool
    concurrency: int
    num_requests: int
    """Per round."""

    def skill_of(self, number: int) -> str:
        """Of a request of a turn."""
        return SKILL

    def fields_of(self, skill: str) -> dict[str, Any]:
        tokens = {"max_tokens": self.num_tokens, "min_tokens": self.num_tokens, "ignore_eos": True}
        return {"question": "What is there?", "reasoning": False, "settings": {"temperature": 0.0, **tokens}}

    def pictures(self, turn: int) -> list[bytes | None]:
        """One for each request of a turn, made before its clock starts."""
        return [picture() if self.has_picture else None] * self.num_requests


class Labelling(Workload):
    """What people do to folders of pictures: each is new and asked about once, by one skill after the other."""

    def skill_of(self, number: int) -> str:
        return tuple(LABELS)[number % len(LABELS)]

    def fields_of(self, skill: str) -> dict[str, Any]:
        return LABELS[skill]

    def pictures(self, turn: int) -> list[bytes | None]:
        first = turn * self.num_requests
        return [_cut_out(number) for number in range(first, first + self.num_requests)]


LABELS: dict[str, dict[str, Any]] = {
    "query": {"question": "How many bees are there?", "reasoning": False, "settings": {"temperature": 0.0}},
    "caption": {"length": "short", "settings": {"temperature": 0.0}},
    "point": {"object": "cross"},
    "detect": {"object": "bee"},
}
WORKLOADS = (
    Workload("1 token", 1, False, 1, 50),
    Workload("1 token, cached picture", 1, True, 1, 30),
    Workload("40 tokens, cached picture", 40, True, 16, 32),
    Workload("1 token, cached picture", 1, True, 16, 480),
    Labelling("four skills, new pictures", None, True, 16, 32),
)


def picture() -> bytes:
    """Coarse patches of chance colours as a JPEG: what it shows does not matter to the time."""
    coarse = np.random.default_rng(0).integers(0, 256, (HEIGHT // 40, WIDTH // 40, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((WIDTH, HEIGHT)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def _cut_out(number: int) -> bytes:
    """A part of the demo's scene, one crop large, as a JPEG; hardly any two are the same."""
    with Image.open(SCENE) as opened:
        scene = opened.convert("RGB")
    dice = np.random.default_rng(number)
    left, top = int(dice.integers(scene.width - PART_WIDTH)), int(dice.integers(scene.height - PART_HEIGHT))
    buffer = io.BytesIO()
    scene.crop((left, top, left + PART_WIDTH, top + PART_HEIGHT)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


# ---------------------------------------------------------------------- the sides


MAX_BATCH_SIZE = 16
LATEST_BEGINNING_S = 0.05


@dataclass(frozen=True)
class Round:
    """One side, one turn."""

    p50_s: float
    requests_per_s: float
    cpu_s: float
    """Of the server's or the engine's processes, per request."""


Caller: TypeAlias = Callable[[int], Awaitable[None]]


async def drive(callers: Sequence[Caller], num_requests: int, turn: int = 0) -> tuple[float, float]:
    """Every caller asks again and again, with the number of its request, until `num_requests` are answered: p50 and
    requests per second. They begin at moments of chance, in each turn at others: the crowds in which they come from
    then on, which batches depend on, would be the same in every turn of a side and others on the other side."""
    dice = random.Random(turn)
    numbers = iter(range(num_requests))
    times: list[float] = []

    async def client(call: Caller, begins_s: float) -> None:
        await asyncio.sleep(begins_s)
        for number in numbers:
            started_s = time.perf_counter()
            await call(number)
            times.append(time.perf_counter() - started_s)

    began_s = time.perf_counter()
    latest_s = LATEST_BEGINNING_S if len(callers) > 1 else 0.0
    await asyncio.gather(*(client(call, dice.uniform(0.0, latest_s)) for call in callers))
    return median(times), num_requests / (time.perf_counter() - began_s)


# ---------------------------------------------------------------------- the engine alone


class DirectEngine:
    """A program that calls an engine; a line with a workload's number is a turn, the answer a line of JSON."""

    def __init__(self, *, apart: bool = False, first_turn: int = 0) -> None:
        """`apart`: its model has a process of its own."""
        flags = ["--direct-engine", "--first-turn", str(first_turn), *(["--apart"] if apart else [])]
        command = [sys.executable, "-m", "kestrel.bench.http_overhead", *flags]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=steady_environment()
        )

    def __enter__(self) -> DirectEngine:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def turn(self, number: int) -> Round:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return Round(**json.loads(self._process.stdout.readline()))


def serve_turns(apart: bool, first_turn: int) -> None:
    """The other end of `DirectEngine`."""
    config = RuntimeConfig(device="cpu", max_batch_size=MAX_BATCH_SIZE)
    with ComputeProcess(config) if apart else nullcontext() as process:
        asyncio.run(_serve_turns(config, process, first_turn))


async def _serve_turns(config: RuntimeConfig, process: ComputeProcess | None, first_turn: int) -> None:
    async with await _engine(config, process) as engine:
        gc.collect()
        gc.freeze()  # as the server does
        turns: Counter[Workload] = Counter()
        while line := await asyncio.to_thread(sys.stdin.readline):
            workload = WORKLOADS[int(line)]
            turn = first_turn + turns[workload]
            turns[workload] += 1
            callers = _direct_callers(engine, workload, turn)
            cpu_before_s = cpu_seconds_of(os.getpid())
            p50_s, rate = await drive(callers, workload.num_requests, turn)
            cpu_s = (cpu_seconds_of(os.getpid()) - cpu_before_s) / workload.num_requests
            print(json.dumps(asdict(Round(p50_s, rate, cpu_s))), flush=True)


async def _engine(config: RuntimeConfig, process: ComputeProcess | None) -> InferenceEngine:
    if process is None:
        return await InferenceEngine.create(config)
    return InferenceEngine.start(config, await asyncio.to_thread(process.ready))


def _direct_callers(engine: InferenceEngine, workload: Workload, turn: int) -> list[Caller]:
    pictures = workload.pictures(turn)

    async def call(number: int) -> None:
        skill = workload.skill_of(number)
        result = await engine.run(skill, image=pictures[number], **workload.fields_of(skill))
        assert workload.num_tokens in (None, result.metrics.output_tokens)

    return [call] * workload.concurrency


# ---------------------------------------------------------------------- the server


class HttpServer(ServerProcess):
    """`kestrel serve`, asked over kept-alive connections."""

    def __init__(self, first_turn: int = 0, environment: dict[str, str] | None = None) -> None:
        flags = ("--port", "0", "--device", "cpu", "--max-batch-size", str(MAX_BATCH_SIZE))
        super().__init__([sys.executable, "-m", "kestrel.main", "serve", *flags], environment or steady_environment())
        self.url = self.logged(r"API: (http://\S+/)")
        self._first_turn = first_turn
        self._turns: Counter[Workload] = Counter()

    def turn(self, number: int) -> Round:
        workload = WORKLOADS[number]
        turn = self._first_turn + self._turns[workload]
        self._turns[workload] += 1
        cpu_before_s = cpu_seconds_of(self.pid)
        p50_s, rate = asyncio.run(self._drive(workload, turn))
        return Round(p50_s, rate, (cpu_seconds_of(self.pid) - cpu_before_s) / workload.num_requests)

    async def _drive(self, workload: Workload, turn: int) -> tuple[float, float]:
        pictures = workload.pictures(turn)
        skills = [workload.skill_of(number) for number in range(workload.num_requests)]
        bodies = [_body_of(workload.fields_of(skill), image) for skill, image in zip(skills, pictures, strict=True)]
        targets = {skill: Target.of(f"{self.url}v1/{skill}") for skill in skills}
        connections = [
            {skill: Connection(target) for skill, target in targets.items()} for _ in range(workload.concurrency)
        ]

        def caller(to: dict[str, Connection]) -> Caller:
            async def call(number: int) -> None:
                exchange = await to[skills[number]].post(bodies[number])
                assert exchange.status == 200, exchange.body

            return call

        every = [one for to in connections for one in to.values()]
        try:
            await asyncio.gather(*(connection.open() for connection in every))
            return await drive([caller(to) for to in connections], workload.num_requests, turn)
        finally:
            for connection in every:
                connection.close()


def _body_of(fields: dict[str, Any], image: bytes | None) -> bytes:
    picture = {} if image is None else {"image_url": base64.b64encode(image).decode()}
    return json.dumps({**fields, **picture}).encode()


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="per start")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--workload", type=int, action="append", choices=range(len(WORKLOADS)), help="default: all")
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
        append_row(args.output, {**measured_on, **row})


if __name__ == "__main__":
    main()
