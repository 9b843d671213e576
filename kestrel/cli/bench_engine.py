"""kestrel bench engine: requests per second and latency of the whole engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from kestrel.bench.engine import Case, EngineBench, Row, cases_of, load_model
from kestrel.bench.random_adapters import RandomAdapters
from kestrel.bench.rows import append_row
from kestrel.bench.suites import find_suite, run_suite
from kestrel.cli.bench_engine_options import (
    DEFAULT_ADAPTER_RANK,
    DEFAULT_MODES,
    DEFAULT_TIME_LIMIT_S,
    DEFAULT_TOKENS,
    DEFAULT_WORKLOADS,
    AdapterRankOption,
    AdaptersOption,
    BatchSizesOption,
    JsonOption,
    ModesOption,
    OutputOption,
    PictureCacheOption,
    RequestsOption,
    SuiteOption,
    TimeLimitOption,
    TokensOption,
    WorkloadsOption,
)
from kestrel.cli.config_flags import with_flags
from kestrel.cli.console import note, stderr_console, write
from kestrel.cli.event_loop import run_to_end
from kestrel.cli.loading import LoadingBars
from kestrel.cli.random_option import RandomOption, check_random
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError


@with_flags
def engine(
    workloads: WorkloadsOption = None,
    modes: ModesOption = None,
    batch_sizes: BatchSizesOption = None,
    tokens: TokensOption = None,
    requests: RequestsOption = None,
    adapters: AdaptersOption = 0,
    adapter_rank: AdapterRankOption = None,
    random: RandomOption = None,
    suite: SuiteOption = None,
    time_limit: TimeLimitOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
    picture_cache: PictureCacheOption = None,
    *,
    config: RuntimeConfig,
) -> None:
    """Measure the engine: requests per second, latency, tokens, cache hits and vision passes.

    kestrel bench engine --random MD2 --batch-sizes 1,4,16,64 --output bench/results/engine.csv

    Pictures are drawn by number, so that every run sees the same ones; answers never end early.
    """
    _check_output(output)
    on_row = _row_sink(output, as_json)
    if suite is not None:
        chosen = {"--workloads": workloads, "--modes": modes, "--batch-sizes": batch_sizes, "--tokens": tokens}
        more = {"--requests": requests, "--random": random, "--adapters": adapters or None}
        _refuse_beside_suite({**chosen, **more, "--adapter-rank": adapter_rank}, config)
        run_to_end(run_suite(find_suite(suite), config, picture_cache, _limit_s(time_limit), on_row, note))
        return
    if time_limit is not None:
        raise ConfigError("--time-limit", "is for a suite; add --suite, or leave it out")
    check_random(random, config)
    if batch_sizes is not None and config.max_batch_size != RuntimeConfig.max_batch_size:
        raise ConfigError("--max-batch-size", "is decided by --batch-sizes; leave out one of the two")
    sizes = [config.max_batch_size] if batch_sizes is None else _counts("--batch-sizes", batch_sizes)
    cases = list(
        cases_of(
            _listed(workloads) or DEFAULT_WORKLOADS,
            _listed(modes) or DEFAULT_MODES,
            sizes,
            DEFAULT_TOKENS if tokens is None else _counts("--tokens", tokens),
            requests,
        )
    )
    _check_queue(cases, config)
    mixed = _random_adapters(adapters, adapter_rank)
    with LoadingBars(stderr_console()) as bars:
        loaded = load_model(config, random, bars)
    run_to_end(EngineBench(loaded, config, picture_cache, mixed).run(cases, on_row))


def _limit_s(time_limit: float | None) -> float:
    limit_s = DEFAULT_TIME_LIMIT_S if time_limit is None else time_limit
    if limit_s <= 0:
        raise ConfigError("--time-limit", f"must be above 0 seconds (got {limit_s:g})")
    return limit_s


def _random_adapters(count: int, rank: int | None) -> RandomAdapters | None:
    if count == 0 and rank is not None:
        raise ConfigError("--adapter-rank", "is the rank of --adapters; add that, or leave it out")
    return None if count == 0 else RandomAdapters(count, DEFAULT_ADAPTER_RANK if rank is None else rank)


def _row_sink(output: Path | None, as_json: bool) -> Callable[[Row], None]:
    def take(row: Row) -> None:
        if output is not None:
            append_row(output, row)
        write((json.dumps(row) if as_json else line_of(row)) + "\n")

    return take


def line_of(row: Row) -> str:
    """The figures of a row that a reader looks for first."""
    mixed = ", {adapters} adapters of rank {adapter_rank}" if row["adapters"] else ""
    return (
        "{model} {dtype} {workload} {mode} B={max_batch_size} T={tokens} n={requests}: {req_per_s:.2f} req/s, "
        "latency p50 {latency_p50_ms:.1f} p95 {latency_p95_ms:.1f} ms, first token p50 {ttft_p50_ms:.1f} ms, "
        "{tokens_per_s:.1f} tokens/s, {cached_tokens} cached, {vision_passes} vision passes" + mixed
    ).format(**row)


def _refuse_beside_suite(given: dict[str, object], config: RuntimeConfig) -> None:
    named = [flag for flag, value in given.items() if value is not None]
    if config.model is not None or config.weights is not None:
        named.append("--model")
    if config.max_batch_size != RuntimeConfig.max_batch_size:
        named.append("--max-batch-size")
    if named:
        raise ConfigError(named[0], "is decided by --suite; leave out one of the two")


def _check_queue(cases: Sequence[Case], config: RuntimeConfig) -> None:
    most = max(case.requests for case in cases)
    if most > config.max_queue_size:
        raise ConfigError("--requests", f"{most} exceeds --max-queue-size {config.max_queue_size}; raise that")


def _check_output(path: Path | None) -> None:
    """Before minutes of work, not after them."""
    if path is None:
        return
    if path.suffix != ".csv" or path.is_dir():
        raise ConfigError("--output", f"{path} is no CSV file; name a file that ends in .csv")
    if not path.absolute().parent.is_dir():
        raise ConfigError("--output", f"{path.parent} is not a folder; create it first")


def _listed(texts: Sequence[str] | None) -> list[str]:
    return [part.strip() for text in texts or () for part in text.split(",") if part.strip()]


def _counts(flag: str, texts: Sequence[str]) -> list[int]:
    parts = _listed(texts)
    if not parts or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(flag, f"{','.join(texts)!r} are no numbers from 1 on; write them as in {flag} 1,4,16")
    return [int(part) for part in parts]
