"""From the start of a process to its first answer, the weights in the page cache.

    python -m kestrel.bench.start --random MD2 --folder /tmp/md2 --output bench/results/start.csv

writes random weights into the folder unless it holds some, then starts the engine in a process of its own, once to fill
the page cache and then as often as asked; the medians make a row. With --weights DIR a model of yours is started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from kestrel.bench.results import append_row, command_parser, environment, machine_load
from kestrel.bench.workloads import Material, find_workload, question_pieces
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.families import write_random_model
from kestrel.known_models import random_names
from kestrel.models.locate import CONFIG_NAME

TOKENS = 3
FIGURES = ("process_s", "create_s", "first_answer_s", "start_s")
"""Until our own code runs (imports among it), loading, asking; and everything together, as the parent saw it."""


async def first_answer(config: RuntimeConfig, began_s: float, picture: bytes) -> dict[str, float]:
    """`began_s` is when the process was started, by the clock of all processes."""
    running_s = time.time()
    async with await InferenceEngine.create(config) as engine:
        created_s = time.time()
        workload = find_workload("chart9" if engine.profile.has_vision else "ids128")
        ask = workload.ask(Material([picture], TOKENS, engine.profile.stop_ids, engine.vocab_size), 0)
        await engine.run(ask.skill, **ask.fields)
        answered_s = time.time()
    times = (running_s - began_s, created_s - running_s, answered_s - created_s, answered_s - began_s)
    return dict(zip(FIGURES, times, strict=True))


def start_apart(weights: Path, device: str) -> dict[str, float]:
    """In a process that has done nothing else. The picture to ask about comes from here."""
    from kestrel.bench.charts import draw_chart  # noqa: PLC0415 - what is measured does not draw

    command = [sys.executable, "-m", "kestrel.bench.start", "--weights", str(weights), "--device", device]
    picture = draw_chart(0)
    told = subprocess.run([*command, "--began", repr(time.time())], check=True, stdout=subprocess.PIPE, input=picture)
    return json.loads(told.stdout)


def measure(weights: Path, device: str, rounds: int) -> dict[str, float]:
    start_apart(weights, device)
    runs = [start_apart(weights, device) for _ in range(rounds)]
    return {name: statistics.median(run[name] for run in runs) for name in FIGURES}


def write_weights(name: str, folder: Path) -> None:
    if not (folder / CONFIG_NAME).exists():
        # In a process of its own: on a GPU it takes memory, which the engine that is timed would find taken.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            pool.submit(write_random_model, name, folder, question_pieces()).result()


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--weights", type=Path, help="a model folder")
    parser.add_argument("--random", choices=random_names(), help="write random weights into --folder and start those")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if (args.random is None) != (args.folder is None) or (args.weights is None) == (args.random is None):
        parser.error("give --weights, or --random together with --folder")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.began is not None:
        config = RuntimeConfig(model_path=args.weights, device=args.device)
        print(json.dumps(asyncio.run(first_answer(config, args.began, sys.stdin.buffer.read()))))
        return
    if args.random is not None:
        write_weights(args.random, args.folder)
    measured_on = {**environment(), **machine_load()}
    figures = measure(args.weights or args.folder, args.device, args.rounds)
    print(", ".join(f"{name} {seconds:.2f}" for name, seconds in figures.items()))
    model = args.weights.name if args.random is None else f"random-{args.random}"
    append_row(args.output, {**measured_on, "model": model, "rounds": args.rounds, **figures})


if __name__ == "__main__":
    main()
