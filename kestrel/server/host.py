"""The server as a host of another protocol in the same process: keys, limits, deadlines, drain and log are the same.

It knows nothing of that protocol. Whoever starts both hands this over.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from kestrel.engine import EngineResult, EngineStream
from kestrel.server.calls import AcceptedRequest, Interruption, engine_request
from kestrel.server.errors import kind_of
from kestrel.server.native import NATIVE_SKILLS, with_default_budget
from kestrel.server.records import RequestRecord, access_log, fresh_id, recorded
from kestrel.server.state import Phase, RequestInfo, ServerState
from kestrel.settings import MAX_NAME_LENGTH
from kestrel.threads import Threads

COUNTS_TOKENS = frozenset(skill.name for skill in NATIVE_SKILLS if skill.counts_tokens)


@dataclass
class Duration:
    """Something that happened several times, and how long it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += round(seconds * 1e9)


@dataclass
class Statistics:
    """An observer that adds up what became of all requests."""

    last_ms: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute: Duration = field(default_factory=Duration)

    def started(self, request: RequestInfo) -> None:
        """Counted when it ends."""

    def finished(self, request: RequestInfo, outcome: EngineResult | BaseException) -> None:
        if isinstance(outcome, BaseException):
            self.fail.add(time.monotonic() - request.started_s)
            return
        queue_s, compute_s = outcome.metrics.queue_time_ms / 1000.0, outcome.metrics.processing_latency_s
        self.success.add(queue_s + compute_s)
        self.queue.add(queue_s)
        self.compute.add(compute_s)
        self.last_ms = round(time.time() * 1000)


class ServerHost:
    """`protocol` names the other protocol in the log, where HTTP has its method."""

    def __init__(self, state: ServerState, protocol: str) -> None:
        self._state = state
        self._protocol = protocol
        self.statistics = Statistics()
        state.observers.append(self.statistics)

    @property
    def is_alive(self) -> bool:
        return self._state.phase is not Phase.FAILED and (self._state.engine is None or not self._state.engine.fault)

    @property
    def is_ready(self) -> bool:
        return self._state.ready

    @property
    def model_names(self) -> Sequence[str]:
        engine = self._state.engine
        return [*self._state.config.served_model_names, *(() if engine is None else (engine.model_name,))]

    @property
    def max_image_bytes(self) -> int:
        return self._state.require_serving().config.max_image_bytes

    @property
    def body_threads(self) -> Threads:
        return self._state.body_threads

    @property
    def receive_timeout_s(self) -> float:
        return self._state.config.receive_timeout_s

    @property
    def request_timeout_s(self) -> float:
        return self._state.config.request_timeout_s

    @property
    def stream_idle_timeout_s(self) -> float:
        return self._state.config.stream_idle_timeout_s

    def interruption(self, error: Exception) -> Interruption:
        return Interruption(error)

    def admit(self, keys: Sequence[bytes], address: str) -> ServerVisitor:
        """A client with one of the keys. Raises Unauthorised."""
        return ServerVisitor(self._state, self._protocol, *self._state.identify(keys, address))


@dataclass(frozen=True)
class ServerVisitor:
    state: ServerState
    protocol: str
    client: str
    tenant: str | None

    @contextmanager
    def request(self, route: str, num_bytes: int) -> Iterator[VisitorRequest]:
        """One request from its arrival to its answer, counted and logged. Its `num_bytes` count until it runs."""
        record = RequestRecord(fresh_id(), self.protocol, route)
        with recorded(record, [access_log]):
            try:
                self.state.require_serving()
                with self.state.clients.counted(self.client):
                    accepted = AcceptedRequest(self.state)
                    try:
                        accepted.held.add(num_bytes)
                        yield VisitorRequest(self, record, accepted)
                    finally:
                        accepted.release()
                record.status = 200
            except Exception as error:
                record.error_type, record.status = type(error).__name__, kind_of(error).status
                raise


@dataclass(frozen=True)
class VisitorRequest:
    visitor: ServerVisitor
    record: RequestRecord
    accepted: AcceptedRequest

    @asynccontextmanager
    async def run(self, skill: str, fields: Mapping[str, Any], *, stream: bool) -> AsyncIterator[EngineStream]:
        state, fields = self.visitor.state, dict(fields)
        request_id = fields.pop("request_id", self.record.request_id)
        if len(request_id) <= MAX_NAME_LENGTH:
            self.record.request_id = request_id
        if skill in COUNTS_TOKENS:
            fields = with_default_budget(fields, state.config)
        info = RequestInfo(
            request_id,
            skill,
            self.record.route,
            model=state.model_name or "",
            client=self.visitor.client,
            stream=stream,
            adapter=fields.get("adapter"),
        )
        async with engine_request(self.accepted, info, fields, self.visitor.tenant) as running:
            fields.clear()
            self.accepted.held.release()
            yield running
