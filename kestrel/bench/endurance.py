"""Mixed traffic for minutes: does memory stay where it was planned?

    python -m kestrel.bench.endurance --random MD2 --minutes 10 --output bench/results/endurance.csv

More clients than rows ask all skills about pictures of all sizes, some of them again, with long and short prompts and
answers; some read along, some leave in the middle. Memory is read every second, of the device and of the host: once
when the first minute is over, and the most after that. Nothing but the client's own leaving may end a request.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kestrel.bench.engine import load_model
from kestrel.bench.processes import status_mib
from kestrel.bench.results import append_row, command_parser, environment, machine_load
from kestrel.bench.workloads import QUESTION
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.families import ready_from
from kestrel.known_models import random_names

CLIENTS_PER_ROW = 1.5
SHARE_THAT_LEAVES = 0.05
SHARE_SEEN_BEFORE = 0.3
SIDES = (60, 378, 700, 1100, 1600, 2000)
SETTLED = 0.1
"""Share of the time after which memory should have found its size."""
GIB = 2**30


@dataclass
class Traffic:
    """What clients ask, and what became of it."""

    dice: random.Random
    max_tokens: int
    seen: list[np.ndarray] = field(default_factory=list)
    num_answered: int = 0
    num_left: int = 0
    num_tokens: int = 0

    def ask(self) -> tuple[str, dict[str, Any]]:
        dice = self.dice
        settings: dict[str, Any] = {"max_tokens": dice.randint(1, self.max_tokens)}
        settings["temperature"] = dice.choice([0, 0.8])
        kind = dice.choice(["query", "text", "caption", "point", "detect"])
        if kind == "text":
            words = ["here"] * dice.choice([0, 20, 900])
            return "query", {"question": " ".join([str(dice.random()), *words, QUESTION]), "settings": settings}
        if kind == "query":
            return "query", {"image": self.picture(), "question": QUESTION, "reasoning": False, "settings": settings}
        if kind == "caption":
            return "caption", {"image": self.picture(), "length": "normal", "settings": settings}
        return kind, {"image": self.picture(), "object": "bar", "settings": {"max_objects": dice.randint(1, 8)}}

    def picture(self) -> np.ndarray:
        if self.seen and self.dice.random() < SHARE_SEEN_BEFORE:
            return self.dice.choice(self.seen)
        height, width = self.dice.choice(SIDES), self.dice.choice(SIDES)
        made = np.random.default_rng(self.dice.getrandbits(32)).integers(0, 256, (height, width, 3), dtype=np.uint8)
        self.seen = [*self.seen[-7:], made]
        return made


async def client(engine: InferenceEngine, traffic: Traffic, until_s: float) -> None:
    while time.monotonic() < until_s:
        skill, fields = traffic.ask()
        leaves_at = traffic.dice.randint(0, 5) if traffic.dice.random() < SHARE_THAT_LEAVES else None
        stream = await engine.run(skill, stream=True, read_along=traffic.dice.random() < 0.5, **fields)
        async with stream:
            if leaves_at is not None:
                await leave_after(stream, leaves_at)
                traffic.num_left += 1
                continue
            result = await stream.result()
        traffic.num_answered += 1
        traffic.num_tokens += result.metrics.output_tokens


async def leave_after(stream: Any, num_chunks: int) -> None:
    count = 0
    async for _ in stream:
        count += 1
        if count >= num_chunks:
            return


@dataclass
class Watch:
    """Memory, read every second."""

    device: torch.device
    readings: list[tuple[float, float]] = field(default_factory=list)
    """GiB of the device that this process's allocator holds, and of the host."""

    async def run(self) -> None:
        while True:
            held = torch.cuda.memory_reserved(self.device) / GIB if self.device.type == "cuda" else 0.0
            self.readings.append((held, status_mib() / 1024))
            await asyncio.sleep(1.0)

    def figures(self) -> dict[str, float]:
        first = max(1, int(SETTLED * len(self.readings)))
        early, late = self.readings[:first], self.readings[first:] or self.readings[-1:]
        names = ("device_gib", "host_gib")
        return {
            **{f"{name}_settled": early[-1][i] for i, name in enumerate(names)},
            **{f"{name}_most": max(reading[i] for reading in late) for i, name in enumerate(names)},
            **{f"{name}_end": late[-1][i] for i, name in enumerate(names)},
        }


async def endure(config: RuntimeConfig, ready: Any, minutes: float, device: torch.device) -> dict[str, float | int]:
    traffic, watch = Traffic(random.Random(0), max_tokens=60), Watch(device)
    async with InferenceEngine.start(config, ready) as engine:
        watching = asyncio.create_task(watch.run())
        until_s = time.monotonic() + 60 * minutes
        num_clients = int(CLIENTS_PER_ROW * engine.max_batch_size)
        await asyncio.gather(*(client(engine, traffic, until_s) for _ in range(num_clients)))
        watching.cancel()
        num_used_pages = engine.snapshot().num_used_pages
    return {
        "minutes": minutes,
        "answered": traffic.num_answered,
        "left": traffic.num_left,
        "tokens": traffic.num_tokens,
        "pages_held_at_end": num_used_pages,
        **watch.figures(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--random", choices=random_names(), required=True)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_args(argv)
    config = RuntimeConfig(max_batch_size=args.rows)
    loaded = load_model(config, args.random)
    ready = ready_from(loaded, config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    planned_bytes = 0 if ready.memory_plan is None or device.type != "cuda" else ready.memory_plan.total_bytes
    planned = {"device_gib_planned": planned_bytes / GIB}
    figures = {**planned, **asyncio.run(endure(config, ready, args.minutes, device))}
    print(" ".join(f"{name}={value:.4g}" for name, value in figures.items()))
    append_row(args.output, {**environment(), **machine_load(), "model": args.random, "rows": args.rows, **figures})


if __name__ == "__main__":
    main()
