"""A labelling job on a Ray cluster: the same journal and the same rows, by engines on its GPUs.

    cluster = RayCluster("auto")
    with open_journal(output, task, model, sources, options) as journal:
        async for row in RayJob(sources, task, journal, cluster, RuntimeConfig(model="moondream2"), options=options):
            print(row.file)

One Ray task on this machine lists the sources as a job without Ray does, and cuts them into chunks of items. Actors
with an engine take chunks, read the pictures, and give rows back; each is in the journal before anybody sees it. Ray
keeps nothing: the journal is what the next run goes on from, with Ray or without.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError, KestrelError
from kestrel.integrations.cluster.config import gpus_per_engine, refuse_named_gpu
from kestrel.integrations.ray_data import BATCHES_AT_ONCE, ActorEngine, require_ray
from kestrel.labelling.askers import Answer, EngineAsker
from kestrel.labelling.job import NUM_READERS, Done, LabelJob, Picture, Wanted, answered, read_picture
from kestrel.labelling.object_stores import is_stored
from kestrel.labelling.pictures import GLOB_SIGNS
from kestrel.labelling.records import Item, Row
from kestrel.labelling.sources import Notes
from kestrel.threads import Threads

if TYPE_CHECKING:
    from kestrel.labelling.journal import Journal
    from kestrel.labelling.task import LabelTask

CHUNK_BYTES = 2**25
"""Of pictures that are sent along, because only who lists them can read them."""
LOCAL_CPUS = 8
"""Ray counts tasks against these; with fewer, those beside the engines may never get a turn."""


@dataclass(frozen=True)
class RayCluster:
    """Where to work. `address`: auto (the cluster that this machine is part of), HOST:PORT of its head, or local."""

    address: str
    num_engines: int | None = None
    """By default as many as the cluster has GPUs for, or one on CPUs."""

    def __post_init__(self) -> None:
        require_ray("ray")
        if "://" in self.address:
            raise ConfigError(
                "ray",
                f"{self.address} is not the address of a cluster; run on one of its machines with auto, or HOST:PORT",
            )
        if self.num_engines is not None and self.num_engines < 1:
            raise ConfigError("ray_engines", f"must be at least 1 (got {self.num_engines})")

    @contextmanager
    def joined(self) -> Iterator[None]:
        """A program that has joined a cluster already stays in it."""
        ray = import_module("ray")
        import_module("ray.data")
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        if ray.is_initialized():
            yield
            return
        own: dict[str, Any] = {}
        if self.address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            own = {"num_cpus": LOCAL_CPUS + (self.num_engines or 1), "include_dashboard": False}
        try:
            ray.init(address=self.address, log_to_driver=False, logging_level="ERROR", **own)
        except Exception as error:  # Ray has no type for what is wrong with an address or a machine
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                "ray", f"no cluster at {self.address} ({reason}); start one with `ray start --head`, or use local"
            ) from error
        try:
            yield
        finally:
            ray.shutdown()

    def placing(self, config: RuntimeConfig, num_calls: int) -> dict[str, Any]:
        """How many engines, what each takes of the cluster, and how many calls it has at the same time."""
        ray = import_module("ray")
        gpus = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
        num_engines, num_gpus = engines_for(config, gpus, self.num_engines)
        pool = ray.data.ActorPoolStrategy(size=num_engines, max_concurrent_calls_per_actor=num_calls)
        return {"compute": pool, **({"num_gpus": num_gpus} if num_gpus else {"num_cpus": 1})}


def engines_for(config: RuntimeConfig, gpus: Sequence[int], num_engines: int | None) -> tuple[int, int]:
    """How many engines there are, and GPUs of each. `gpus`: of each machine; `num_engines`: if it was given, in which
    case the cluster may add machines for them."""
    needed = gpus_per_engine(config)
    if config.device == "auto" and not any(gpus):
        needed = 0
    if num_engines is not None or not needed:
        return num_engines or 1, needed
    fitting = sum(num_gpus // needed for num_gpus in gpus)
    if not fitting:
        most = f"an engine needs {needed} GPUs of one machine, and none has more than {max(gpus, default=0)}"
        raise ConfigError("ray", f"{most}; use device cpu, or give ray_engines if the cluster adds machines by itself")
    return fitting, needed


def calls_and_size(num_requests: int) -> tuple[int, int]:
    """How many chunks an engine has at the same time, and pictures each has: together at most `num_requests`."""
    num_calls = min(BATCHES_AT_ONCE, num_requests)
    return num_calls, num_requests // num_calls


# ---------------------------------------------------------------------- what travels


@dataclass
class Chunk:
    """Pictures to label on the way to an engine, then what became of them."""

    items: list[Item | Picture] = field(default_factory=list)
    """A picture where only who listed it could read it."""
    num_met: int = 0
    """Pictures that were done before, as far as the sources are listed."""
    num_errors_met: int = 0
    notes: Notes | None = None
    """In the last one."""
    answers: list[tuple[Row, Answer | None]] = field(default_factory=list)
    took_s: float = 0.0
    """Once the engine was there."""


def chunks(wanted: Wanted, done: Done, size: int, dumps: Callable[[Any], bytes]) -> Iterator[bytes]:
    """Pickled. The last one may be empty."""
    notes, parts, num_bytes = Notes(), [], 0
    for item in wanted.items(done, notes):
        part: Item | Picture = item
        try:
            data = dumps(item)
        except (TypeError, AttributeError, pickle.PicklingError):  # such as a member of an open archive
            part = read_picture(item)
            part = replace(part, item=replace(item, read=bytes))
            data = part.data
        parts.append(part)
        num_bytes += len(data)
        if len(parts) == size or num_bytes > CHUNK_BYTES:
            yield dumps(Chunk(parts, done.num_met, done.num_errors_met))
            parts, num_bytes = [], 0
    yield dumps(Chunk(parts, done.num_met, done.num_errors_met, notes))


class LabelPredictor:
    """For `map_batches`: a row is a chunk."""

    def __init__(
        self, task: LabelTask, config: RuntimeConfig, num_requests: int | None, sources: Sequence[str]
    ) -> None:
        for name in sources:
            if not is_stored(name) and not GLOB_SIGNS.search(name) and not os.path.lexists(name):
                raise ConfigError(
                    "SOURCE",
                    f"{name} is not on {socket.gethostname()}, where an engine is to read it; "
                    "put it on a file system that all machines share, or into an object store",
                )
        self._task = task
        self._num_requests = num_requests
        self._actor = ActorEngine(config, task.task)
        self._readers = Threads("label", NUM_READERS)

    async def __call__(self, batch: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"chunk": [pickle.dumps(await self._labelled(pickle.loads(data))) for data in batch["chunk"]]}

    async def _labelled(self, chunk: Chunk) -> Chunk:
        if chunk.items:
            asker = EngineAsker(await self._actor.get(), self._num_requests)
            began_s = time.monotonic()
            chunk.answers = await asyncio.gather(*(self._answered(asker, part) for part in chunk.items))
            chunk.took_s = time.monotonic() - began_s
        return replace(chunk, items=[])

    async def _answered(self, asker: EngineAsker, part: Item | Picture) -> tuple[Row, Answer | None]:
        picture = part if isinstance(part, Picture) else await self._readers.run(read_picture, part)
        row, answer = await answered(asker, self._task, picture)
        return row, answer and replace(answer, output={})

    async def close(self) -> None:
        await self._actor.close()


# ---------------------------------------------------------------------- the job


class RayJob(LabelJob):
    """As the job it is derived from, but that equal pictures are each asked about."""

    def __init__(
        self,
        sources: Sequence[str],
        task: LabelTask,
        journal: Journal,
        cluster: RayCluster,
        config: RuntimeConfig,
        *,
        num_requests: int | None = None,
        **options: Any,
    ) -> None:
        """`num_requests`: pictures that each engine is asked about at the same time; further options are LabelJob's."""
        refuse_named_gpu(config)
        super().__init__(sources, task, journal, _no_asker, **options)
        self._cluster = cluster
        self._config = config
        self._num_requests = num_requests or BATCHES_AT_ONCE * config.max_batch_size

    async def rows(self) -> AsyncGenerator[Row, None]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Chunk | Exception | None]()
        left = threading.Event()
        with self._cluster.joined(), ExitStack() as stack:
            follow = threading.Thread(target=self._follow, args=(loop, arrived, left), name="label-ray", daemon=True)
            follow.start()
            stack.callback(left.set)
            while (chunk := await arrived.get()) is not None:
                if isinstance(chunk, Exception):
                    raise _cause(chunk) from chunk
                self._done.num_met = max(self._done.num_met, chunk.num_met)
                self._done.num_errors_met = max(self._done.num_errors_met, chunk.num_errors_met)
                self.notes = chunk.notes or self.notes
                if not self.progress.num_rows:
                    self.progress.began_s = self.progress.last_s = time.monotonic() - chunk.took_s
                for row, answer in chunk.answers:
                    self._count(answer)
                    yield self._finish(row)

    def _follow(
        self,
        loop: asyncio.AbstractEventLoop,
        arrived: asyncio.Queue[Chunk | Exception | None],
        left: threading.Event,
    ) -> None:
        """In a thread. It ends with the cluster, or with the first chunk after nobody waits for them."""
        last: Exception | None = None
        try:
            for row in self._dataset().iter_rows():
                if left.is_set():
                    return
                loop.call_soon_threadsafe(arrived.put_nowait, pickle.loads(row["chunk"]))
        except Exception as error:
            last = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(arrived.put_nowait, last)

    def _dataset(self) -> Any:
        ray = import_module("ray")
        context = ray.data.DataContext.get_current()
        before = context.target_max_block_size, context.enable_progress_bars
        # A row of this dataset is a chunk: with blocks of one row each is a task, and is here as soon as it is done.
        context.target_max_block_size, context.enable_progress_bars = 1, False
        try:
            done = Done(frozenset(self.journal.keys) - self._done.but, self._done.errors)
            here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
            num_calls, size = calls_and_size(self._num_requests)
            listed = ray.data.read_datasource(
                _source(self.wanted, ray.put(done), size), override_num_blocks=1, num_cpus=0, label_selector=here
            )
            sources = [name if is_stored(name) else _absolute(name) for name in self.wanted.sources]
            told = {"task": self.task, "config": self._config, "sources": sources}
            return listed.map_batches(
                LabelPredictor,
                fn_constructor_kwargs={**told, "num_requests": self._num_requests},
                batch_size=1,
                **self._cluster.placing(self._config, num_calls),
            )
        finally:
            context.target_max_block_size, context.enable_progress_bars = before


