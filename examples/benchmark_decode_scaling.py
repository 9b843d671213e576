"""Decode throughput against batch size: the runtime alone, without scheduler and engine.

python examples/benchmark_decode_scaling.py --random MD2 --batch-sizes 1 4 16 64 --context 749 --output decode.csv

For each batch size every row is prefilled with a context of text, and then all rows decode one token a step. Plans are
launched straight on the runtime, with as many steps in flight as it allows. The first steps are not timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kestrel.bench.engine import free_device_memory, load_model
from kestrel.bench.results import append_row, environment, machine_load
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError, KestrelError
from kestrel.families import ReadyModel, ready_from
from kestrel.grammar import free_text
from kestrel.moondream.releases import RANDOM_NAMES
from kestrel.runtime.contract import DecodeRow, PageWrite, PrefillChunk, RowStart, StepOutput, StepPlan
from kestrel.runtime.device import choose_device, choose_dtype
from kestrel.settings import SamplingParams
from kestrel.tokens import Text


class Decoding:
    """All rows of a runtime, decoding in step."""

    def __init__(self, ready: ReadyModel, num_rows: int, context: int, max_new_tokens: int) -> None:
        self._runtime = ready.runtime
        self._rows = range(num_rows)
        self._position = context
        self._step_id = 0
        self._in_flight: deque[Any] = deque()
        page_size = ready.runtime.limits.page_size
        pages_per_row = -(-(context + max_new_tokens) // page_size)
        grammar = free_text(ready.profile.end_id)
        sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        ids = np.random.default_rng(0).integers(ready.vocab_size // 2, ready.vocab_size, (num_rows, context))
        for row in self._rows:
            pages = range(row * pages_per_row, (row + 1) * pages_per_row)
            start = RowStart(row, grammar, sampling, max_total_tokens=max_new_tokens)
            chunk = PrefillChunk(row, 0, Text(ids[row].tolist()), context, samples=True)
            self._launch(StepPlan(self._next_id(), [start], [PageWrite(row, 0, tuple(pages))], prefill=[chunk]))
        self.drain()

    def step(self) -> None:
        """One more token for every row."""
        decode = [DecodeRow(row, self._position) for row in self._rows]
        self._position += 1
        self._launch(StepPlan(self._next_id(), decode=decode))

    def drain(self) -> None:
        while self._in_flight:
            self._collect()

    def _launch(self, plan: StepPlan) -> None:
        self._in_flight.append(self._runtime.launch(plan))
        if len(self._in_flight) > self._runtime.limits.steps_in_flight:
            self._collect()

    def _collect(self) -> None:
        output: StepOutput = self._runtime.collect(self._in_flight.popleft())
        assert not output.failures, output.failures
        assert all(row.token is not None for row in output.rows), "a row ended"

    def _next_id(self) -> int:
        self._step_id += 1
        return self._step_id


def measure(config: RuntimeConfig, num_rows: int, args: argparse.Namespace) -> dict[str, object]:
    loaded = load_model(config, args.random)  # again for each size: a quantised model serves one runtime
    max_new_tokens = 1 + args.warm_up + args.steps
    longest = args.context + max_new_tokens
    ready = ready_from(loaded, replace(config, max_batch_size=num_rows, max_seq_length=longest))
    if num_rows * -(-longest // config.page_size) > ready.runtime.limits.num_pages:
        raise ConfigError("--batch-sizes", f"{num_rows} rows of {longest} positions do not fit; lower one of them")
    began_s = time.perf_counter()
    decoding = Decoding(ready, num_rows, args.context, max_new_tokens)
    prefill_s = time.perf_counter() - began_s
    for _ in range(args.warm_up):
        decoding.step()
    decoding.drain()
    began_s = time.perf_counter()
    for _ in range(args.steps):
        decoding.step()
    decoding.drain()
    step_s = (time.perf_counter() - began_s) / args.steps
    return {
        "model": loaded.name,
        "dtype": str(choose_dtype(config, choose_device(config))).removeprefix("torch."),
        "batch_size": num_rows,
        "context": args.context,
        "steps": args.steps,
        "prefill_ms_per_row": prefill_s * 1000 / num_rows,
        "step_ms": step_s * 1000,
        "tokens_per_s": num_rows / step_s,
        "settings": number_formats(config),
    }


def number_formats(config: RuntimeConfig) -> str:
    names = ("quantization", "kv_cache_dtype")
    return " ".join(f"{name}={value}" for name in names if (value := getattr(config, name)) not in ("none", "auto"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--weights")
    source.add_argument("--random", choices=RANDOM_NAMES, help="random weights made on the device")
    for flag in ("--device", "--dtype"):
        parser.add_argument(flag, default="auto")
    for flag, default in (("--quantization", "none"), ("--kv-cache-dtype", "auto")):
        parser.add_argument(flag, default=default, help="as of `kestrel serve`")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16, 64])
    for flag, default in (("--context", 749), ("--steps", 64), ("--warm-up", 8)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--output", type=Path, help="add a row per batch size to this .csv file")
    args = parser.parse_args(argv)
    if min(args.context, args.steps, *args.batch_sizes) < 1 or args.warm_up < 0:
        parser.error("numbers must be at least 1, and --warm-up at least 0")
    measured_on = {**environment(), **machine_load()}
    try:
        formats = {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
        config = replace(RuntimeConfig(model_path=args.weights, device=args.device, dtype=args.dtype), **formats)
        for num_rows in args.batch_sizes:
            row = {**measured_on, **measure(config, num_rows, args)}
            print("B={batch_size}: {step_ms:.4g} ms a step, {tokens_per_s:.1f} tokens/s".format(**row), flush=True)
            if args.output is not None:
                append_row(args.output, row)
            free_device_memory()
    except KestrelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
