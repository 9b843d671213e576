"""The labelling of many pictures: read ahead on threads, asked in a crowd, remembered one by one.

    task = LabelTask(objects=("gear", "bolt"))
    async with await InferenceEngine.create(RuntimeConfig(model="moondream2")) as engine:
        async for row in label(["photos"], task, engine, output=Path("labels"), plan=OutputPlan(formats=("coco",))):
            print(row.file, row.found)

Every row is in OUTPUT/journal.jsonl before anybody sees it. The same call again goes on where the last one ended,
however that ended: it gives the rows that were missing, and writes the formats from all of them.

A picture that cannot be read or answered is a row with an `error`; anything else that goes wrong ends the job. Equal
pictures are labelled once. What is in memory does not grow with the number of pictures, but for some hundred bytes each
to know it by.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Container, Iterable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from kestrel.config import RuntimeConfig
from kestrel.engine.patient import is_about_request
from kestrel.errors import ConfigError, KestrelError
from kestrel.images.encoded import EncodedPicture, ImageLimits
from kestrel.labelling.askers import Answer, Asker, EndpointAsker, EngineAsker, OpenAsker
from kestrel.labelling.endpoint import Endpoint
from kestrel.labelling.journal import Journal
from kestrel.labelling.object_stores import is_stored
from kestrel.labelling.outputs import named_faults, rows_of, write_outputs
from kestrel.labelling.plans import OutputPlan
from kestrel.labelling.records import Item, Row
from kestrel.labelling.sources import Notes, SourceOptions, items
from kestrel.labelling.task import LabelTask
from kestrel.threads import Threads

if TYPE_CHECKING:
    from kestrel.engine import InferenceEngine

JOURNAL = "journal.jsonl"
NUM_READERS = 4
READ_AHEAD = 16
"""Pictures that are read and wait for their turn."""


# ---------------------------------------------------------------------- pictures


@dataclass(frozen=True, slots=True)
class Picture:
    """An item that has been read; of a bad one `error` says why."""

    item: Item
    data: bytes = b""
    digest: str = ""
    error: str | None = None


def _refuse(reason: str) -> bytes:
    raise ValueError(reason)


def read_picture(item: Item) -> Picture:
    try:
        data = item.read()
    except OSError as error:
        return Picture(item, error=f"cannot be read: {error.strerror or error}")
    except Exception as error:
        return Picture(item, error=str(error) or type(error).__name__)
    return Picture(item, data, hashlib.sha256(data).hexdigest())


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height, for answers that do not say them."""
    config = RuntimeConfig()
    limits = ImageLimits(max_pixels=config.max_image_pixels, max_bytes=len(data))
    height, width = EncodedPicture(data, limits).upright_size
    return width, height


class ReadAhead:
    """Pictures, read by a few threads some time before they are taken, in no fixed order."""

    def __init__(self, found: Iterator[Item]) -> None:
        self._found = found
        self._turn = threading.Lock()
        self._threads = Threads("label", NUM_READERS)
        self._read: asyncio.Queue[Picture | Exception | None] = asyncio.Queue(READ_AHEAD)
        self._num_readers = NUM_READERS
        self._readers = [asyncio.create_task(self._pass_on()) for _ in range(NUM_READERS)]

    async def take(self) -> Picture | None:
        """The next one; None at the end. Raises what ended the sources."""
        while self._num_readers:
            got = await self._read.get()
            if isinstance(got, Exception):
                raise got
            if got is not None:
                return got
            self._num_readers -= 1
        return None

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._threads.close()

    async def _pass_on(self) -> None:
        try:
            while (picture := await self._threads.run(self._read_next)) is not None:
                await self._read.put(picture)
            await self._read.put(None)
        except Exception as error:
            await self._read.put(error)

    def _read_next(self) -> Picture | None:
        with self._turn:
            item = next(self._found, None)
        return None if item is None else read_picture(item)


# ---------------------------------------------------------------------- asking


@dataclass(frozen=True)
class Wanted:
    """Which pictures a job is about."""

    sources: Sequence[str]
    options: SourceOptions
    task: LabelTask
    limit: int | None

    def items(self, done: Done, notes: Notes) -> Iterator[Item]:
        for num_given, item in enumerate(items(self.sources, self.options, done, notes)):
            if self.limit is not None and done.num_met + num_given >= self.limit:
                return
            try:
                self.task.require_askable(item)
            except ConfigError as error:
                item = replace(item, read=partial(_refuse, str(error)))
            yield item