def _no_asker() -> NoReturn:
    raise AssertionError("engines of the cluster are asked")


def _absolute(name: str) -> str:
    return os.path.abspath(os.path.expanduser(name))


def _source(wanted: Wanted, done: Any, size: int) -> Any:
    """A dataset of chunks, listed by one task in this folder; `done` is a reference."""
    import pyarrow  # noqa: PLC0415 - Ray Data needs it

    ray, blocks_of, files = (import_module(name) for name in ("ray", "ray.data.block", "ray.data.datasource"))
    dumps = import_module("ray.cloudpickle").dumps  # what reads an item may be a closure
    folder = os.getcwd()

    def blocks() -> Iterator[Any]:
        os.chdir(folder)  # names of pictures are relative to it
        for chunk in chunks(wanted, ray.get(done), size, dumps):
            yield pyarrow.table({"chunk": [chunk]})

    class ChunkSource(files.Datasource):
        def estimate_inmemory_data_size(self) -> None:
            return None

        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[Any]:
            unknown = blocks_of.BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
            return [files.ReadTask(blocks, unknown)]

    return ChunkSource()


def _cause(error: BaseException) -> BaseException:
    """What an engine raised, without what Ray wrapped around it."""
    inner: BaseException | None = error
    while inner is not None and (not isinstance(inner, KestrelError) or hasattr(inner, "cause")):
        inner = getattr(inner, "cause", None) or inner.__cause__
    return inner or error
