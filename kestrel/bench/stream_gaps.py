"""How evenly answers stream while pictures and long prompts come in.

    python -m kestrel.bench.stream_gaps --random MD2 --output bench/results/stream_gaps.csv

Half of the rows write long answers. The other half are clients that ask one short question after the other, in turn
about a fresh picture of 13 crops and behind a prompt of a thousand words. Measured are the gaps between two tokens of
the long answers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence

import numpy as np

from kestrel.bench.engine import load_model
from kestrel.bench.results import append_row, command_parser, environment, machine_load
from kestrel.bench.workloads import QUESTION, Answered, Ask, answer, percentiles
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.families import ready_from
from kestrel.known_models import random_names

SETTINGS = ("max_prefill_tokens", "streaming_prefill_tokens")
LONG_PROMPT_WORDS = 1000
SHORT_TOKENS = 3
PICTURE_SIZE = (1500, 2000)
"""Height and width; cut into 3 × 4 tiles."""


def query(question: str, picture: np.ndarray | None, tokens: int, read_along: bool = False) -> Ask:
    settings = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    fields = {"image": picture, "question": question, "reasoning": False, "settings": settings}
    return Ask("query", {**fields, "read_along": read_along}, tokens)


def intruders(seed: int) -> Iterator[Ask]:
    """Pictures and long prompts in turn, none of them seen before."""
    dice = np.random.default_rng(seed)
    for index in itertools.count():
        picture = dice.integers(0, 256, (*PICTURE_SIZE, 3), dtype=np.uint8)
        yield query(QUESTION, picture, SHORT_TOKENS)
        words = [f"{seed}-{index}", *["here"] * LONG_PROMPT_WORDS, QUESTION]
        yield query(" ".join(words), None, SHORT_TOKENS)


async def measure(engine: InferenceEngine, tokens: int) -> dict[str, float | int]:
    num_streams = engine.max_batch_size // 2
    asked: list[Answered] = []

    async def intrude(seed: int) -> None:
        for ask in intruders(seed):
            asked.append(await answer(engine, ask))

    clients = [asyncio.create_task(intrude(seed)) for seed in range(engine.max_batch_size - num_streams)]

    async def stream_all(num_tokens: int) -> list[Answered]:
        ask = query(QUESTION, None, num_tokens, read_along=True)
        return await asyncio.gather(*(answer(engine, ask) for _ in range(num_streams)))

    await stream_all(tokens)  # warm-up: what the device runs for the first time takes longer
    asked.clear()
    began_s = time.perf_counter()
    streams = await stream_all(tokens)
    took_s = time.perf_counter() - began_s
    num_asked = len(asked)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    gaps_ms = [gap * 1000 for one in streams for gap in one.metrics.token_intervals_s]
    return {
        "streams": num_streams,
        "tokens": tokens,
        "intruders": num_asked,
        "intruders_per_s": num_asked / took_s,
        **percentiles("token_gap", gaps_ms, (50, 95, 99, 100)),
        "p99_over_median": float(np.percentile(gaps_ms, 99) / np.percentile(gaps_ms, 50)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--random", choices=random_names(), required=True)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    for name in SETTINGS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    args = parser.parse_args(argv)
    settings = {name: value for name in SETTINGS if (value := vars(args)[name]) is not None}
    config = RuntimeConfig(max_batch_size=args.rows, **settings)
    ready = ready_from(load_model(config, args.random), config)

    async def run() -> dict[str, float | int]:
        async with InferenceEngine.start(config, ready) as engine:
            return await measure(engine, args.tokens)

    figures = asyncio.run(run())
    print(" ".join(f"{name}={value:.4g}" for name, value in figures.items()))
    told = " ".join(f"{name}={value}" for name, value in settings.items())
    append_row(args.output, {**environment(), **machine_load(), "model": args.random, "settings": told, **figures})


if __name__ == "__main__":
    main()
