"""The two sides of a comparison: an engine that is called directly and `kestrel serve`, each in a process of its own.

Both answer the same requests with the same settings, a turn at a time.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from kestrel.bench.http_load.client import Connection, Target
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine

MAX_BATCH_SIZE = 16
WIDTH, HEIGHT = 640, 480
START_S = 120.0
SKILL = "query"


@dataclass(frozen=True)
class Workload:
    """The same request over and over; its picture, if it has one, is in the prefix cache after the first."""

    name: str
    num_tokens: int
    """Of each answer, exactly."""
    has_picture: bool
    concurrency: int
    num_requests: int
    """Per round."""

    @property
    def fields(self) -> dict[str, Any]:
        tokens = {"max_tokens": self.num_tokens, "min_tokens": self.num_tokens, "ignore_eos": True}
        return {"question": "What is there?", "reasoning": False, "settings": {"temperature": 0.0, **tokens}}

    def engine_fields(self) -> dict[str, Any]:
        return {**self.fields, "image": picture()} if self.has_picture else self.fields

    def body(self) -> bytes:
        image = {"image_url": base64.b64encode(picture()).decode()} if self.has_picture else {}
        return json.dumps({**self.fields, **image}).encode()


WORKLOADS = (
    Workload("1 token", 1, False, 1, 50),
    Workload("1 token, cached picture", 1, True, 1, 30),
    Workload("40 tokens, cached picture", 40, True, 16, 32),
    Workload("1 token, cached picture", 1, True, 16, 96),
)


@dataclass(frozen=True)
class Round:
    """One side, one turn."""

    p50_s: float
    requests_per_s: float
    cpu_s: float
    """Of the process that computes, per request."""


def picture() -> bytes:
    """Coarse patches of chance colours as a JPEG: what it shows does not matter to the time."""
    coarse = np.random.default_rng(0).integers(0, 256, (HEIGHT // 40, WIDTH // 40, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((WIDTH, HEIGHT)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


Caller: TypeAlias = Callable[[], Awaitable[None]]


async def drive(callers: Sequence[Caller], num_requests: int) -> tuple[float, float]:
    """Every caller asks again and again until `num_requests` are answered: p50 and requests per second."""
    numbers = iter(range(num_requests))
    times: list[float] = []

    async def client(call: Caller) -> None:
        for _ in numbers:
            started_s = time.perf_counter()
            await call()
            times.append(time.perf_counter() - started_s)

    began_s = time.perf_counter()
    await asyncio.gather(*(client(call) for call in callers))
    return median(times), num_requests / (time.perf_counter() - began_s)


# ---------------------------------------------------------------------- the engine alone


class DirectEngine:
    """An engine in a process of its own; a line with a workload's number is a turn, the answer a line of JSON."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "kestrel.bench.http_overhead", "--direct-engine"]
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


async def serve_turns() -> None:
    """The other end of `DirectEngine`."""
    config = RuntimeConfig(device="cpu", max_batch_size=MAX_BATCH_SIZE)
    async with await InferenceEngine.create(config) as engine:
        while line := await asyncio.to_thread(sys.stdin.readline):
            workload = WORKLOADS[int(line)]
            fields = workload.engine_fields()

            async def call(fields: dict[str, Any] = fields, num_tokens: int = workload.num_tokens) -> None:
                result = await engine.run(SKILL, **fields)
                assert result.metrics.output_tokens == num_tokens

            cpu_before_s = time.process_time()
            p50_s, rate = await drive([call] * workload.concurrency, workload.num_requests)
            cpu_s = (time.process_time() - cpu_before_s) / workload.num_requests
            print(json.dumps(asdict(Round(p50_s, rate, cpu_s))), flush=True)


# ---------------------------------------------------------------------- the server


class HttpServer:
    """`kestrel serve` in a process of its own, asked over kept-alive connections."""

    def __init__(self) -> None:
        flags = ["--port", "0", "--device", "cpu", "--max-batch-size", str(MAX_BATCH_SIZE)]
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - closed with the process
        command = [sys.executable, "-m", "kestrel.main", "serve", *flags]
        self._process = subprocess.Popen(command, stderr=self._log, env=steady())
        self._url = self._address()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def turn(self, number: int) -> Round:
        workload = WORKLOADS[number]
        cpu_before_s = cpu_seconds_of(self._process.pid)
        p50_s, rate = asyncio.run(self._drive(workload))
        return Round(p50_s, rate, (cpu_seconds_of(self._process.pid) - cpu_before_s) / workload.num_requests)

    async def _drive(self, workload: Workload) -> tuple[float, float]:
        body, target = workload.body(), Target.of(f"{self._url}v1/{SKILL}")
        connections = [Connection(target) for _ in range(workload.concurrency)]

        async def call(connection: Connection) -> None:
            exchange = await connection.post(body)
            assert exchange.status == 200, exchange.body

        try:
            callers = [lambda connection=connection: call(connection) for connection in connections]
            return await drive(callers, workload.num_requests)
        finally:
            for connection in connections:
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


def steady() -> dict[str, str]:
    """The environment of both: one thread each, and freed memory kept, because whether glibc gives it back after every
    step, at up to half the speed, is a matter of luck."""
    kept = str(2**30)
    return {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": kept, "MALLOC_MMAP_THRESHOLD_": kept}


def cpu_seconds_of(pid: int) -> float:
    """User and system time of a running process; not a number where the system does not tell."""
    path = Path(f"/proc/{pid}/stat")
    if not path.exists():
        return float("nan")
    fields = path.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
