"""kestrel simulate: what traffic meets on GPUs that are not there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kestrel.cli.config_flags import with_flags
from kestrel.cli.console import write
from kestrel.cli.options import flag
from kestrel.errors import ConfigError
from kestrel.simulation.capacity import MAX_GPUS, SECONDS, Question, requests_of
from kestrel.simulation.cluster import Cluster, Figures
from kestrel.simulation.costs import H200, load_costs
from kestrel.simulation.traffic import Lengths, Traffic

PER_CLIENT, AT_ONCE = 20, 384
MAX_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Simulated:
    model: str = flag(
        "Which figures of the file of --costs to use.", "moondream2", metavar="NAME", group="GPUs", common=True
    )
    gpus: int | None = flag(
        "GPUs, each with an engine of its own. Default: 1, or found with --p99.", metavar="N", common=True
    )
    p99: float | None = flag(
        "Find the fewest GPUs for --rate, or the most requests a second for --gpus, with 99 of 100 answers within "
        "this many milliseconds.",
        metavar="MS",
        common=True,
    )
    max_batch_size: int = flag("Rows of each engine.", 64, metavar="N")
    costs: Path = field(
        default=H200,
        metadata={
            "help": "Measured figures of a GPU. Default: those of an H200, in the package.",
            "metavar": "FILE.json",
            "show_default": False,
        },
    )
    rate: float | None = flag("Requests a second, at random times.", metavar="N", group="Traffic", common=True)
    clients: int | None = flag("Instead of a rate: clients with one request at a time.", metavar="N", common=True)
    at_once: bool = flag(
        "Instead of a rate: all requests arrive at the same time.",
        False,
        flags=("--at-once",),
        show_default=False,
        common=True,
    )
    requests: int | None = flag(
        f"Number of requests. Default: {SECONDS:g} seconds of a rate, {PER_CLIENT} per client, {AT_ONCE} with "
        f"--at-once.",
        metavar="N",
    )
    crops: int | None = flag(
        f"Crops of each picture; 0: no pictures. Default: {Traffic.crops}, or 0 for a text model.",
        metavar="N",
        common=True,
    )
    repeated: float = flag(
        "Share of the requests about one of the latest pictures.", Traffic.repeated, metavar="0..1", common=True
    )
    among: int | None = flag(f"How many pictures are the latest. Default: {Traffic.among}.", metavar="N")
    prompt_tokens: str = flag("Tokens of a prompt without its picture: 20, or 5-40.", "20", metavar="N|LOW-HIGH")
    answer_tokens: str = flag("Tokens of an answer: 30, or 3-300.", "30", metavar="N|LOW-HIGH", common=True)
    stream: bool = flag("Answers are streamed.", Traffic.stream, flags=("--stream",), show_default=False)
    picture_kb: float | None = flag(f"Size of a picture's file. Default: {Traffic.picture_kb:g}.", metavar="KB")
    link_gbit: float | None = flag(
        f"Speed of the network link that all pictures share. Default: {Traffic.link_gbit:g}.", metavar="GBIT/S"
    )
    seed: int = flag("Other random times, lengths and pictures.", Traffic.seed, metavar="N")
    as_json: bool = flag("Print JSON.", False, flags=("--json",), show_default=False, group="Output", common=True)


@with_flags
def simulate(*, options: Simulated) -> None:
    """Say how many GPUs traffic needs, and how long answers take on them, without a GPU.

    kestrel simulate --rate 200 --p99 1000

    The real scheduler and router run in simulated time over measured step times. docs/scale.md says how near that
    comes to measured figures, and what it leaves out.
    """
    _check(options)
    rate, figures = _run(options)
    if options.as_json:
        write(json.dumps({"model": options.model, "rate": rate, **asdict(figures)}, indent=2) + "\n")
    else:
        write(_text(options, rate, figures))


def _check(options: Simulated) -> None:
    for name, value, most in (("gpus", options.gpus, MAX_GPUS), ("max_batch_size", options.max_batch_size, MAX_ROWS)):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(name, f"must be from 1 to {most} (got {value})")
    ways = sum((options.rate is not None, options.clients is not None, options.at_once))
    if options.p99 is None and ways != 1:
        raise ConfigError("rate", "say when requests come; give one of --rate, --clients and --at-once")
    if options.p99 is not None:
        if not 0 < options.p99 <= 1e7:
            raise ConfigError("p99", f"must be above 0 and at most 1e7 milliseconds (got {options.p99:g})")
        if options.clients is not None or options.at_once:
            raise ConfigError("p99", "is about a rate; leave out --clients and --at-once")
        if (options.rate is None) == (options.gpus is None):
            raise ConfigError("p99", "finds one of --rate and --gpus; give the other one alone")


def _run(options: Simulated) -> tuple[float | None, Figures]:
    costs = load_costs(options.costs, options.model)
    traffic = _traffic(options, Traffic.crops if costs.reads_pictures else 0)
    if options.p99 is None:
        return options.rate, Cluster(costs, traffic, options.gpus or 1, options.max_batch_size).run()
    asked = Question(costs, traffic, options.max_batch_size, options.p99, options.requests)
    if options.rate is not None:
        return options.rate, asked.fewest_gpus(options.rate)
    assert options.gpus is not None
    return asked.most_requests(options.gpus)


def _traffic(options: Simulated, usual_crops: int) -> Traffic:
    crops = usual_crops if options.crops is None else options.crops
    about_pictures = {name: getattr(options, name) for name in ("among", "picture_kb", "link_gbit")}
    given = {name: value for name, value in about_pictures.items() if value is not None}
    if given and not crops:
        raise ConfigError(next(iter(given)), "is about pictures, and there are none; leave it out, or give --crops")
    if "among" in given and not options.repeated:
        raise ConfigError("among", "is about repeated pictures; give --repeated too")
    if options.rate is not None:
        requests = requests_of(options.rate)
    else:
        requests = AT_ONCE if options.clients is None else PER_CLIENT * options.clients
    return Traffic(
        rate=options.rate,
        clients=options.clients,
        requests=requests if options.requests is None else options.requests,
        crops=crops,
        repeated=options.repeated,
        prompt_tokens=Lengths.parse("prompt_tokens", options.prompt_tokens),
        answer_tokens=Lengths.parse("answer_tokens", options.answer_tokens),
        stream=options.stream,
        seed=options.seed,
        **given,
    )


def _text(options: Simulated, rate: float | None, figures: Figures) -> str:
    if rate is not None:
        load = f"{rate:g} requests/s at random times"
    else:
        load = "all requests at once" if options.clients is None else f"{options.clients} clients"
    lines = [
        f"{figures.gpus} GPU{'s' * (figures.gpus > 1)}, {options.model}, {load}: {figures.requests} requests",
        f"answered     {figures.req_per_s:.4g} requests/s",
        f"latency      P50 {figures.latency_p50_ms:.0f} ms, P99 {figures.latency_p99_ms:.0f} ms",
        f"first token  P50 {figures.ttft_p50_ms:.0f} ms, P99 {figures.ttft_p99_ms:.0f} ms",
        f"token gap    P50 {figures.token_gap_p50_ms:.1f} ms, P99 {figures.token_gap_p99_ms:.1f} ms",
        f"queue        P50 {figures.queue_p50_ms:.0f} ms, P99 {figures.queue_p99_ms:.0f} ms",
        f"waiting      {figures.mean_waiting:.1f} requests on average",
        f"GPU use      {figures.gpu_use:.0%}",
        f"cache        {figures.hit_rate:.0%} of the prompts' positions found",
    ]
    if options.repeated:
        lines.append(f"pictures     {figures.picture_hit_rate:.0%} of the repeated ones found")
    if figures.link_use:
        lines.append(f"link         {figures.link_use:.1%} used")
    return "\n".join(lines) + "\n"