async def answered(asker: Asker, task: LabelTask, picture: Picture) -> tuple[Row, Answer | None]:
    """The row of a picture. One that cannot be read or answered is a row with an error; other errors are raised."""
    item = picture.item
    if picture.error is not None:
        return Row(**_about(item), error=picture.error), None
    row = Row(**_about(item), digest=picture.digest, question=task.question_of(item))
    has_own = item.objects is not None or item.question is not None
    own_fields = ("image", "object", "question", "prompt") if has_own else ("image",)
    try:
        answer = await asker.ask(task.task, picture.data, task.fields(item))
    except KestrelError as error:
        if is_about_request(error, own_fields):
            return replace(row, error=str(error).removeprefix("image: ")), None
        raise
    size = answer.output.get("image")
    width, height = (size["width"], size["height"]) if size is not None else size_of(picture.data)
    found = task.found_in(answer.output, task.objects_of(item))
    return replace(row, width=width, height=height, found=found, answer=task.answer_in(answer.output)), answer


# ---------------------------------------------------------------------- the job


@dataclass
class Progress:
    """What a run has done so far, duplicates included."""

    num_rows: int = 0
    """Those with errors too."""
    num_objects: int = 0
    num_errors: int = 0
    num_copied: int = 0
    """Pictures that were labelled under another key."""
    num_asked: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    began_s: float = 0.0
    """When the first picture could be asked about, by the monotonic clock."""
    last_s: float = 0.0
    """When the last row came."""

    @property
    def num_labelled(self) -> int:
        return self.num_rows - self.num_errors

    @property
    def seconds(self) -> float:
        return self.last_s - self.began_s


class LabelJob:
    """An async iterator of the rows that are not in the journal yet, in the order in which they are answered.

    Iterate once. To leave a loop early, close it: `contextlib.aclosing(job.rows())`.
    """

    def __init__(
        self,
        sources: Sequence[str],
        task: LabelTask,
        journal: Journal,
        open_asker: OpenAsker,
        *,
        options: SourceOptions | None = None,
        limit: int | None = None,
        retry_errors: bool = False,
    ) -> None:
        """`limit`: only the first so many pictures. `retry_errors`: pictures whose row is an error are asked again."""
        task.require_complete(sources)
        self.task = task
        self.wanted = Wanted(sources, options or SourceOptions(), task, limit)
        self.journal = journal
        self.progress = Progress()
        self.notes = Notes()
        self._open_asker = open_asker
        self._done = Done(journal)
        self._labelled: dict[bytes, str] = {}
        self._waiting: dict[bytes, list[Item]] = {}
        for row in rows_of(journal):
            if row.error is not None:
                (self._done.but if retry_errors else self._done.errors).add(row.key)
            if row.error is None or not retry_errors:
                self._remember(row)

    @property
    def num_done(self) -> int:
        """Pictures met so far that the journal had before."""
        return self._done.num_met

    @property
    def num_done_errors(self) -> int:
        """Those of them that could not be labelled."""
        return self._done.num_errors_met

    def __aiter__(self) -> AsyncGenerator[Row, None]:
        return self.rows()

    async def rows(self) -> AsyncGenerator[Row, None]:
        pictures = ReadAhead(self._items())
        try:
            first = await pictures.take()
            if first is None:
                return
            async with self._open_asker() as asker:
                self.progress.began_s = self.progress.last_s = time.monotonic()
                async for row in self._rows(asker, pictures, first):
                    yield row
        finally:
            await pictures.close()

    def _items(self) -> Iterator[Item]:
        return self.wanted.items(self._done, self.notes)

    async def _rows(self, asker: Asker, pictures: ReadAhead, first: Picture) -> AsyncIterator[Row]:
        """Takes pictures as long as the asker has room, and gives rows as answers come."""
        taking: asyncio.Task[Picture | None] | None = None
        running: set[asyncio.Task[Any]] = set()
        is_over, picture = False, first
        try:
            while True:
                if picture is not None:
                    for row in self._begin(asker, picture, running):
                        yield row
                    picture = None
                if taking is None and not is_over and len(running) < asker.num_requests:
                    taking = asyncio.create_task(pictures.take())
                if taking is None and not running:
                    return
                wanted = running if taking is None else {taking, *running}
                done, _ = await asyncio.wait(wanted, return_when=asyncio.FIRST_COMPLETED)
                if taking in done:
                    picture, taking = taking.result(), None
                    is_over = picture is None
                for answered in done & running:
                    running.discard(answered)
                    for row in answered.result():
                        yield row
        finally:
            await _cancelled(running if taking is None else {taking, *running})

    def _begin(self, asker: Asker, picture: Picture, running: set[asyncio.Task[Any]]) -> list[Row]:
        """Rows that need no answer: of bad files, and of pictures that were labelled before."""
        item = picture.item
        if picture.error is not None:
            return [self._finish(Row(**_about(item), error=picture.error))]
        identity = self._identity(picture.digest, item.objects, self.task.question_of(item))
        known = self._labelled.get(identity)
        if known is not None:
            return [self._copied(Row.from_json(self.journal.record(known)), item)]
        if identity in self._waiting:
            self._waiting[identity].append(item)
            return []
        self._waiting[identity] = []
        running.add(asyncio.create_task(self._answer(asker, picture, identity)))
        return []

    async def _answer(self, asker: Asker, picture: Picture, identity: bytes) -> list[Row]:
        """The rows of a picture and of those that were found to be equal to it meanwhile."""
        row = await self._asked(asker, picture)
        return [self._finish(row), *(self._copied(row, item) for item in self._waiting.pop(identity))]

    def _copied(self, row: Row, item: Item) -> Row:
        """A reviewer's decisions stay with the picture that was looked at."""
        self.progress.num_copied += row.error is None
        found = tuple(replace(one, decision=None) for one in row.found)
        return self._finish(replace(row, **_about(item), found=found, decision=None))

    async def _asked(self, asker: Asker, picture: Picture) -> Row:
        row, answer = await answered(asker, self.task, picture)
        self._count(answer)
        return row

    def _count(self, answer: Answer | None) -> None:
        if answer is not None:
            self.progress.num_asked += 1
            self.progress.input_tokens += answer.input_tokens
            self.progress.output_tokens += answer.output_tokens

    def _finish(self, row: Row) -> Row:
        self.journal.add(row.key, row.as_json())
        self._remember(row)
        self.progress.num_rows += 1
        self.progress.last_s = time.monotonic()
        self.progress.num_errors += row.error is not None
        shown = replace(row, found=tuple(one for one in row.found if self.task.counts(one)))
        self.progress.num_objects += len(shown.found)
        return shown

    def _remember(self, row: Row) -> None:
        if row.digest:
            self._labelled.setdefault(self._identity(row.digest, row.objects, row.question), row.key)

    @staticmethod
    def _identity(digest: str, objects: tuple[str, ...] | None, question: str | None) -> bytes:
        """The same for pictures with the same bytes of which the same is asked."""
        return hashlib.blake2b(orjson.dumps([digest, objects, question]), digest_size=16).digest()


