"""What `kestrel label` does once its flags are read: a job with its progress, or an estimate; then the files."""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars

from kestrel import default_model
from kestrel.cli.batch import KEY_VARIABLE
from kestrel.cli.console import Interrupted, counted, note, run_to_end, stderr_console, write
from kestrel.cli.label import RunFlags
from kestrel.cli.loading import note_default_model, open_engine, require_skill
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError, KestrelError
from kestrel.labelling.askers import ENDPOINT_REQUESTS, Asker, EndpointAsker, EngineAsker
from kestrel.labelling.endpoint import Endpoint
from kestrel.labelling.job import LabelJob, Progress, open_journal
from kestrel.labelling.journal import Journal
from kestrel.labelling.object_stores import upload
from kestrel.labelling.outputs import apply_decisions, named_faults, write_outputs
from kestrel.labelling.plans import OutputPlan
from kestrel.labelling.ray_job import RayCluster, RayJob
from kestrel.labelling.review.decisions import Decisions
from kestrel.labelling.sources import SourceOptions, count, items
from kestrel.labelling.task import LabelTask

LINE_INTERVAL_S = 15.0
"""Between two lines about how far the work is, without a terminal."""
GO_ON = "run the same command to continue"
SAMPLE = 48
"""Pictures that a dry run labels."""


@dataclass(frozen=True)
class Work:
    """One command line."""

    sources: Sequence[str]
    task: LabelTask
    options: SourceOptions
    limit: int | None
    output: Path
    plan: OutputPlan
    run: RunFlags
    config: RuntimeConfig

    async def model_name(self) -> str:
        """Known before a model is loaded."""
        if self.run.endpoint is not None:
            async with self._server(self.run.endpoint) as endpoint:
                return await endpoint.model_name()
        weights, revision = self.config.weights, self.config.revision
        name = self.config.model or (default_model.NAME if weights is None else str(weights.resolve()))
        return name if revision is None else f"{name}@{revision}"

    def _server(self, url: str, num_requests: int = 1) -> Endpoint:
        key = self.run.api_key or os.environ.get(KEY_VARIABLE) or None
        return Endpoint(url, key, num_connections=num_requests, told=note)

    def job(self, journal: Journal) -> LabelJob:
        what = (self.sources, self.task, journal)
        how: dict[str, Any] = {"options": self.options, "limit": self.limit, "retry_errors": self.run.retry_errors}
        if self.cluster is not None:
            note_default_model(self.config)
            return RayJob(*what, self.cluster, self.config, num_requests=self.run.concurrency, **how)
        return LabelJob(*what, self.asker, **how)

    @cached_property
    def cluster(self) -> RayCluster | None:
        return None if self.run.ray is None else RayCluster(self.run.ray, self.run.ray_engines)

    @asynccontextmanager
    async def asker(self) -> AsyncIterator[Asker]:
        if self.run.endpoint is not None:
            num_requests = self.run.concurrency or ENDPOINT_REQUESTS
            async with self._server(self.run.endpoint, num_requests) as endpoint:
                yield EndpointAsker(endpoint, num_requests)
            return
        async with open_engine(self.config) as engine:
            require_skill(engine.profile, self.task.task)
            note_default_model(self.config)
            yield EngineAsker(engine, self.run.concurrency)

    def total(self) -> int | None:
        """How many pictures there are to label, if that can be told."""
        found = count(self.sources, self.options)
        return found if found is None or self.limit is None else min(found, self.limit)


def run_label(work: Work, decisions: Decisions | None, address: str | None) -> None:
    """`decisions`: of a review page, to apply; `address`: where to copy the output to."""
    items(work.sources, work.options)  # refuses what cannot be read, before anything is written or loaded
    _ = work.cluster  # likewise
    if work.run.dry_run:
        write(run_to_end(_estimate(work)))
        return
    model = run_to_end(work.model_name())
    with (
        named_faults(work.output),
        open_journal(work.output, work.task, model, work.sources, work.options) as journal,
    ):
        try:
            run_to_end(_label(work, journal))
            if decisions is not None:
                num_changed, refused = apply_decisions(journal, decisions)
                note(f"decisions changed {counted(num_changed, 'picture')}")
                for reason in refused:
                    note(f"not applied: {reason}")
            written = write_outputs(journal, work.task, work.sources, work.options, work.plan)
            if written.num_missing:
                note(f"left out, because they are gone or have changed: {counted(written.num_missing, 'picture')}")
            if address is not None:
                upload(work.output, address)
            for path in written.paths:
                write(f"{path}\n")
        except (KeyboardInterrupt, Interrupted):
            note(_so_far(journal))
            raise


