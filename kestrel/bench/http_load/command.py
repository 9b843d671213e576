"""The command behind examples/benchmark_http_server.py: flags, requests, one run, its JSON and its page."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import math
import mimetypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kestrel import __version__
from kestrel.bench.http_load.client import Outcome, Target
from kestrel.bench.http_load.page import Run, load_text, render
from kestrel.bench.http_load.ramp import Ramp, Sender, Stage, Thresholds, run_ramp, warm_up
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
    ramp = _ramp_of(args)
    target = Target.of(args.url, {"authorization": f"Bearer {args.api_key}"} if args.api_key else None)
    images = find_images(args.image, args.image_dir)
    skill = skill_of(args.url)
    prompt = args.prompt or PROMPTS.get(skill)
    ask = Ask(skill, prompt, args.max_new_tokens, args.temperature, args.stream)
    sender = Sender(target, bodies(ask, images), args.request_timeout)
    thresholds = Thresholds(args.latency_threshold_ms, args.ttft_threshold_ms, args.error_threshold)

    async def run() -> list[dict[str, Any]]:
        with _RampDisplay(Console(), args.stage_duration) as display:
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


def _ramp_of(args: argparse.Namespace) -> Ramp:
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


# ---------------------------------------------------------------------- requests


IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
PROMPTS = {"query": "Describe the image.", "point": "person", "detect": "person", "segment": "person"}
"""What is asked when no prompt is given, by skill."""


@dataclass(frozen=True)
class Ask:
    """What every request asks; the picture alone differs."""

    skill: str
    prompt: str | None = None
    max_new_tokens: int | None = None
    temperature: float = 0.0
    stream: bool = False

    def body(self, image: Path | None) -> bytes:
        fields: dict[str, Any] = {"settings": {"temperature": self.temperature}, "stream": self.stream}
        if self.skill in ("point", "detect", "segment"):
            fields["object"] = self.prompt or PROMPTS[self.skill]
        elif self.skill != "caption":
            fields["question"] = self.prompt or PROMPTS["query"]
        if self.max_new_tokens is not None:
            bound = "max_objects" if self.skill in ("point", "detect") else "max_tokens"
            fields["settings"][bound] = self.max_new_tokens
        if image is not None:
            fields["image_url"] = data_url(image)
        return json.dumps(fields).encode()


def skill_of(url: str) -> str:
    """The last word of the path, such as query."""
    return url.split("?")[0].rstrip("/").rsplit("/", 1)[-1]


def data_url(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def bodies(ask: Ask, images: Sequence[Path]) -> list[bytes]:
    return [ask.body(image) for image in images] or [ask.body(None)]


def find_images(files: Sequence[Path], folder: Path | None) -> list[Path]:
    """The named files and those of the folder, in order. Raises ConfigError for what is not there."""
    for path in files:
        if not path.is_file():
            raise ConfigError("--image", f"{path} is not a file; name a picture")
    images = list(files)
    if folder is not None:
        found = sorted(path for path in folder.glob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        if not found:
            raise ConfigError("--image-dir", f"{folder} holds no pictures; give another folder")
        images += found
    return images


# ---------------------------------------------------------------------- what a person sees meanwhile


HEADING = "stage  load        req/s   ok / all     errors   latency p50 / p95 ms   TTFT p50 / p95 ms    out tok/s"
REDRAW_S = 0.25


class _RampDisplay:
    """A `RampWatcher` for a console; without a terminal only the lines appear."""

    def __init__(self, console: Console, duration_s: float) -> None:
        self._console = console
        self._duration_s = duration_s
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[counts]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("warming up", total=None, counts="")
        self._clock: asyncio.Task[None] | None = None
        self._number = self._num_ok = self._num_failed = 0

    def __enter__(self) -> _RampDisplay:
        self._progress.start()
        self._console.print(HEADING, style="dim", highlight=False, soft_wrap=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_clock()
        self._progress.stop()

    def begins(self, number: int, stage: Stage) -> None:
        self._number, self._num_ok, self._num_failed = number, 0, 0
        load = load_text({"target_rps": stage.target_rps, "concurrency_limit": stage.concurrency_limit})
        self._progress.reset(self._task, total=self._duration_s, description=f"{number:>2}  {load}")
        self._stop_clock()
        self._clock = asyncio.ensure_future(self._tick())

    def answered(self, outcome: Outcome) -> None:
        if outcome.ok:
            self._num_ok += 1
        else:
            self._num_failed += 1

    def ended(self, report: dict[str, Any]) -> None:
        self._stop_clock()
        style = "red" if report["overloaded"] else None
        self._console.print(_stage_line(self._number, report), style=style, highlight=False, soft_wrap=True)
        for reason in report["overload_reasons"]:
            self._console.print(f"       overloaded: {reason}", style="red", highlight=False, soft_wrap=True)

    async def _tick(self) -> None:
        while True:
            counts = f"{self._num_ok} answered, {self._num_failed} failed"
            self._progress.update(self._task, counts=counts)
            await asyncio.sleep(REDRAW_S)
            self._progress.advance(self._task, REDRAW_S)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


def _stage_line(number: int, report: dict[str, Any]) -> str:
    load = load_text(report)
    counts = f"{report['requests_success']} / {report['requests_total']}"
    return (
        f"{number:>5}  {load:<11} {report['throughput_rps']:>5.2f}   {counts:<12} {report['error_rate']:>6.1%}"
        f"   {_pair(report['latency']):>20}   {_pair(report['ttft']):>17}   {report['tokens']['output_per_s']:>10.1f}"
    )


def _pair(summary: dict[str, float | None]) -> str:
    return " / ".join("—" if (value := summary[p]) is None else f"{value * 1000:.0f}" for p in ("p50", "p95"))