class Done:
    """The keys of a journal, `but` some; counts those it was asked about, and the `errors` among them."""

    def __init__(self, keys: Container[str], errors: Iterable[str] = ()) -> None:
        self._keys = keys
        self.errors = set(errors)
        self.but: set[str] = set()
        self.num_met = 0
        self.num_errors_met = 0

    def __contains__(self, key: object) -> bool:
        is_done = isinstance(key, str) and key in self._keys and key not in self.but
        self.num_met += is_done
        self.num_errors_met += is_done and key in self.errors
        return is_done


def _about(item: Item) -> dict[str, Any]:
    """The fields of a row that say which picture it is about."""
    return {"key": item.key, "file": item.file, "objects": item.objects, "frame": item.frame, "extra": item.extra}


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---------------------------------------------------------------------- from Python


def open_journal(output: Path, task: LabelTask, model: str, sources: Sequence[str], options: SourceOptions) -> Journal:
    """That of a job in its output folder, new or to go on with. Another job's is refused with what differs."""
    output.mkdir(parents=True, exist_ok=True)
    frames = {name: getattr(options, name) for name in ("recursive", "every", "fps", "scenes")}
    named = [name if is_stored(name) else os.path.abspath(os.path.expanduser(name)) for name in sources]
    return Journal.open(output / JOURNAL, {**task.identity(), "model": model, "sources": named, **frames})


async def label(
    sources: Sequence[str],
    task: LabelTask,
    answering: InferenceEngine | Endpoint,
    *,
    output: Path,
    plan: OutputPlan | None = None,
    options: SourceOptions | None = None,
    limit: int | None = None,
    retry_errors: bool = False,
) -> AsyncIterator[Row]:
    """Label what is not labelled yet, then write what `plan` says; see the head of this module."""
    plan = plan or OutputPlan()
    plan.require_fits(task)
    task.require_complete(sources)
    options = replace(options or SourceOptions(), exclude=(str(output),))
    if isinstance(answering, Endpoint):
        model, asker = await answering.model_name(), EndpointAsker(answering)
    else:
        model, asker = answering.model_name, EngineAsker(answering)
    with named_faults(output), open_journal(output, task, model, sources, options) as journal:
        job = LabelJob(
            sources,
            task,
            journal,
            lambda: nullcontext(asker),
            options=options,
            limit=limit,
            retry_errors=retry_errors,
        )
        async with aclosing(job.rows()) as rows:
            async for row in rows:
                yield row
        await asyncio.to_thread(write_outputs, journal, task, sources, options, plan)
