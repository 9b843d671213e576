"""Fires prompts through the async engine and prints throughput and latency, round by round.

python examples/benchmark_scheduler.py --weights ~/models/moondream2 --num-prompts 32 --max-new-tokens 128 \
    --max-batch-size 8 --image examples/images/01.png --rounds 3 --output result.csv

All prompts of a round are submitted at once. Prefill: computed prompt tokens (cached ones do not count) over the time
until the last request had its first token. Decode: later tokens over the time since the first request had its first.
The two overlap when there are more prompts than rows. From round 2 on, pictures and prompts come from the prefix cache
unless --no-prefix-cache is given.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, InferenceEngine
from kestrel.errors import ConfigError, KestrelError

PROMPTS = (
    "Tell me about the oceans.",
    "How do rockets work?",
    "What is the largest thing here?",
    "Describe the scene in one sentence.",
    "Which colours stand out, and where?",
)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


Round: TypeAlias = dict[str, float]


def summarise(number: int, results: Sequence[EngineResult], seconds: float) -> Round:
    metrics = [result.metrics for result in results]
    first_tokens_ms = [m.ttft_ms for m in metrics]
    prompt_tokens, cached_tokens = sum(m.input_tokens for m in metrics), sum(m.cached_tokens for m in metrics)
    output_tokens = sum(m.output_tokens for m in metrics)
    decoding_s = seconds - min(first_tokens_ms) / 1000
    summary = {
        "round": number,
        "requests": len(results),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "output_tokens": output_tokens,
        "seconds": seconds,
        "prefill_tokens_per_s": 1000 * (prompt_tokens - cached_tokens) / max(first_tokens_ms),
        "decode_tokens_per_s": (output_tokens - len(results)) / decoding_s if decoding_s > 0 else 0.0,
    }
    for name, times in (("ttft", first_tokens_ms), ("latency", [m.ttft_ms + m.decode_time_ms for m in metrics])):
        for share in (50, 95):
            summary[f"{name}_p{share}_ms"] = float(np.percentile(times, share))
    return summary


async def run(args: argparse.Namespace, config: RuntimeConfig, images: Sequence[Path]) -> list[Round]:
    rounds: list[Round] = []
    prompts = [f"{PROMPTS[i % len(PROMPTS)]} ({i + 1})" for i in range(args.num_prompts)]
    pictures = [images[i % len(images)] if images else None for i in range(args.num_prompts)]
    async with await InferenceEngine.create(config) as engine:
        ends = [] if args.stop_early else [engine.profile.end_id]
        settings = {"max_tokens": args.max_new_tokens, "temperature": 0, "suppressed_ids": ends}
        for number in range(1, args.rounds + 1):
            start_s = time.monotonic()
            calls = (
                engine.query(picture, prompt, reasoning=False, settings=settings)
                for picture, prompt in zip(pictures, prompts, strict=True)
            )
            results = await asyncio.gather(*calls)
            rounds.append(summarise(number, results, time.monotonic() - start_s))
            print_round(rounds[-1])
    return rounds


def print_round(r: Round) -> None:
    print(
        f"round {r['round']}: {r['requests']} requests in {r['seconds']:.2f} s"
        f" | prefill {r['prefill_tokens_per_s']:.0f} tok/s ({r['prompt_tokens']} tokens, {r['cached_tokens']} cached)"
        f" | decode {r['decode_tokens_per_s']:.0f} tok/s ({r['output_tokens']} tokens)"
        f" | ttft p50/p95 {r['ttft_p50_ms']:.0f}/{r['ttft_p95_ms']:.0f} ms"
        f" | latency p50/p95 {r['latency_p50_ms']:.0f}/{r['latency_p95_ms']:.0f} ms"
    )


def write(rounds: Sequence[Round], path: Path) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(rounds, indent=1), encoding="utf-8")
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rounds[0]))
        writer.writeheader()
        writer.writerows(rounds)


def find_images(args: argparse.Namespace) -> list[Path]:
    images = [Path(image) for image in args.image]
    if args.image_dir is not None:
        images += sorted(path for path in Path(args.image_dir).glob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        if not images:
            raise ConfigError("--image-dir", f"{args.image_dir} holds no pictures; give another folder")
    return images


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    for flag in ("--device", "--dtype"):
        parser.add_argument(flag, default="auto")
    for flag, default in (("--num-prompts", 32), ("--max-new-tokens", 128), ("--max-batch-size", 8), ("--rounds", 2)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--max-seq-length", type=int)
    parser.add_argument("--image", action="append", default=[], help="repeatable; pictures are used in turn")
    parser.add_argument("--image-dir")
    parser.add_argument("--output", type=Path, help="write the rounds to this .csv or .json file")
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--stop-early", action="store_true", help="let answers end before --max-new-tokens")
    args = parser.parse_args(argv)
    if args.num_prompts < 1 or args.rounds < 1 or (args.output and args.output.suffix not in (".csv", ".json")):
        parser.error("--num-prompts and --rounds must be at least 1, and --output must end in .csv or .json")
    try:
        config = RuntimeConfig(
            model_path=args.weights,
            device=args.device,
            dtype=args.dtype,
            max_batch_size=args.max_batch_size,
            max_seq_length=args.max_seq_length,
            enable_prefix_cache=not args.no_prefix_cache,
        )
        rounds = asyncio.run(run(args, config, find_images(args)))
        if args.output is not None:
            write(rounds, args.output)
    except KestrelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
