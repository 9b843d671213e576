"""The command behind examples/benchmark_http_server.py: flags, one run, its JSON and its page."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from kestrel import __version__
from kestrel.bench.http_load.bodies import PROMPTS, Ask, bodies, find_images, skill_of
from kestrel.bench.http_load.client import Target
from kestrel.bench.http_load.progress import RampDisplay
from kestrel.bench.http_load.ramp import Ramp, run_ramp, warm_up
from kestrel.bench.http_load.report import Run, render
from kestrel.bench.http_load.stages import Sender
from kestrel.bench.http_load.statistics import Thresholds
from kestrel.errors import ConfigError, KestrelError, shown


def main(argv: Sequence[str] | None = None, description: str | None = None) -> int:
    parser = _parser(description)
    args = parser.parse_args(argv)
    if args.url is None and not (args.report and args.results):
        parser.error("give --url to measure a server, or --report PAGE with JSON files of earlier runs")
    try:
        earlier = [read_run(path) for path in args.results]
        runs = [*earlier, measure(args)] if args.url is not None else earlier
        if args.report is not None:
            args.report.write_text(render(runs), encoding="utf-8")
            print(f"wrote {args.report}")
    except (KestrelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description or __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, metavar="JSON", help="earlier runs for the page, side by side")
    parser.add_argument("--url", help="such as http://127.0.0.1:8080/v1/query; any of the native skills")
    parser.add_argument("--image", action="append", type=Path, default=[], help="repeatable; pictures are used in turn")
    parser.add_argument("--image-dir", type=Path, help="all pictures of a folder")
    parser.add_argument("--prompt", help="the question, or for point, detect and segment the object")
    parser.add_argument("--max-new-tokens", type=_positive_int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--stream", action="store_true", help="ask for streams and time their first event here")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--stage-duration", type=_positive, default=30.0, metavar="S")
    parser.add_argument("--start-concurrency", type=_positive_int, default=1)
    parser.add_argument("--concurrency-step", type=_positive_int, default=4)
    parser.add_argument("--max-concurrency", type=_positive_int, default=64)
    rates = parser.add_argument_group("a steady rate in place of a number of clients (--max-concurrency bounds those)")
    rates.add_argument("--start-rps", type=_positive)
    rates.add_argument("--rps-step", type=_positive, default=1.0)
    rates.add_argument("--max-rps", type=_positive)
    parser.add_argument("--latency-threshold-ms", type=_positive, default=4000.0, help="of p95; beyond is overload")
    parser.add_argument("--ttft-threshold-ms", type=_positive, default=2500.0, help="of p95")
    parser.add_argument("--error-threshold", type=_share, default=0.10, help="share of requests without an answer")
    parser.add_argument("--request-timeout", type=_positive, default=120.0, metavar="S")
    parser.add_argument("--warmup-requests", type=_positive_int, help="default: one per picture, at least 3")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--report", type=Path, help="HTML page of this run and the JSON files given")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must be from 0 to 1")
    return value


def read_run(path: Path) -> Run:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ConfigError("JSON", f"{path} is not JSON; give a file that --output wrote") from None
    if not isinstance(data, dict) or not isinstance(data.get("results"), list):
        raise ConfigError("JSON", f"{path} has no results (got {shown(data)}); give a file that --output wrote")
    return Run(path.stem, data)


def measure(args: argparse.Namespace) -> Run:
    """Runs the ramp, and writes its JSON when asked to."""
    ramp = ramp_of(args)
    target = Target.of(args.url, {"authorization": f"Bearer {args.api_key}"} if args.api_key else None)
    images = find_images(args.image, args.image_dir)
    skill = skill_of(args.url)
    prompt = args.prompt or PROMPTS.get(skill)
    ask = Ask(skill, prompt, args.max_new_tokens, args.temperature, args.stream)
    sender = Sender(target, bodies(ask, images), args.request_timeout)
    thresholds = Thresholds(args.latency_threshold_ms, args.ttft_threshold_ms, args.error_threshold)

    async def run() -> list[dict[str, Any]]:
        with RampDisplay(Console(), args.stage_duration) as display:
            try:
                await warm_up(sender, args.warmup_requests or max(3, len(images)))
                return await run_ramp(ramp.stages(), sender, args.stage_duration, thresholds, display)
            finally:
                sender.close()

    data = {**parameters(args, ramp, prompt, images), "results": asyncio.run(run())}
    if args.output is not None:
        args.output.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
        print(f"wrote {args.output}")
    return Run(args.output.stem if args.output else "this run", data)


def ramp_of(args: argparse.Namespace) -> Ramp:
    if args.start_rps is None:
        if args.max_rps is not None:
            raise ConfigError("--max-rps", "needs --start-rps, where the rate begins")
        return Ramp(args.start_concurrency, args.concurrency_step, _end(args, "concurrency"))
    if args.max_rps is None:
        raise ConfigError("--start-rps", "needs --max-rps, where the rate ends")
    return Ramp(args.start_rps, args.rps_step, _end(args, "rps"), by_rate=True, concurrency_limit=args.max_concurrency)


def _end(args: argparse.Namespace, kind: str) -> float:
    start, most = vars(args)[f"start_{kind}"], vars(args)[f"max_{kind}"]
    if most < start:
        raise ConfigError(f"--max-{kind}", f"is {most:g}, below --start-{kind} {start:g}")
    return most


def parameters(args: argparse.Namespace, ramp: Ramp, prompt: str | None, images: Sequence[Path]) -> dict[str, Any]:
    """What was asked for; with a number of clients the rates are null, and the other way round."""
    rates = {"start_rps": ramp.start, "rps_step": ramp.step, "max_rps": ramp.most}
    loads = {
        "start_concurrency": args.start_concurrency,
        "concurrency_step": args.concurrency_step,
        "max_concurrency": args.max_concurrency,
    }
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "kestrel": __version__,
        "url": args.url,
        "prompt": prompt,
        "images": [image.name for image in images],
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "stream": args.stream,
        "stage_duration_s": args.stage_duration,
        **(loads if not ramp.by_rate else {**dict.fromkeys(loads), "max_concurrency": args.max_concurrency}),
        **(rates if ramp.by_rate else dict.fromkeys(rates)),
        "latency_threshold_ms": args.latency_threshold_ms,
        "ttft_threshold_ms": args.ttft_threshold_ms,
        "error_threshold": args.error_threshold,
    }
