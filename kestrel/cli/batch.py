"""kestrel batch: a file of requests in, a file of answers out."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kestrel.cli.config_flags import with_flags
from kestrel.cli.console import FAILED, Interrupted, note, one_line, printable, run_to_end, stderr_console
from kestrel.cli.loading import check_model, note_default_model, open_engine, refuse_local_settings
from kestrel.cli.options import check_parent_folder, flag
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError, KestrelError, shown

if TYPE_CHECKING:
    from kestrel.labelling.batch import Answerer, BatchJob, Counts
    from kestrel.labelling.batch_lines import BatchInput

KEY_VARIABLE = "KESTREL_API_KEY"
MOST_AT_ONCE = 4096
NO_QUEUE_LIMIT = 10**7
DECIDES_ANSWERS = (
    "model", "revision", "weights", "tokenizer_file", "chat_template_file", "tool_parser", "dtype_name", "quantization",
    "kv_cache_dtype_name", "refiner_file", "adapter_folder", "adapter_url_template", "max_seq_length",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    endpoint: str | None = flag(
        "Ask this server instead of an engine here, such as http://gpu-box:8080.", metavar="URL", common=True
    )
    api_key: str | None = flag(f"The server's key. Default: that of {KEY_VARIABLE}, if any.", metavar="KEY")
    concurrency: int | None = flag(
        "Requests asked at the same time. Default: twice --max-batch-size, 32 with --endpoint.",
        metavar="N",
        common=True,
    )
    retry_for: float = flag(
        "Give up after so many seconds in which the server sent only 429, 502, 503 or 504, or nothing.",
        300.0,
        metavar="SECONDS",
    )
    prompt_url: str | None = flag(
        "Where plain prompts go: /v1/chat/completions (default) or /v1/completions.", metavar="PATH"
    )
    prompt_body: str | None = flag(
        "Fields for every plain prompt, such as '{\"max_tokens\": 64}'; fields of its line override them.",
        metavar="JSON",
    )
    served_model_names: tuple[str, ...] = flag(
        "Another name that lines may use for the model. Repeatable.",
        (),
        flags=("--served-model-name",),
        metavar="NAME",
    )
    allowed_image_hosts: tuple[str, ...] = flag(
        "A host from which pictures may be fetched by http(s) URL. Repeatable. Default: none.",
        (),
        flags=("--allowed-image-host",),
        metavar="HOST",
    )


@with_flags
def batch(
    source: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="Requests or prompts, one on each line; of a .txt, prompts.")
    ],
    output: Annotated[Path, typer.Option("--output", metavar="OUT.jsonl", help="Where answers go.")],
    *,
    options: BatchOptions,
    config: RuntimeConfig,
) -> None:
    """Answer a file of requests, or of prompts, into a file.

    kestrel batch questions.jsonl --output answers.jsonl --model qwen3-4b

    Lines have OpenAI's batch form (custom_id, method, url, body), or {"prompt": …}. Answers are kept in
    OUT.jsonl.journal as they come. If a run ends early, the same command continues it.
    """
    _check(options, config)
    check_parent_folder("--output", output)
    if not source.exists():
        raise ConfigError("IN.jsonl", f"there is no {source}; give a file with a request or prompt on each line")
    prompt_body = _prompt_body(options.prompt_body)
    # Here and not above: help and refusals need no web framework.
    from kestrel.labelling.batch import BatchJob  # noqa: PLC0415
    from kestrel.labelling.batch_lines import CHAT, BatchInput, PromptOptions  # noqa: PLC0415

    url = CHAT if options.prompt_url is None else options.prompt_url
    with BatchInput.open(source, PromptOptions(url=url, body=prompt_body)) as lines:
        _refuse_unused(lines, options)
        with BatchJob.open(lines, output, _answers_of(options, config)) as job:
            _finish(job, options, config)
            job.write()
            counts = job.counts
    note(f"{counts.answered} of {counts.total} lines are answered, in {output}")
    if counts.failed:
        note(f"{counts.failed} failed; the output says why. Run the same command to ask them again")
        raise typer.Exit(FAILED)


def _finish(job: BatchJob, options: BatchOptions, config: RuntimeConfig) -> None:
    """Until every line has an answer or a refusal."""
    counts = job.counts
    if counts.answered == counts.total:
        return
    if counts.answered:
        note(f"going on: {counts.answered} of {counts.total} lines are answered already")
    try:
        run_to_end(_ask_all(job, options, config))
    except (Interrupted, KestrelError):
        note(f"{job.counts.answered} of {counts.total} lines are answered; run the same command to continue")
        raise


async def _ask_all(job: BatchJob, options: BatchOptions, config: RuntimeConfig) -> None:
    concurrency = options.concurrency or 2 * config.max_batch_size
    async with _answerer(options, config, concurrency) as answerer:
        with LineBar(job.counts) as bar:
            await job.run(answerer, concurrency, retry_for_s=options.retry_for, told=bar, warn=bar.warn)
    if options.endpoint is None:
        note_default_model(config)


@asynccontextmanager
async def _answerer(options: BatchOptions, config: RuntimeConfig, concurrency: int) -> AsyncIterator[Answerer]:
    from kestrel.labelling.batch import over_engine, over_http  # noqa: PLC0415

    if options.endpoint is not None:
        key = options.api_key or os.environ.get(KEY_VARIABLE) or None
        async with over_http(options.endpoint, key, concurrency) as answerer:
            yield answerer
        return
    if config.max_queue_size == RuntimeConfig.max_queue_size:
        config = replace(config, max_queue_size=NO_QUEUE_LIMIT)  # what waits is bounded by --concurrency
    with _no_lines_of_requests():
        async with (
            open_engine(config) as engine,
            over_engine(engine, options.served_model_names, options.allowed_image_hosts) as answerer,
        ):
            yield answerer


@contextmanager
def _no_lines_of_requests() -> Iterator[None]:
    """What such a line says is in the answer."""
    log = logging.getLogger("kestrel.server.access")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


class LineBar:
    """Answered lines on stderr, only on a terminal, wiped at the end."""

    def __init__(self, counts: Counts) -> None:
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = stderr_console()
        columns = (
            TextColumn("answering"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed, {task.fields[rate]:.1f}/s"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=counts.total, completed=counts.answered, failed=0, rate=0.0)

    def __call__(self, counts: Counts) -> None:
        rate = self._bar.tasks[0].speed or 0.0
        done = counts.answered + counts.failed
        self._bar.update(self._task, completed=done, failed=counts.failed, rate=rate)

    def warn(self, text: str) -> None:
        self._bar.console.print(printable(one_line(text)), style="dim", markup=False, soft_wrap=True)

    def __enter__(self) -> LineBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


# ---------------------------------------------------------------------- what is checked first


def _check(options: BatchOptions, config: RuntimeConfig) -> None:
    if options.concurrency is not None and not 1 <= options.concurrency <= MOST_AT_ONCE:
        raise ConfigError("--concurrency", f"must be from 1 to {MOST_AT_ONCE} (got {options.concurrency})")
    if not 0 <= options.retry_for < float("inf"):
        raise ConfigError("--retry-for", f"must be a number of seconds from 0 on (got {options.retry_for})")
    if options.endpoint is None:
        if options.api_key is not None:
            raise ConfigError("--api-key", "is for a server; name it with --endpoint, or leave the key out")
        check_model(config)
        return
    from kestrel.client.refusals import base_url  # noqa: PLC0415

    base_url(options.endpoint, "--endpoint")
    changed = [name for name in ("served_model_names", "allowed_image_hosts") if getattr(options, name)]
    if changed:
        raise ConfigError(changed[0], "is for a model loaded here; leave it or --endpoint out")
    refuse_local_settings(config)


def _refuse_unused(lines: BatchInput, options: BatchOptions) -> None:
    for name, value in (("--prompt-url", options.prompt_url), ("--prompt-body", options.prompt_body)):
        if value is not None and not lines.num_prompts:
            raise ConfigError(name, "is for plain prompts, and no line is one; leave it out")


def _prompt_body(text: str | None) -> dict[str, Any]:
    try:
        value = {} if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError("--prompt-body", f"is not JSON ({error}); write it as in '{{\"max_tokens\": 64}}'") from None
    if not isinstance(value, dict):
        raise ConfigError("--prompt-body", f'must be an object such as {{"max_tokens": 64}} (got {shown(value)})')
    return value


def _answers_of(options: BatchOptions, config: RuntimeConfig) -> dict[str, Any]:
    """What decides the answers, for the journal. An endpoint may have another address when a run goes on."""
    if options.endpoint is not None:
        return {"endpoint": True}
    values = {name: getattr(config, name) for name in DECIDES_ANSWERS}
    return {name: str(value) for name, value in values.items() if value is not None}
