"""The sides of a comparison: `kestrel serve`, and engines that are called directly, whose model is in a process of its
own as the server's may be, or not.

All answer the same requests with the same settings, a turn at a time.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from kestrel.bench.http_load.client import Connection, Target
from kestrel.bench.http_workloads import WORKLOADS, Workload
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.engine.compute_process import ComputeProcess

MAX_BATCH_SIZE = 16
START_S = 120.0
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
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=steady()
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
            callers = direct_callers(engine, workload, turn)
            cpu_before_s = cpu_seconds_of(os.getpid())
            p50_s, rate = await drive(callers, workload.num_requests, turn)
            cpu_s = (cpu_seconds_of(os.getpid()) - cpu_before_s) / workload.num_requests
            print(json.dumps(asdict(Round(p50_s, rate, cpu_s))), flush=True)


async def _engine(config: RuntimeConfig, process: ComputeProcess | None) -> InferenceEngine:
    if process is None:
        return await InferenceEngine.create(config)
    return InferenceEngine.start(config, await asyncio.to_thread(process.ready))


def direct_callers(engine: InferenceEngine, workload: Workload, turn: int) -> list[Caller]:
    pictures = workload.pictures(turn)

    async def call(number: int) -> None:
        skill = workload.skill_of(number)
        result = await engine.run(skill, image=pictures[number], **workload.fields_of(skill))
        assert workload.num_tokens in (None, result.metrics.output_tokens)

    return [call] * workload.concurrency


# ---------------------------------------------------------------------- the server


class HttpServer:
    """`kestrel serve` in a process of its own, asked over kept-alive connections."""

    def __init__(self, first_turn: int = 0, *flags: str, environment: dict[str, str] | None = None) -> None:
        flags = ("--port", "0", "--device", "cpu", "--max-batch-size", str(MAX_BATCH_SIZE), *flags)
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - closed with the process
        command = [sys.executable, "-m", "kestrel.main", "serve", *flags]
        self._process = subprocess.Popen(command, stderr=self._log, env=environment or steady())
        self.url = self._address()
        self._first_turn = first_turn
        self._turns: Counter[Workload] = Counter()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def turn(self, number: int) -> Round:
        workload = WORKLOADS[number]
        turn = self._first_turn + self._turns[workload]
        self._turns[workload] += 1
        cpu_before_s = cpu_seconds_of(self._process.pid)
        p50_s, rate = asyncio.run(self._drive(workload, turn))
        return Round(p50_s, rate, (cpu_seconds_of(self._process.pid) - cpu_before_s) / workload.num_requests)

    async def _drive(self, workload: Workload, turn: int) -> tuple[float, float]:
        pictures = workload.pictures(turn)
        skills = [workload.skill_of(number) for number in range(workload.num_requests)]
        bodies = [body_of(workload.fields_of(skill), image) for skill, image in zip(skills, pictures, strict=True)]
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

    def _address(self) -> str:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            found = re.search(r"API: (http://\S+/)", Path(self._log.name).read_text(encoding="utf-8"))
            if found is not None:
                return found.group(1)
            time.sleep(0.05)
        self._process.kill()
        raise RuntimeError(f"the server did not start: {Path(self._log.name).read_text(encoding='utf-8')}")


def body_of(fields: dict[str, Any], image: bytes | None) -> bytes:
    picture = {} if image is None else {"image_url": base64.b64encode(image).decode()}
    return json.dumps({**fields, **picture}).encode()


def steady() -> dict[str, str]:
    """The environment of both: one thread each, and freed memory kept, because whether glibc gives it back after every
    step, at up to half the speed, is a matter of luck."""
    kept = str(2**30)
    return {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": kept, "MALLOC_MMAP_THRESHOLD_": kept}


def plain() -> dict[str, str]:
    """The environment as an operator has it, but for one thread of the model."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def cpu_seconds_of(pid: int) -> float:
    """User and system time of a running process and of those it started; nan where the system does not tell."""
    path = Path(f"/proc/{pid}")
    try:
        fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
        children = (path / "task" / str(pid) / "children").read_text().split()
    except OSError:
        return float("nan")
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(cpu_seconds_of, map(int, children)))
