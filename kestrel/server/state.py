"""What all routes share: the engine, the configuration, where the server is in its life, its clients and observers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, cast

from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from kestrel.api_keys import ApiKeys
from kestrel.engine import EngineResult
from kestrel.engine.served import ServedEngine
from kestrel.errors import EngineStopped, KestrelError, NotServing, QueueFull, RequestError, TooManyRequests
from kestrel.server.config import ServerConfig
from kestrel.server.request_images import ImageFetcher, NoRemoteImages
from kestrel.server.responses_api.store import ResponseStore
from kestrel.threads import Threads

logger = logging.getLogger("kestrel.server")

END_S = 10.0
"""What a server gets to end in: after its drain time, or once its model is lost."""
KEY_CLIENT = "key "
"""What stands before a key's name in the name of a client."""
UNREADY_SHARE = 0.1
"""Of `step_timeout_s`: so long a step may take before no new requests should come here."""


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


STALLED = "stalled"
"""The status of a server that would be ready if its step ended."""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One engine request, as observers see it."""

    request_id: str
    skill: str
    route: str
    """The path that was called, such as /v1/query."""
    model: str
    client: str
    """A short digest of the key, or the peer's address; never the key."""
    stream: bool
    adapter: str | None = None
    traceparent: str | None = None
    started_s: float = field(default_factory=time.monotonic)


class Observer(Protocol):
    """Told of every engine request, on the event loop."""

    def started(self, request: RequestInfo) -> None: ...

    def finished(self, request: RequestInfo, outcome: EngineResult | BaseException) -> None: ...


class Arriving(Protocol):
    """A request that waits for more of its body."""

    def interrupt(self, error: BaseException) -> None: ...


class Accepted(Protocol):
    """A request between its receipt and its answer."""

    def end(self, reason: KestrelError) -> None:
        """Whoever works on it gets the reason."""
        ...


