"""Mixed requests over HTTP: does the memory of `kestrel serve` stay where it was?

    python -m kestrel.bench.http_memory --requests 20000 --output bench/results/http_memory.csv

Clients ask all skills about known and fresh small pictures, send what is refused, and leave in the middle. Resident
memory of the server and of the process that computes is read while they do. The figures of a row: after a fifth of
the requests, at the end, the most after that fifth, and a minute after the last request.
"""

from __future__ import annotations

import asyncio
import base64
import io
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from PIL import Image

from kestrel.bench.http_overhead import HttpServer
from kestrel.bench.processes import plain_environment, resident_mib
from kestrel.bench.results import append_row, command_parser, environment, machine_load

NUM_CLIENTS = 8
NUM_KNOWN = 6
SETTLED = 0.2
"""Share of the requests after which memory should have found its size."""
MIB = 2**20
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"count": {"type": "integer"}}}},
}
REFUSED: tuple[tuple[str, Any], ...] = (
    ("/v1/query", {"question": 5}),
    ("/v1/query", {"question": "Who?", "colour": "red"}),
    ("/v1/caption", {"image_url": "data:image/png;base64,AAAA"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 200_000}]}),
    ("/v1/chat/completions", {"model": "another", "messages": []}),
    ("/v1/completions", {"prompt": [9**9], "max_tokens": 1}),
    ("/v1/nothing", {}),
)


@dataclass
class MixedTraffic:
    """Makes requests by chance; the same seed makes the same ones."""

    dice: random.Random
    known: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.known = [self.fresh_picture() for _ in range(NUM_KNOWN)]

    def fresh_picture(self) -> str:
        """A small one of chance colours, as base64."""
        width, height = self.dice.randint(100, 220), self.dice.randint(100, 220)
        coarse = np.random.default_rng(self.dice.getrandbits(32)).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((width, height)).save(buffer, self.dice.choice(["PNG", "JPEG"]))
        return base64.b64encode(buffer.getvalue()).decode()

    async def send(self, client: httpx.AsyncClient) -> None:
        kinds: list[tuple[Callable[[httpx.AsyncClient], Awaitable[str]], int]] = [
            (self._about_a_known_picture, 40),
            (self._about_a_fresh_picture, 4),
            (self._in_words, 20),
            (self._in_a_format, 4),
            (self._refused, 22),
            (self._leaving, 10),
        ]
        [kind] = self.dice.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
        try:
            self.outcomes[await kind(client)] += 1
        except httpx.HTTPError as error:
            self.outcomes[type(error).__name__] += 1

    async def _about_a_known_picture(self, client: httpx.AsyncClient) -> str:
        picture = self.dice.choice(self.known)
        skill, fields = self.dice.choice(
            [
                ("query", {"question": "How many are there?", "settings": self._settings()}),
                ("caption", {"length": "short", "settings": self._settings()}),
                ("point", {"object": "bee", "settings": {"max_objects": 2}}),
                ("detect", {"object": "cross", "settings": {"max_objects": 1}}),
            ]
        )
        stream = self.dice.random() < 0.3
        answer = await client.post(f"/v1/{skill}", json={**fields, "image_url": picture, "stream": stream})
        return f"known {answer.status_code}"

    async def _about_a_fresh_picture(self, client: httpx.AsyncClient) -> str:
        body = {"question": "What is there?", "image_url": self.fresh_picture(), "settings": {"max_tokens": 2}}
        return f"fresh {(await client.post('/v1/query', json=body)).status_code}"

    async def _in_words(self, client: httpx.AsyncClient) -> str:
        question = f"{self.dice.random()} " + "word " * self.dice.choice([1, 10, 200])
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": self.dice.randint(1, 6)}
        if self.dice.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 5}
        return f"words {(await client.post('/v1/chat/completions', json=body)).status_code}"

    async def _in_a_format(self, client: httpx.AsyncClient) -> str:
        body = {"question": "How many?", "max_tokens": 8, "response_format": SCHEMA}
        return f"format {(await client.post('/v1/query', json=body)).status_code}"

    async def _refused(self, client: httpx.AsyncClient) -> str:
        route, body = self.dice.choice(REFUSED)
        return f"refused {(await client.post(route, json=body)).status_code}"

    async def _leaving(self, client: httpx.AsyncClient) -> str:
        """Half of them before anything is computed, half while words arrive."""
        picture = self.fresh_picture() if self.dice.random() < 0.1 else self.dice.choice(self.known)
        body = {"question": "What is there?", "image_url": picture, "stream": True, "settings": {"max_tokens": 200}}
        try:
            await asyncio.wait_for(client.post("/v1/query", json=body), self.dice.choice([0.005, 0.05, 0.5]))
        except asyncio.TimeoutError:
            return "left"
        return "left late"

    def _settings(self) -> dict[str, Any]:
        return {"max_tokens": self.dice.randint(1, 8), "temperature": self.dice.choice([0.0, 0.7])}


async def drive(url: str, pid: int, num_requests: int, seed: int, report: Callable[[str], None]) -> dict[str, float]:
    """Sends the requests and gives the figures of the server's process and of the one that computes."""
    traffic, readings, numbers = MixedTraffic(random.Random(seed)), [], iter(range(num_requests))

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=300) as session:
            for number in numbers:
                await traffic.send(session)
                readings.append(resident_mib(pid))
                if (number + 1) % max(1, num_requests // 20) == 0:
                    report(f"{number + 1:6d} {' '.join(f'{size:.0f}' for size in readings[-1])} MiB")

    began_s = time.monotonic()
    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    seconds = time.monotonic() - began_s
    report(f"{seconds:.0f} s; {dict(sorted(traffic.outcomes.items()))}")
    await asyncio.sleep(60 if num_requests >= 1000 else 1)
    rested, settled = resident_mib(pid), int(num_requests * SETTLED)
    figures = {"seconds": seconds}
    for index, name in enumerate(("server", "compute")[: len(rested)]):
        figures |= {
            f"{name}_mib_settled": readings[settled - 1][index],
            f"{name}_mib_most": max(reading[index] for reading in readings[settled:]),
            f"{name}_mib_end": readings[-1][index],
            f"{name}_mib_rested": rested[index],
        }
    return figures


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    load = machine_load()
    with HttpServer(environment=plain_environment()) as server:
        figures = asyncio.run(drive(server.url, server.pid, options.requests, options.seed, print))
    print({name: round(value, 1) for name, value in figures.items()})
    append_row(options.output, {**environment(), **load, "requests": options.requests, **figures})


if __name__ == "__main__":
    main()
