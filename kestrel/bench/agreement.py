"""How often answers stay the same when the way they are computed changes.

    python -m kestrel.bench.agreement --output bench/results/agreement.csv

The embedded model (or --random, or --weights) answers greedy questions of several skills about drawn charts: one after
the other and all at once, with CUDA graphs and without. The sums inside are the same, but not their order, so in
bfloat16 two tokens that are nearly equally likely may change places; from there on an answer goes its own way.
Compared with one after the other in graphs: the share of equal answers, and of characters up to the first difference.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from kestrel.bench.charts import draw_chart
from kestrel.bench.engine import load_model
from kestrel.bench.results import append_row, command_parser, environment
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.families import ready_from
from kestrel.known_models import random_names
from kestrel.runtime.device import choose_device, choose_dtype

ASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("query", {"question": "What is in this picture?", "reasoning": False}),
    ("query", {"question": "What colour is the background?", "reasoning": False}),
    ("query", {"question": "How many things are there?", "reasoning": True}),
    ("caption", {"length": "normal"}),
    ("detect", {"object": "bar"}),
    ("point", {"object": "bar"}),
)
TEXT = {"temperature": 0, "max_tokens": 40}
OBJECTS = {"max_objects": 8}


@dataclass(frozen=True)
class Way:
    name: str
    at_once: bool
    in_graphs: bool


WAYS = (
    Way("again", at_once=False, in_graphs=True),
    Way("all at once", at_once=True, in_graphs=True),
    Way("without graphs", at_once=False, in_graphs=False),
    Way("all at once without graphs", at_once=True, in_graphs=False),
)


async def answers(config: RuntimeConfig, loaded: Any, pictures: Sequence[bytes], way: Way) -> list[str]:
    """Of every question about every picture, as text."""
    config = replace(config, enable_cuda_graphs=way.in_graphs)
    asks = [(skill, {**fields, "image": picture}) for picture in pictures for skill, fields in ASKS]
    async with InferenceEngine.start(config, ready_from(loaded, config)) as engine:
        limit = asyncio.Semaphore(engine.max_batch_size if way.at_once else 1)

        async def one(skill: str, fields: dict[str, Any]) -> str:
            settings = TEXT if skill in ("query", "caption") else OBJECTS
            async with limit:
                result = await engine.run(skill, settings=settings, **fields)
            return json.dumps(result.output, sort_keys=True, default=str)

        return await asyncio.gather(*(one(skill, fields) for skill, fields in asks))


def agreement(expected: Sequence[str], seen: Sequence[str]) -> dict[str, float | int]:
    pairs = list(zip(expected, seen, strict=True))
    return {
        "answers": len(pairs),
        "equal": sum(a == b for a, b in pairs) / len(pairs),
        "equal_up_to": sum(common_length(a, b) / max(len(a), len(b)) for a, b in pairs) / len(pairs),
    }


def common_length(a: str, b: str) -> int:
    """Characters before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--random", choices=random_names())
    parser.add_argument("--weights")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pictures", type=int, default=20)
    args = parser.parse_args(argv)
    config = RuntimeConfig(model_path=args.weights, dtype=args.dtype, max_batch_size=16)
    loaded = load_model(config, args.random)
    pictures = [draw_chart(number) for number in range(args.pictures)]
    expected = asyncio.run(answers(config, loaded, pictures, WAYS[0]))
    device = choose_device(config)
    what = {"model": loaded.name, "device": device.type, "dtype": str(choose_dtype(config, device))}
    measured_on = environment()
    for way in WAYS:
        figures = agreement(expected, asyncio.run(answers(config, loaded, pictures, way)))
        print(f"{way.name}: " + " ".join(f"{name}={value:.4g}" for name, value in figures.items()))
        append_row(args.output, {**measured_on, **what, "way": way.name, **figures})


if __name__ == "__main__":
    main()
