"""One engine of a cluster: what it is sent, and what it answers.

A request is answered by a stream of messages. The result travels with whatever the stream had left to say, so that
nothing that was said is ever behind the last token that was told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from kestrel.engine.compute_process import ModelDescription
from kestrel.engine.served import ServedEngine
from kestrel.engine.streams import EngineResult, EngineStream, StreamChunk
from kestrel.errors import EngineStopped, KestrelError
from kestrel.routing import PrefixKeys

BEGUN_S = 0.2
"""Between two looks at whether a request has had its first step."""


@dataclass(frozen=True)
class ReplicaCall:
    """One request for an engine."""

    skill: str
    fields: Mapping[str, Any]
    keys: PrefixKeys = field(default_factory=PrefixKeys)
    """Names of its beginnings, for whoever chooses the replica."""
    adapter: str | None = None
    avoid: frozenset[str] = frozenset()
    """Replicas that failed it before."""

    @property
    def request_id(self) -> str:
        """Another one in each attempt."""
        return self.fields["request_id"]


@dataclass(frozen=True)
class Started:
    """The request was accepted."""

    replica: str
    num_prompt_tokens: int
    adapter: str | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Begun:
    """It has had its first step."""


@dataclass(frozen=True)
class Chunks:
    chunks: Sequence[StreamChunk]


@dataclass(frozen=True)
class Ended:
    result: EngineResult


@dataclass(frozen=True)
class Refused:
    replica: str
    error: KestrelError


Message: TypeAlias = Started | Begun | Chunks | Ended | Refused


class Replica:
    def __init__(self, name: str, engine: ServedEngine, description: ModelDescription, step_timeout_s: float) -> None:
        self.name = name
        self.engine = engine
        self.description = description
        self._step_timeout_s = step_timeout_s

    async def answer(self, call: ReplicaCall) -> AsyncGenerator[Sequence[Message], None]:
        """Left early, it ends the request."""
        try:
            stream = await self.engine.run(call.skill, stream=True, **call.fields)
            async with stream, aclosing(self._messages(stream)) as following:
                yield [Started(self.name, stream.num_prompt_tokens, stream.adapter, stream.warnings)]
                async for messages in following:
                    yield messages
        except KestrelError as error:
            yield [Refused(self.name, error)]

    async def _messages(self, stream: EngineStream) -> AsyncGenerator[Sequence[Message], None]:
        has_begun = False
        while True:
            coming = asyncio.ensure_future(stream.chunks())
            try:
                while not has_begun:
                    await asyncio.wait({coming}, timeout=BEGUN_S)
                    has_begun = coming.done() or self.engine.has_begun(stream.request_id)
                    if has_begun and not coming.done():
                        yield [Begun()]
                chunks = await coming
            finally:
                coming.cancel()
            if stream.is_done:  # perhaps only since then
                while more := await stream.chunks():
                    chunks += more
                yield [Chunks(chunks), Ended(await stream.result())]
                return
            yield [Chunks(chunks)]

    def require_healthy(self) -> None:
        """Raises EngineStopped when the engine has stopped, or hangs in a step."""
        if not self.engine.is_running:
            raise EngineStopped(f"the engine of {self.name} has stopped: {self.engine.fault}")
        since_s = self.engine.busy_since_s
        if since_s is not None and time.monotonic() - since_s > self._step_timeout_s:
            raise EngineStopped(f"no step of {self.name} has ended for {self._step_timeout_s:g} s (step_timeout_s)")

    def statistics(self) -> dict[str, Any]:
        """The engine's snapshot as plain data."""
        return asdict(self.engine.snapshot())
