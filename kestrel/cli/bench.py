"""kestrel bench: the verbs that measure. `engine`: requests per second and latency of the whole engine. `text`: the
same for text models, ids in. `kernels`: the Triton kernels against their plain versions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kestrel.bench.workloads import SUITE_NAMES, WORKLOADS, Case, cases_of
from kestrel.cli.config_flags import add_verb, verb_group, with_flags
from kestrel.cli.console import note, run_to_end, stderr_console, stdout_console, write
from kestrel.cli.loading import LoadingBars, check_model
from kestrel.cli.options import check_choice, check_parent_folder, flag, split_names
from kestrel.cli.verb_help import RARE
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError, KestrelError
from kestrel.known_models import random_names

if TYPE_CHECKING:
    from rich.table import Table

    from kestrel.bench.engine import RandomAdapters, Row


def make_group() -> typer.Typer:
    group = verb_group("Measure speed.")
    add_verb(group, "engine", engine)
    add_verb(group, "text", text)
    add_verb(group, "kernels", kernels)
    return group


# ---------------------------------------------------------------------- kestrel bench engine


DEFAULT_WORKLOADS, DEFAULT_MODES, DEFAULT_TOKENS = ("chart9",), ("flood", "closed"), (3, 30)
DEFAULT_TIME_LIMIT_S = 1500.0
DEFAULT_ADAPTER_RANK = 16

RandomOption = Annotated[
    str | None,
    typer.Option(
        "--random",
        metavar="NAME",
        help=f"Random weights made on the device instead of a model: {', '.join(random_names())}.",
    ),
]
PictureCacheOption = Annotated[
    Path | None,
    typer.Option("--picture-cache", metavar="DIR", help="Where drawn pictures are kept. Default: the user's cache."),
    RARE,
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Add a row to this CSV file as each case is done.")
]


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """What is measured; names and numbers as they were typed."""

    workloads: tuple[str, ...] = flag(
        f"What is asked: {', '.join(w.name for w in WORKLOADS)}. Default: {', '.join(DEFAULT_WORKLOADS)}.",
        (),
        metavar="NAME,...",
        common=True,
    )
    modes: tuple[str, ...] = flag(
        "flood: all requests at the same time; closed: a client per row, one request in flight each; streams: the "
        "same with answers read as they come. Default: flood and closed.",
        (),
        metavar="NAME,...",
        common=True,
    )
    batch_sizes: tuple[str, ...] = flag(
        "Several --max-batch-size, one after the other.", (), metavar="N,...", common=True
    )
    tokens: tuple[str, ...] = flag("Tokens of every answer. Default: 3,30.", (), metavar="N,...", common=True)
    requests: int | None = flag("Default: 64, 128, 256, 384 from batch sizes 1, 4, 16, 64 on.", metavar="N")
    adapters: int = flag(
        "Random adapters that requests take in turn; 0 for none. Raises --max-adapters to it.", 0, metavar="N"
    )
    adapter_rank: int | None = flag("Their rank. Default: 16. Raises --max-adapter-rank to it.", metavar="R")
    suite: str | None = flag(f"Everything of a table, in order: {', '.join(SUITE_NAMES)}.", metavar="NAME", common=True)
    time_limit: float | None = flag(f"Seconds for a suite. Default: {DEFAULT_TIME_LIMIT_S:g}.", metavar="S")
    as_json: bool = flag("Print whole rows, one JSON object per line.", False, flags=("--json",), show_default=False)

    def cases(self, config: RuntimeConfig) -> list[Case]:
        if self.batch_sizes and config.max_batch_size != RuntimeConfig.max_batch_size:
            raise ConfigError("--max-batch-size", "is decided by --batch-sizes; leave out one of the two")
        cases = cases_of(
            split_names(self.workloads) or DEFAULT_WORKLOADS,
            split_names(self.modes) or DEFAULT_MODES,
            _counts("--batch-sizes", self.batch_sizes) if self.batch_sizes else [config.max_batch_size],
            _counts("--tokens", self.tokens) if self.tokens else DEFAULT_TOKENS,
            self.requests,
        )
        return list(cases)


@with_flags
def engine(
    random: RandomOption = None,
    output: OutputOption = None,
    picture_cache: PictureCacheOption = None,
    *,
    run: EngineRun,
    config: RuntimeConfig,
) -> None:
    """Measure the engine: requests per second, latency, tokens, cache hits and vision passes.

    kestrel bench engine --random MD2 --batch-sizes 1,4,16,64 --output bench/results/engine.csv

    Pictures are drawn by number, so that every run sees the same ones; answers never end early.
    """
    _check_output(output)
    if run.suite is None:
        if run.time_limit is not None:
            raise ConfigError("--time-limit", "is for a suite; add --suite, or leave it out")
        check_random(random, config)
        cases = run.cases(config)
        _check_queue(cases, config)
        _check_adapters(run.adapters, run.adapter_rank)
    else:
        check_choice("--suite", run.suite, SUITE_NAMES)
        _refuse_beside_suite(run, random, config)
        cases = []
    # Here and not above: help and refusals need no torch.
    from kestrel.bench.engine import EngineBench, find_suite, load_model, run_suite  # noqa: PLC0415

    on_row = _row_sink(output, run.as_json)
    if run.suite is not None:
        run_to_end(run_suite(find_suite(run.suite), config, picture_cache, _limit_s(run.time_limit), on_row, note))
        return
    mixed = _random_adapters(run.adapters, run.adapter_rank)
    with LoadingBars(stderr_console()) as bars:
        loaded = load_model(config, random, bars)
    run_to_end(EngineBench(loaded, config, picture_cache, mixed).run(cases, on_row))


@with_flags
def text(
    random: Annotated[
        str | None, typer.Option("--random", metavar="NAME", help="Only this model of the suite. Default: all.")
    ] = None,
    output: OutputOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print whole rows, one JSON object per line.")] = False,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", metavar="S", help=f"Default: {DEFAULT_TIME_LIMIT_S:g}.")
    ] = None,
    *,
    config: RuntimeConfig,
) -> None:
    """Measure text models of random weights, token ids in: alone, in batches, prefill, and all at once.

    kestrel bench text --output bench/results/engine.csv

    Nothing is shared between requests, so that no prefix is found in the cache.
    """
    _check_output(output)
    check_random(random, config)
    for name in _fixed_by_suites(config):
        raise ConfigError(name, "is decided by the suite, whose models have random weights; leave it out")
    from kestrel.bench.engine import find_suite, run_suite  # noqa: PLC0415

    chapters = [chapter for chapter in find_suite("text") if random in (None, chapter.random)]
    if not chapters:
        raise ConfigError("--random", f"{random} is not in the suite; use one of: L1B, L8B")
    run_to_end(run_suite(chapters, config, None, _limit_s(time_limit), _row_sink(output, as_json), note))


def check_random(random: str | None, config: RuntimeConfig) -> None:
    """The model is one that can be made or looked for."""
    if random is None:
        check_model(config)
        return
    if random not in random_names():
        raise ConfigError("--random", f"{random!r} is not a random model; use one of: {', '.join(random_names())}")
    if config.model is not None or config.weights is not None:
        raise ConfigError("--random", "takes the place of a model; leave out --model and --model-path")


def _limit_s(time_limit: float | None) -> float:
    limit_s = DEFAULT_TIME_LIMIT_S if time_limit is None else time_limit
    if limit_s <= 0:
        raise ConfigError("--time-limit", f"must be above 0 seconds (got {limit_s:g})")
    return limit_s


def _check_adapters(count: int, rank: int | None) -> None:
    if count == 0 and rank is not None:
        raise ConfigError("--adapter-rank", "is the rank of --adapters; add that, or leave it out")
    for name, value, least in (("--adapters", count, 0), ("--adapter-rank", 1 if rank is None else rank, 1)):
        if value < least:
            raise ConfigError(name, f"must be at least {least} (got {value})")


def _random_adapters(count: int, rank: int | None) -> RandomAdapters | None:
    from kestrel.bench.engine import RandomAdapters  # noqa: PLC0415

    return None if count == 0 else RandomAdapters(count, DEFAULT_ADAPTER_RANK if rank is None else rank)


def _row_sink(output: Path | None, as_json: bool) -> Callable[[Row], None]:
    from kestrel.bench.results import append_row  # noqa: PLC0415

    def take(row: Row) -> None:
        append_row(output, row)
        write((json.dumps(row) if as_json else _line_of(row)) + "\n")

    return take


def _line_of(row: Row) -> str:
    """The figures of a row that a reader looks for first."""
    mixed = ", {adapters} adapters of rank {adapter_rank}" if row["adapters"] else ""
    return (
        "{model} {dtype} {workload} {mode} B={max_batch_size} T={tokens} n={requests}: {req_per_s:.2f} req/s, "
        "latency p50 {latency_p50_ms:.1f} p95 {latency_p95_ms:.1f} ms, first token p50 {ttft_p50_ms:.1f} ms, "
        "{tokens_per_s:.1f} tokens/s, {cached_tokens} cached, {vision_passes} vision passes" + mixed
    ).format(**row)


def _refuse_beside_suite(run: EngineRun, random: str | None, config: RuntimeConfig) -> None:
    names = ("workloads", "modes", "batch_sizes", "tokens", "requests", "adapters", "adapter_rank")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(run, name) not in ((), None, 0)]
    if random is not None:
        given.append("--random")
    given += _fixed_by_suites(config)
    if given:
        raise ConfigError(given[0], "is decided by --suite; leave out one of the two")


def _fixed_by_suites(config: RuntimeConfig) -> list[str]:
    given = {
        "--model": config.model is not None,
        "--model-path": config.weights is not None,
        "--max-batch-size": config.max_batch_size != RuntimeConfig.max_batch_size,
    }
    return [name for name, is_given in given.items() if is_given]


def _check_queue(cases: Sequence[Case], config: RuntimeConfig) -> None:
    most = max(case.requests for case in cases)
    if most > config.max_queue_size:
        raise ConfigError("--requests", f"{most} exceeds --max-queue-size {config.max_queue_size}; raise that")


def _check_output(path: Path | None) -> None:
    if path is not None and (path.suffix != ".csv" or path.is_dir()):
        raise ConfigError("--output", f"{path} is not a CSV file; name a file that ends in .csv")
    if path is not None:
        check_parent_folder("--output", path)


def _counts(flag: str, texts: Sequence[str]) -> list[int]:
    parts = split_names(texts)
    if not parts or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(flag, f"{','.join(texts)!r} are not numbers from 1 on; write them as in {flag} 1,4,16")
    return [int(part) for part in parts]


# ---------------------------------------------------------------------- kestrel bench kernels


BEST = 3
"""Block sizes that a sweep shows for each case; a CSV file gets all of them."""


def kernels(
    ops: Annotated[
        list[str] | None,
        typer.Option("--ops", metavar="NAME,...", help="Only these operations, separated by commas; repeatable."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="CSV file that gets a row per measurement.")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Run every kernel once on small inputs instead, without timing.", show_default=False
        ),
    ] = False,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Time every block size listed for a kernel instead.", show_default=False),
    ] = False,
) -> None:
    """Time the Triton kernels against their plain versions, at the sizes of Moondream 2 and 3.

    kestrel bench kernels --output bench/results/kernels.csv

    Times are of the GPU alone, on inputs that are not in its cache. Needs an NVIDIA GPU; with --check and without
    one, the kernels run in Triton's interpreter.
    """
    named = None if ops is None else split_names(ops)
    if find_spec("triton") is None:
        raise ConfigError("bench kernels", "Triton is not installed; install it with `pip install triton`")
    if check and sweep:
        raise ConfigError("--sweep", "it times, and --check does not; give one of them")
    if check and output is not None:
        raise ConfigError("--output", "--check measures nothing to write; leave one of them out")
    if check:
        _check(named)
    elif sweep:
        _sweep(named, output)
    else:
        _time(named, output)


def _require_gpu() -> None:
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        raise ConfigError(
            "bench kernels",
            "torch sees no NVIDIA GPU on this machine, and kernels are timed on one; "
            "add --check to run each of them once without timing",
        )


def _time(ops: list[str] | None, output: Path | None) -> None:
    _require_gpu()
    # Here and not above: Triton is optional, and what imports it decides between GPU and interpreter.
    from kestrel.bench.kernels.measure import time_kernels  # noqa: PLC0415
    from kestrel.bench.results import append_row, environment  # noqa: PLC0415

    figures = "plain µs", "Triton µs", "speed-up", "TB/s", "TFLOP/s", "of bandwidth", "of compute"
    table = _table(("op", "size"), figures)
    measured_on = environment()
    for timed in time_kernels(ops):
        row = timed.columns()
        append_row(output, {**measured_on, **row})
        figures = [f"{row[key]:.1f}" for key in ("plain_us", "triton_us")]
        figures += [f"{row[key]:.2f}" for key in ("speedup", "tb_per_s")] + [f"{row['tflop_per_s']:.0f}"]
        figures += [f"{row[key]:.0%}" for key in ("bandwidth_share", "compute_share")]
        table.add_row(timed.case.op, timed.case.size, *figures)
        note(f"{timed.case.op}, {timed.case.size}: {row['triton_us']:.1f} µs")
    stdout_console().print(table)


def _sweep(ops: list[str] | None, output: Path | None) -> None:
    _require_gpu()
    from kestrel.bench.kernels.measure import sweep_kernels  # noqa: PLC0415 - as above
    from kestrel.bench.results import append_row, environment  # noqa: PLC0415

    measured_on = environment()
    for swept in sweep_kernels(ops):
        write(f"{swept.case.op}, {swept.case.size}: {swept.default_s * 1e6:.1f} µs by default\n")
        for tuning, seconds in list(swept.seconds.items())[:BEST]:
            write(f"  {seconds * 1e6:8.1f} µs  {tuning}\n")
        for tuning, seconds in swept.seconds.items():
            what = {"op": swept.case.op, "size": swept.case.size, "tuning": tuning}
            append_row(output, {**measured_on, **what, "us": seconds * 1e6, "default_us": swept.default_s * 1e6})


def _check(ops: list[str] | None) -> None:
    import torch  # noqa: PLC0415

    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    from kestrel.bench.kernels.measure import check_kernels  # noqa: PLC0415 - as above

    table = _table(("op", "size", "distance", ""))
    far = []
    for checked in check_kernels(ops, torch.device("cuda" if has_gpu else "cpu")):
        table.add_row(
            checked.case.op, checked.case.size, f"{checked.distance:.1e}", "close" if checked.is_close else "FAR"
        )
        far += [] if checked.is_close else [f"{checked.case.op} ({checked.case.size})"]
    stdout_console().print(table)
    if far:
        raise KestrelError(f"kernels are far from their plain versions: {', '.join(far)}")


def _table(names: Sequence[str], figures: Sequence[str] = ()) -> Table:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in (*names, *figures):
        table.add_column(name, justify="right" if name in figures else "left")
    return table
