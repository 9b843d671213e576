"""The engine: skills in, results out, everything between on one worker thread.

Life of a call: the skill parses the fields → pictures are decoded in a pool → the skill lays out the prompt → the
worker's scheduler runs it → updates come back to the event loop and complete the caller's stream or result.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from kestrel import default_model
from kestrel.adapters import AdapterLibrary
from kestrel.adapters.shared_memory import in_shared_memory
from kestrel.adapters.sources import AdapterListing, configured_sources, given_key, has_adapter_source
from kestrel.cache import CacheManager
from kestrel.config import RuntimeConfig
from kestrel.constraints import ResponseFormat
from kestrel.engine.intake import (
    DELAYS_IN_PREFILL,
    DELAYS_WAITING,
    PICTURES_AHEAD,
    PictureGate,
    QueueRoom,
    ReadingTurns,
    Route,
    generation_request,
    require_readable,
    size_of,
    take_route,
)
from kestrel.engine.pools import FormatThreads, PicturePool
from kestrel.engine.ranks import Leaving, prepared_model
from kestrel.engine.served import ServedEngine
from kestrel.engine.snapshot import EngineSnapshot, take_snapshot
from kestrel.engine.streams import EngineStream
from kestrel.engine.worker import Add, Cancel, CancelAll, EngineWorker, Fail, Stop
from kestrel.errors import EngineStopped
from kestrel.images.picture import Picture
from kestrel.models.family import Progress
from kestrel.ready_model import ReadyModel
from kestrel.request import AdapterUse, GenerationRequest, StreamUpdate, require_free_id
from kestrel.scheduler import GenerationScheduler
from kestrel.skills import default_registry
from kestrel.skills.base import SkillRegistry, SkillSpec


class InferenceEngine(ServedEngine):
    """Use `await InferenceEngine.create(config)`; `await engine.shutdown()` (or `async with`) when done."""

    def __init__(
        self,
        config: RuntimeConfig,
        ready: ReadyModel,
        skills: SkillRegistry,
        loop: asyncio.AbstractEventLoop,
        api_key: str | None = None,
    ) -> None:
        limits = ready.runtime.limits
        super().__init__(config, skills, ready.profile, limits, ready.vocab_size, ready.num_image_positions)
        self._ready = ready
        self._loop = loop
        self._unsent: set[EngineStream] = set()
        self._pictures = PicturePool(config, ready.picture_form, self._computes_here)
        self._formats = FormatThreads(ready.profile.constraints)
        self._adapters = AdapterLibrary(
            configured_sources(config, api_key),
            ready.adapter_shape,
            [ready.profile.name],
            max_rank=config.max_adapter_rank,
            max_bytes=config.adapter_memory_bytes,
            place=in_shared_memory if ready.computes_apart or ready.others is not None else None,
        )
        self._accepting = True
        self._fault: BaseException | None = None
        self._cache = CacheManager(limits.num_pages, limits.page_size, config.enable_prefix_cache)
        self._scheduler = GenerationScheduler(
            ready.runtime,
            self._cache,
            priority_ageing_s=config.priority_ageing_s,
        )
        self._room = QueueRoom(lambda: self.max_requests, config.max_queue_tokens, self._scheduler.has_begun)
        self._turns = ReadingTurns(loop, self._num_delays)
        self._gate = PictureGate(loop, limits.max_batch_size + PICTURES_AHEAD, config.priority_ageing_s)
        self._worker = EngineWorker(self._scheduler, self._deliver_from_worker, self._fault_from_worker)

    @classmethod
    async def create(
        cls,
        config: RuntimeConfig,
        *,
        skills: SkillRegistry | None = None,
        api_key: str | None = None,
        progress: Progress | None = None,
    ) -> InferenceEngine:
        """Load the model and start. `api_key`, by default MOONDREAM_API_KEY, is for hosted adapters alone."""
        api_key = given_key(api_key)
        with_adapters = has_adapter_source(config, api_key)
        leaving = Leaving()
        try:
            ready = await asyncio.to_thread(
                prepared_model, config, progress, with_adapters=with_adapters, leaving=leaving
            )
        except asyncio.CancelledError:
            leaving.leave()
            raise
        return cls.start(config, ready, skills=skills, api_key=api_key)

    @classmethod
    def start(
        cls,
        config: RuntimeConfig,
        ready: ReadyModel,
        *,
        skills: SkillRegistry | None = None,
        api_key: str | None = None,
    ) -> InferenceEngine:
        """An engine over a model in memory that no other engine is using, on the running event loop."""
        engine = cls(config, ready, skills or default_registry(), asyncio.get_running_loop(), api_key)
        engine._worker.start()
        engine.watch(engine.fail)
        return engine

    def watch(self, on_end: Callable[[EngineStopped], None]) -> None:
        """Call `on_end`, from a thread, if a process ends that has a part of the model."""
        if self._ready.others is not None:
            self._ready.others.watch(on_end)

    def _computes_here(self) -> bool:
        """Whether the model is at work on this machine's processor."""
        return self._ready.runtime.limits.paces_pictures and self._worker.busy_since_s is not None

    def _num_delays(self) -> int:
        """Of requests that are to be read, while a GPU may be waiting for the worker."""
        if self._ready.runtime.limits.paces_pictures or not self._worker.is_preparing:
            return 0
        if not self._scheduler.has_steps_in_flight:
            return DELAYS_WAITING
        return DELAYS_IN_PREFILL if self._scheduler.is_in_long_prefill else 0

    # ------------------------------------------------------------------ what is loaded and how it is doing

    @property
    def fault(self) -> BaseException | None:
        return self._worker.fault or self._fault

    @property
    def is_running(self) -> bool:
        return self._accepting and self.fault is None and self._worker.is_alive

    @property
    def busy_since_s(self) -> float | None:
        return self._worker.busy_since_s

    def _has_begun(self, request_id: str) -> bool:
        return self._scheduler.has_begun(request_id)

    async def list_adapters(self) -> Sequence[AdapterListing]:
        return await self._adapters.list()

    def snapshot(self) -> EngineSnapshot:
        num_unsent = len(self._unsent) + self._worker.num_unread
        return take_snapshot(self._scheduler, self._cache, self.max_batch_size, num_unsent, self._adapters.snapshot())

    # ------------------------------------------------------------------ one request

    def _keep_pictures(self, request_id: str, part_id: str) -> Sequence[Picture] | None:
        return self._pictures.hold(request_id, self._pictures.held(part_id))

    def _drop_pictures(self, request_id: str) -> None:
        self._pictures.release(request_id)

    async def _start(
        self,
        skill: SkillSpec[Any],
        fields: dict[str, Any],
        is_stream: bool,
        pictures: Sequence[Picture] | None = None,
    ) -> EngineStream:
        """Parse, decode, lay out and hand over. The fields of a `Route` are the engine's own."""
        submitted_s = time.monotonic()
        route = take_route(fields)
        stream = self._open_stream(route, skill.name)
        self._unsent.add(stream)
        try:
            await self._turns.take()
            stream.require_open()
            size = size_of(fields, self.vocab_size, self.max_model_length)
            require_readable(size.num_characters, self.max_model_length)
            request = skill.parse({k: v for k, v in fields.items() if v is not None}, self.profile)
            self._refuse_for_others(self._room.enter(stream.request_id, route.client), "max_queue_size")
            adapter = None if request.adapter is None else await self._adapter(request.adapter)
            if pictures is not None:
                images = self._pictures.hold(stream.request_id, pictures)
            else:
                if request.images and adapter is None:  # others may have to wait for a slot, and would block the gate
                    await self._gate.enter(stream.request_id, route.client, route.priority)
                    stream.require_open()
                images = await self._pictures.decode(
                    stream.request_id, request.images, stream.require_open, request.max_crops
                )
            has_reader = is_stream if route.has_reader is None else route.has_reader
            lay_out = (generation_request, self._ready, skill, request, images, stream.request_id, has_reader)
            if request.response_format is not None:
                generation = await self._formats.run(self._is_kept(request.response_format), *lay_out)
            else:
                generation = await self.text_threads.run(*lay_out) if size.is_large else lay_out[0](*lay_out[1:])
            generation.tenant, generation.client, generation.adapter = route.tenant, route.client, adapter
            generation.cache_salt, generation.priority = route.cache_salt, route.priority
            generation.is_streaming = is_stream if route.read_along is None else route.read_along
            generation.submitted_s = submitted_s
            if generation.prompt_outputs is None:
                generation.tells_tokens, generation.resumed = route.tells_tokens, route.resumed
            stream.adapter = None if adapter is None else adapter.name
            stream.num_prompt_tokens = generation.num_prompt_positions
            if images and adapter is None and self.model_name == default_model.NAME:
                stream.warnings = (default_model.NOTICE,)
            if skill.finds_places and images:
                stream.picture_size = (images[0].width, images[0].height)
            self._send(stream, generation)
        except BaseException:
            self._close_stream(stream.request_id)
            raise
        finally:
            self._unsent.discard(stream)
        return stream

    async def _adapter(self, name: str) -> AdapterUse:
        loaded = await self._adapters.get(name)
        return AdapterUse(loaded.adapter_id, loaded.key, loaded.adapter)

    async def prepare_formats(self) -> None:
        await self._formats.prepare()

    def _is_kept(self, wanted: ResponseFormat) -> bool:
        constraints = self.profile.constraints
        return constraints is not None and constraints.is_kept(wanted)

    def _send(self, stream: EngineStream, generation: GenerationRequest) -> None:
        stream.require_open()  # not cancelled, nor the worker failed, while its picture was decoded
        self._refuse_for_others(
            self._room.weigh(stream.request_id, generation.num_prompt_positions), "max_queue_tokens"
        )
        if not self._worker.try_send(Add(generation), wakes=False):
            raise self._stopped()
        # With all that are read in this round, so that the first step of a flood is a full one and is launched while
        # nobody else wants the interpreter.
        self._loop.call_soon(self._worker.wake)

    def _open_stream(self, route: Route, skill: str) -> EngineStream:
        request_id = route.request_id or uuid.uuid4().hex
        require_free_id(request_id, self._streams, self._joint)
        stream = EngineStream(request_id, skill, self.cancel, self._list_threads)
        self._streams[request_id] = stream
        return stream

    def _close_stream(self, request_id: str) -> None:
        self._room.leave(request_id)
        self._streams.pop(request_id, None)
        self._pictures.release(request_id)
        self._gate.leave(request_id)

    def _stop(self, stream: EngineStream) -> None:
        if stream in self._unsent:
            self._gate.leave(stream.request_id)
        else:
            self._worker.try_send(Cancel(stream.request_id))

    def _require_running(self) -> None:
        if not self.is_running:
            raise self._stopped()
        if asyncio.get_running_loop() is not self._loop:
            raise EngineStopped("the engine belongs to another event loop; create it on the loop that uses it")

    def _stopped(self) -> EngineStopped:
        fault = self.fault
        if fault is None:
            return EngineStopped("the engine has been shut down; create a new one")
        error = EngineStopped(f"the engine's worker failed: {type(fault).__name__}: {fault}; create a new engine")
        error.__cause__ = fault
        return error

    # ------------------------------------------------------------------ from the worker

    def _deliver_from_worker(self, updates: list[StreamUpdate]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, updates)

    def _fault_from_worker(self, error: EngineStopped) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail_streams, error)

    def fail(self, error: BaseException) -> None:
        """The worker is told and not waited for."""
        self._fault = error
        self._worker.try_send(Fail(error))
        self._fault_from_worker(self._stopped())

    def _dispatch(self, updates: list[StreamUpdate]) -> None:
        for update in updates:
            stream = self._streams.get(update.request_id)
            if stream is None:
                continue
            stream.deliver(update)
            if update.finish_reason is not None:  # not before, also when its caller was told sooner
                self._close_stream(update.request_id)

    def _fail_streams(self, error: EngineStopped) -> None:
        for joint in list(self._joint.values()):
            joint.end(error)
        for stream in list(self._streams.values()):
            stream.fail(error)
            self._close_stream(stream.request_id)

    # ------------------------------------------------------------------ the end

    async def shutdown(self, *, drain: bool = True, timeout_s: float = 30.0) -> None:
        """A worker that has not ended its step in time is left behind."""
        self._accepting = False
        deadline = time.monotonic() + (timeout_s if self.fault is None else 0.0)
        while drain and (self._unsent or self._joint) and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        if not drain:
            cut_off = EngineStopped("the engine was shut down before the request finished")
            self._worker.try_send(CancelAll(cut_off))
            await asyncio.sleep(0)  # let updates already handed to the loop arrive first
            self._fail_streams(cut_off)
        self._worker.try_send(Stop())
        if not await self._join(deadline - time.monotonic()):
            late = EngineStopped(f"the engine was shut down; {timeout_s:g} s were not enough to finish the request")
            self._worker.try_send(CancelAll(late))
            await self._join(GRACE_AFTER_TIMEOUT_S)
        await asyncio.sleep(0)  # let updates already handed to the loop arrive first
        self._fail_streams(EngineStopped("the engine was shut down before the request finished"))
        self._pictures.close()
        self._formats.close()
        self._list_threads.close()
        self.text_threads.close()
        await self._adapters.close()
        if self._ready.others is not None:
            self._ready.others.close()

    async def _join(self, timeout_s: float) -> bool:
        """Wait for the worker in short naps, so that no helper thread outlives a time-out."""
        deadline = time.monotonic() + timeout_s
        for nap_s in itertools.chain((0.0005, 0.001, 0.002, 0.005), itertools.repeat(0.01)):
            if not self._worker.is_alive or time.monotonic() >= deadline:
                break
            await asyncio.sleep(nap_s)
        return not self._worker.is_alive

    async def __aenter__(self) -> InferenceEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown(drain=kind is None)