def _so_far(journal: Journal) -> str:
    return f"done so far: {counted(len(journal), 'picture')}; {GO_ON}"


async def _label(work: Work, journal: Journal) -> None:
    job = work.job(journal)
    counting = asyncio.create_task(asyncio.to_thread(work.total))
    try:
        with View(job, counting) as view:
            async with aclosing(job.rows()) as rows:
                async for _ in rows:
                    view.show()
    except KestrelError:
        note(_so_far(journal))
        raise
    finally:
        counting.cancel()
    for line in job.notes.lines():
        note(line)
    if not len(journal):
        raise ConfigError("SOURCE", "there are no pictures to label; name a folder, archive, list or video with some")
    note(view.summary())
    if num_errors := job.progress.num_errors + job.num_done_errors:
        note(f"{work.output / 'errors.csv'} says what is wrong with {counted(num_errors, 'picture')}")


async def _estimate(work: Work) -> str:
    """A sample, labelled in a folder of its own."""
    total = await asyncio.to_thread(work.total)
    sample = replace(work, limit=min(SAMPLE, work.limit or SAMPLE))
    with tempfile.TemporaryDirectory(prefix="kestrel-label-") as folder, ExitStack() as stack:
        journal = stack.enter_context(open_journal(Path(folder), work.task, "", work.sources, work.options))
        job = sample.job(journal)
        async with aclosing(job.rows()) as rows:
            async for _ in rows:
                pass
    done = job.progress
    if not done.num_rows:
        return "there are no pictures to label\n"
    each_s, asked = done.seconds / done.num_rows, max(1, done.num_asked)
    lines = [
        f"sample: {counted(done.num_rows, 'picture')} in {done.seconds:.1f} s, {figures(done)}",
        f"tokens: {done.input_tokens / asked:.0f} in, {done.output_tokens / asked:.1f} out a picture",
    ]
    if total is None:
        lines.append("all: how many pictures there are is known only at their end")
    else:
        tokens_in, tokens_out = (
            round(total * sum_ / done.num_rows) for sum_ in (done.input_tokens, done.output_tokens)
        )
        about = f"{duration(total * each_s)}, {tokens_in} tokens in, {tokens_out} out"
        lines.append(f"all: {counted(total, 'picture')}, about {about}")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- progress


class View:
    """How far a run is: a bar on a terminal, else a line now and then."""

    def __init__(self, job: LabelJob, counting: asyncio.Task[int | None]) -> None:
        self._job = job
        self._counting = counting
        console = stderr_console()
        columns = (TextColumn("labelling"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._is_live = console.is_terminal
        self._bar = Bars(*columns, console=console, transient=True, disable=not self._is_live)
        self._task = self._bar.add_task("", total=None)
        self._line_s = time.monotonic()

    def __enter__(self) -> View:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def _total(self) -> int | None:
        is_counted = self._counting.done() and not self._counting.cancelled() and self._counting.exception() is None
        return self._counting.result() if is_counted else None

    def show(self) -> None:
        done, total = self._job.num_done + self._job.progress.num_rows, self._total
        text = figures(self._job.progress)
        if total is not None and total > done:
            text += f", {duration((total - done) * self._job.progress.seconds / self._job.progress.num_rows)} left"
        if self._is_live:
            self._bar.update(self._task, description=text, completed=done, total=total)
        elif time.monotonic() - self._line_s > LINE_INTERVAL_S:
            self._line_s = time.monotonic()
            note(f"{done} of {total or '?'} pictures, {text}")

    def summary(self) -> str:
        progress = self._job.progress
        copied = f", {progress.num_copied} of them equal to others" if progress.num_copied else ""
        before = ""
        if num_done := self._job.num_done:
            num_errors = self._job.num_done_errors
            among = f" ({counted(num_errors, 'error')} among them)" if num_errors else ""
            before = f", {num_done} {'was' if num_done == 1 else 'were'} done before{among}"
        return f"labelled {counted(progress.num_labelled, 'picture')}{copied}{before}: {figures(progress)}"


def figures(progress: Progress) -> str:
    rate = progress.num_labelled / progress.seconds if progress.seconds else 0.0
    return f"{rate:.1f} pictures/s, {counted(progress.num_objects, 'object')}, {counted(progress.num_errors, 'error')}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
