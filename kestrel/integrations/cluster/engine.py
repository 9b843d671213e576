"""Several engines that look like one to the server.

A request goes to the replica that knows what it begins with (`kestrel.routing`). When that replica is lost, it is sent
to another one, twice at most. A stream goes on there from the tokens that came with its chunks; a request of which
nothing was told is begun again. Every request has a seed from here, so that both give what the lost one would have.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Protocol

from kestrel.adapters.sources import AdapterListing
from kestrel.config import RuntimeConfig
from kestrel.engine.compute_process import ModelDescription
from kestrel.engine.intake import QueueRoom, Route, take_route
from kestrel.engine.served import ServedEngine
from kestrel.engine.snapshot import EngineSnapshot
from kestrel.engine.streams import EngineStream, StreamChunk
from kestrel.errors import ClusterFull, EngineStopped, QueueFull, RequestCancelled
from kestrel.images.picture import Picture
from kestrel.integrations.cluster.replica import Begun, Chunks, Ended, Message, Refused, ReplicaCall, Started
from kestrel.request import GeneratedToken, require_free_id
from kestrel.routing import PrefixKeys, prefix_keys
from kestrel.settings import SETTINGS
from kestrel.skills import default_registry
from kestrel.skills.base import SkillSpec

logger = logging.getLogger("kestrel.server")

MAX_RETRIES = 2
LARGE_PICTURE = 2**18
"""Bytes from which a picture is digested off the event loop."""
NAP_S = 0.01
WITHOUT_SEED = frozenset({"embed"})
"""Skills that generate nothing, and take no seed."""


class ReplicaLost(Exception):
    """The replica that worked on a request will never answer it."""


class ReplicaFull(Exception):
    """The replica has no room for a request."""


class Replicas(Protocol):
    """The engines, by whatever carries messages to them."""

    def ask(self, call: ReplicaCall) -> AsyncGenerator[Sequence[Message], None]:
        """Raises ReplicaLost, and ClusterFull where no more may be sent."""
        ...

    async def list_adapters(self) -> Sequence[AdapterListing]: ...

    def snapshots(self) -> Mapping[str, EngineSnapshot]:
        """What each of them has reported last, by its name."""
        ...


class ClusterEngine(ServedEngine):
    full_error = ClusterFull

    def __init__(
        self, config: RuntimeConfig, description: ModelDescription, replicas: Replicas, seed: int | None = None
    ) -> None:
        """On the running loop. Seeds of requests without one are drawn from `seed`, or by chance."""
        facts = description.facts
        super().__init__(
            config,
            default_registry(),
            facts["profile"],
            description.limits,
            facts["vocab_size"],
            facts["num_image_positions"],
        )
        self._replicas = replicas
        self._dice = random.Random(seed)
        self._calls: dict[str, _Call] = {}
        self._room = QueueRoom(lambda: self.max_requests, None, self._has_begun)  # tokens are counted by each replica
        self._fault: BaseException | None = None
        self._accepting = True
        self._num_retries = 0
        self._seen: dict[str, EngineSnapshot] = {}
        self._gone_totals: Counter[str] = Counter()

    @property
    def fault(self) -> BaseException | None:
        return self._fault

    @property
    def is_running(self) -> bool:
        return self._accepting and self._fault is None

    @property
    def busy_since_s(self) -> float | None:
        """Each replica sees to its own steps."""
        return None

    @property
    def max_requests(self) -> int:
        return super().max_requests * max(1, len(self._replicas.snapshots()))

    def _has_begun(self, request_id: str) -> bool:
        return request_id not in self._calls or self._calls[request_id].has_begun

    async def list_adapters(self) -> Sequence[AdapterListing]:
        return await self._replicas.list_adapters()

    async def prepare_formats(self) -> None:
        """The replicas have."""

    def snapshot(self) -> EngineSnapshot:
        """Totals keep what replicas had counted that are gone: counters of Prometheus may not fall."""
        now = self._replicas.snapshots()
        for name in self._seen.keys() - now.keys():
            self._gone_totals += totals_of(self._seen[name])
        self._seen = dict(now)
        together = added_up([*now.values()])
        totals = self._gone_totals + totals_of(together)
        return replace(together, **{**totals, "retries_total": self._num_retries})

    # ------------------------------------------------------------------ one request

    async def _start(
        self,
        skill: SkillSpec[Any],
        fields: dict[str, Any],
        is_stream: bool,
        pictures: Sequence[Picture] | None = None,
    ) -> EngineStream:
        route = take_route(dict(fields))
        request_id = route.request_id or uuid.uuid4().hex
        require_free_id(request_id, self._streams, self._joint)
        self._enter(request_id, route)
        stream = EngineStream(request_id, skill.name, self.cancel, self._list_threads)
        self._streams[request_id] = stream
        try:
            call = _Call(stream, self._with_seed(skill.name, fields), route, is_stream, await self._keys(fields, route))
            stream.require_open()
        except BaseException:
            self._room.leave(request_id)
            del self._streams[request_id]
            raise
        self._calls[request_id] = call
        # Not in the context of an HTTP request: Ray takes calls of one such context for one request.
        call.task = contextvars.Context().run(asyncio.ensure_future, self._answer(call))
        # A task that is cancelled before its first turn runs no `finally`.
        call.task.add_done_callback(lambda _: self._close(call))
        try:
            await asyncio.shield(call.started)
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return stream

    def _enter(self, request_id: str, route: Route) -> None:
        try:
            self._refuse_for_others(self._room.enter(request_id, route.client), "max_queue_size")
        except QueueFull as full:
            raise ClusterFull(str(full)) from None

    async def _answer(self, call: _Call) -> None:
        """By a replica that has room. One that is lost is replaced by another, a few times."""
        num_lost = num_full = 0
        try:
            while not call.stream.is_done:
                try:
                    await self._follow(call)
                except ReplicaFull as full:
                    num_full += 1
                    if num_full >= len(self._replicas.snapshots()):
                        raise ClusterFull(str(full)) from None
                except ReplicaLost as lost:
                    num_lost += 1
                    if num_lost > MAX_RETRIES:
                        raise EngineStopped(
                            f"{num_lost} engines were lost under the request ({lost}); send it again"
                        ) from None
                    self._num_retries += 1
                    logger.warning("request %s lost its engine (%s); another one gets it", call.stream.request_id, lost)
        except Exception as error:
            call.end(error)
        finally:
            self._close(call)

    async def _follow(self, call: _Call) -> None:
        async with aclosing(self._replicas.ask(call.attempt())) as answers:
            async for messages in answers:
                call.take(messages)
                if call.stream.is_done:
                    self._forget(call)  # whoever asks next may come before the end of the messages
        if not call.stream.is_done:
            raise ReplicaLost("its messages ended before the answer")

    def _close(self, call: _Call) -> None:
        call.end(RequestCancelled(f"request {call.stream.request_id} was cancelled"))
        self._forget(call)

    def _forget(self, call: _Call) -> None:
        """Another one may have its id already."""
        request_id = call.stream.request_id
        if self._calls.get(request_id) is call:
            self._room.leave(request_id)
            del self._streams[request_id], self._calls[request_id]

    def _with_seed(self, skill: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        settings = fields.get("settings")
        places = (fields, settings if isinstance(settings, Mapping) else {})
        if skill in WITHOUT_SEED or any(
            place.get(name) is not None for place in places for name in SETTINGS["seed"].names
        ):
            return dict(fields)
        return {**fields, "seed": self._dice.getrandbits(63)}

    async def _keys(self, fields: Mapping[str, Any], route: Route) -> PrefixKeys:
        files = _files(fields)
        is_large = sum(map(len, files)) >= LARGE_PICTURE
        digests = await self.text_threads.run(_digests, files) if is_large else _digests(files)
        return prefix_keys(fields, digests, adapter=_adapter(fields), tenant=route.tenant)

    def _stop(self, stream: EngineStream) -> None:
        call = self._calls.get(stream.request_id)
        if call is not None and call.task is not None:
            call.task.cancel()

    # ------------------------------------------------------------------ the end

    def fail(self, error: BaseException) -> None:
        self._fault = error
        stopped = EngineStopped(f"the cluster cannot be reached: {error}")
        for request_id in [*self._joint, *self._streams]:
            self.cancel(request_id, stopped)

    async def shutdown(self, *, drain: bool = True, timeout_s: float = 30.0) -> None:
        self._accepting = False
        until_s = time.monotonic() + (timeout_s if drain else 0.0)
        while (self._streams or self._joint) and time.monotonic() < until_s:
            await asyncio.sleep(NAP_S)
        for request_id in [*self._joint, *self._streams]:
            self.cancel(request_id, EngineStopped("the engine was shut down before the request finished"))
        self._list_threads.close()
        self.text_threads.close()


class _Call:
    """A request on its way through replicas."""

    def __init__(
        self, stream: EngineStream, fields: Mapping[str, Any], route: Route, is_stream: bool, keys: PrefixKeys
    ) -> None:
        self.stream = stream
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_begun = False
        self.task: asyncio.Future[None] | None = None
        has_reader = is_stream if route.has_reader is None else route.has_reader
        read_along = is_stream if route.read_along is None else route.read_along
        self._fields = {**fields, "has_reader": has_reader, "read_along": read_along, "tells_tokens": has_reader}
        self._keys = keys
        self._replica: str | None = None
        self._failed: set[str] = set()
        self._tokens: list[GeneratedToken] = []
        self._num_told = 0
        self._num_to_skip = 0

    def attempt(self) -> ReplicaCall:
        """What the next replica is asked. One that begins anew says again what its reader has."""
        if self._replica is not None:
            self._failed.add(self._replica)
        self._num_to_skip = 0 if self._tokens else self._num_told
        own = {"request_id": uuid.uuid4().hex, "resumed": tuple(self._tokens)}
        return ReplicaCall(
            self.stream.skill, {**self._fields, **own}, self._keys, _adapter(self._fields), frozenset(self._failed)
        )

    def take(self, messages: Sequence[Message]) -> None:
        """Raises ReplicaLost when the replica says that its engine has stopped, and ReplicaFull."""
        for message in messages:
            match message:
                case Started(replica, num_prompt_tokens, adapter, warnings):
                    self._replica = replica
                    stream = self.stream
                    stream.num_prompt_tokens, stream.adapter, stream.warnings = num_prompt_tokens, adapter, warnings
                    if not self.started.done():
                        self.started.set_result(None)
                case Begun():
                    self.has_begun = True
                case Chunks(chunks):
                    self.has_begun = True
                    self._tell(chunks)
                case Ended(result):
                    self.stream.end(replace(result, request_id=self.stream.request_id))
                case Refused(replica, EngineStopped() as error):
                    self._replica = replica
                    raise ReplicaLost(str(error))
                case Refused(replica, QueueFull() as error):
                    self._replica = replica
                    raise ReplicaFull(str(error))
                case Refused(_, error):
                    self.end(error)

    def _tell(self, chunks: Sequence[StreamChunk]) -> None:
        new = chunks[self._num_to_skip :]
        self._num_to_skip -= len(chunks) - len(new)
        for chunk in new:
            self._num_told += 1
            self._tokens += chunk.tokens
            self.stream.put(replace(chunk, tokens=()))

    def end(self, error: BaseException) -> None:
        """Nothing happens to a request that has ended."""
        self.stream.fail(error)
        if not self.started.done():
            self.started.set_exception(self.stream.error)
            self.started.exception()  # its caller may have left


def _adapter(fields: Mapping[str, Any]) -> str | None:
    settings = fields.get("settings")
    named = fields.get("adapter") or (settings.get("adapter") if isinstance(settings, Mapping) else None)
    return named if isinstance(named, str) else None


def _files(fields: Mapping[str, Any]) -> list[bytes]:
    """Pictures of a request that came as files, in their order."""
    messages = fields.get("messages")
    listed = messages if isinstance(messages, (list, tuple)) else ()
    contents = [message.get("content") for message in listed if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
    pictures = [fields.get("image"), *(part.get("image") for part in parts if isinstance(part, Mapping))]
    return [picture for picture in pictures if isinstance(picture, bytes)]


def _digests(files: Sequence[bytes]) -> list[str]:
    return [blake2b(file, digest_size=16).hexdigest() for file in files]


NOTHING = EngineSnapshot(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""Of an engine that has not reported yet."""


def totals_of(snapshot: EngineSnapshot) -> Counter[str]:
    names = (field.name for field in dataclass_fields(EngineSnapshot) if field.name.endswith("_total"))
    return Counter({name: getattr(snapshot, name) for name in names})


def added_up(parts: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """The numbers of all engines together."""
    if not parts:
        return replace(NOTHING, num_replicas=0)
    sums: dict[str, Any] = {}
    for field in dataclass_fields(EngineSnapshot):
        values = [getattr(part, field.name) for part in parts]
        if isinstance(values[0], tuple):
            sums[field.name] = tuple(sorted({name for names in values for name in names}))
        else:
            sums[field.name] = sum(values)
    return EngineSnapshot(**{**sums, "page_size": max(part.page_size for part in parts)})