class ClientCounts:
    """How many unanswered requests each client has, whichever protocol they came by: every prompt and choice is one.

    Refuses a client with more than `limit`; None is no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._unanswered: Counter[str] = Counter()

    @contextmanager
    def counted(self, client: str) -> Iterator[None]:
        """One request of a client, from its arrival to its answer. Raises TooManyRequests."""
        if self._limit is not None and self._unanswered[client] >= self._limit:
            raise TooManyRequests(
                f"{self._limit} requests of this client are unanswered (max_requests_per_client); retry later"
            )
        with self._held(client, 1):
            yield

    @contextmanager
    def all_counted(self, client: str, number: int, field: str) -> Iterator[None]:
        """The answers that a counted request asks for with `field`, until all are there. The first is counted already.

        Raises TooManyRequests, and RequestError where it could never succeed.
        """
        if self._limit is not None and number > self._limit:
            most = f"one client may have {self._limit} (max_requests_per_client)"
            raise RequestError(field, f"asks for {number} answers at once; {most}; ask for fewer at a time")
        if self._limit is not None and self._unanswered[client] + number - 1 > self._limit:
            others = f"{self._unanswered[client] - 1} other requests of this client are unanswered"
            raise TooManyRequests(
                f"{field} asks for {number} answers and {others}; "
                f"{self._limit} may be (max_requests_per_client); retry later"
            )
        with self._held(client, number - 1):
            yield

    @contextmanager
    def _held(self, client: str, number: int) -> Iterator[None]:
        self._unanswered[client] += number
        try:
            yield
        finally:
            self._unanswered[client] -= number
            if not self._unanswered[client]:
                del self._unanswered[client]


class HeldBytes:
    """The bytes of one request. With those of all others they may not exceed `max_pending_body_bytes`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises QueueFull."""
        self.num_bytes += num_bytes
        self._state.pending_body_bytes += num_bytes
        if self._state.pending_body_bytes > self._state.config.max_pending_body_bytes:
            raise QueueFull("bodies of unanswered requests fill max_pending_body_bytes; retry later")

    def release(self) -> None:
        self._state.pending_body_bytes -= self.num_bytes
        self.num_bytes = 0


@dataclass
class ServerState:
    """`app.state.kestrel`."""

    config: ServerConfig
    engine: ServedEngine | None = None
    phase: Phase = Phase.STARTING
    failure: BaseException | None = None
    """Why it could not start, or could not go on."""
    images: ImageFetcher = field(default_factory=NoRemoteImages)
    observers: list[Observer] = field(default_factory=list)
    running: dict[str, RequestInfo] = field(default_factory=dict)
    """Engine requests without their answer, by id."""
    accepted: set[Accepted] = field(default_factory=set)
    """Requests of clients, by any protocol, without their answer: a drain waits for these."""
    num_fetching: int = 0
    """Pictures that requests wait for; they count as part of the queue."""
    pending_body_bytes: int = 0
    arriving: set[Arriving] = field(default_factory=set)
    started_at_s: int = field(default_factory=lambda: int(time.time()))
    """When the server was made, in seconds since 1970."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the server is ready, or has failed to become so."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with `failure`."""
    drains_until_s: float | None = None
    ends_by_s: float | None = None
    """When it will have ended, by the monotonic clock, once it is ending."""
    body_threads: Threads = field(default_factory=lambda: Threads("body", 2))
    """Where large bodies, and the pictures in them, are decoded."""
    keys: ApiKeys = field(init=False)
    clients: ClientCounts = field(init=False)
    responses: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        self.keys = ApiKeys(self.config.api_keys, self.config.urgent_api_keys)
        self.clients = ClientCounts(self.config.max_requests_per_client)
        self.responses = ResponseStore(self.config.max_stored_responses, self.config.max_stored_response_bytes)

    @property
    def ready(self) -> bool:
        is_up = self.phase is Phase.READY and self.engine is not None and self.engine.is_running
        return is_up and self.step_s < self.config.step_timeout_s * UNREADY_SHARE

    @property
    def step_s(self) -> float:
        """How long the step that runs now has taken."""
        since_s = None if self.engine is None else self.engine.busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def status(self) -> str:
        """In a word, for health routes."""
        if self.engine is not None and self.engine.fault is not None:
            return Phase.FAILED.value
        return STALLED if self.phase is Phase.READY and not self.ready else self.phase.value

    @property
    def draining(self) -> bool:
        return self.phase is Phase.DRAINING

    @property
    def is_warm(self) -> bool:
        """Whether the engine runs and its first requests are behind it; draining does not change that."""
        started = self.phase in (Phase.READY, Phase.DRAINING)
        is_alive = started and self.engine is not None and self.engine.fault is None
        return is_alive and self.step_s < self.config.step_timeout_s

    @property
    def model_name(self) -> str | None:
        """The name clients see."""
        own = () if self.engine is None else (self.engine.model_name,)
        return next(iter((*self.config.served_model_names, *own)), None)

    def require_serving(self) -> ServedEngine:
        """The engine, for a new request. Raises NotServing while starting or draining."""
        if self.phase is Phase.READY and self.engine is not None:
            return self.engine
        if self.phase is Phase.DRAINING:
            raise NotServing("the server is shutting down; send the request to another one")
        if self.phase is Phase.FAILED:
            raise NotServing("the server has lost its model; send the request to another one")
        raise NotServing("the server is still starting; retry when /ready answers 200")

    def identify(self, offered: Sequence[bytes] | None, address: str) -> tuple[str, str | None]:
        """A client's name for limits and logs, and the tenant whose cached KV it shares. Raises Unauthorised.

        Without keys, and where none is asked for (`offered` is None), the name is the address.
        """
        name = self.keys.require(offered) if self.keys and offered is not None else None
        return f"{KEY_CLIENT}{name}" if name else address, name if self.config.isolate_prefix_cache else None

    def refuse_arriving(self) -> None:
        """At the beginning of a drain: what is still on its way would be refused once it is here."""
        for waiting in list(self.arriving):
            waiting.interrupt(NotServing("the server is shutting down; send the request to another one"))

    def begin_drain(self) -> None:
        """From here on nobody is accepted."""
        if self.phase is not Phase.FAILED:
            self.phase = Phase.DRAINING
        self.drains_until_s = time.monotonic() + self.config.drain_timeout_s
        self.ends_by_s = self.ends_by_s or self.drains_until_s + END_S

    @property
    def drain_left_s(self) -> float:
        """What is left of the drain time."""
        until_s = self.drains_until_s
        return self.config.drain_timeout_s if until_s is None else max(0.0, until_s - time.monotonic())

    def fail(self, error: BaseException) -> None:
        """The model is gone or hangs, or was never there. All clients are told; `serve` ends with the error."""
        self.failure = self.failure or error
        self.phase = Phase.FAILED
        self.ends_by_s = time.monotonic() + END_S
        if self.engine is not None:
            self.engine.fail(error)
        self.end_all(EngineStopped(f"the engine has stopped: {error}"))
        self.failed.set()

    def end_all(self, reason: KestrelError) -> None:
        for accepted in list(self.accepted):
            accepted.end(reason)

    def close(self) -> None:
        self.body_threads.close()

    def tell_started(self, request: RequestInfo) -> None:
        for observer in self.observers:
            try:
                observer.started(request)
            except Exception:
                logger.exception("%s failed; the request goes on", type(observer).__name__)

    def tell_finished(self, request: RequestInfo, outcome: EngineResult | BaseException) -> None:
        for observer in self.observers:
            try:
                observer.finished(request, outcome)
            except Exception:
                logger.exception("%s failed; the request is over", type(observer).__name__)


def state_of(connection: HTTPConnection) -> ServerState:
    return app_state(connection.app)


def app_state(app: Starlette) -> ServerState:
    return cast(ServerState, app.state.kestrel)