GRACE_AFTER_TIMEOUT_S = 2.0
"""How long a cancelled worker may take to end its current step."""


# ---------------------------------------------------------------------- warm-up

WARM_UP_TENANT = "warm-up"
"""Its cached KV is shared with nobody."""
WARM_UP_FIELDS = {
    "query": {"question": "What is this?", "reasoning": False, "max_tokens": 2},
    "caption": {"max_tokens": 2},
    "point": {"object": "thing", "max_objects": 1},
    "detect": {"object": "thing", "max_objects": 1},
    "segment": {"object": "thing", "max_tokens": 8},
}

TEXT_WARM_UP_FIELDS = {"prompt": "What is this?", "max_tokens": 2}
"""Of a model that knows none of those."""


async def warm_up(engine: ServedEngine) -> float:
    """One real request per skill that the model knows, and the vocabulary for answer formats, before a server calls
    itself ready; the seconds it took."""
    began_s = time.monotonic()
    await engine.prepare_formats()
    known = {name.split(".")[0] for name in engine.profile.templates}
    picture = _warm_up_picture() if engine.profile.has_vision else None
    for skill, fields in WARM_UP_FIELDS.items():
        if skill in known and skill in engine.skills:
            await engine.run(skill, image=picture, tenant=WARM_UP_TENANT, **fields)
    if not known:
        await engine.run("complete", tenant=WARM_UP_TENANT, **TEXT_WARM_UP_FIELDS)
    return time.monotonic() - began_s


def _warm_up_picture() -> np.ndarray:
    """Small enough for one crop: more of them are the same work again, and a server should be back soon."""
    rows, columns = np.mgrid[0:300, 0:400]
    return np.stack([rows % 256, columns % 256, (rows + columns) % 256], axis=-1).astype(np.uint8)
