"""What all routes share: the engine, the configuration, where the server is in its life, and who watches."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, cast

from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from kestrel.api_keys import ApiKeys
from kestrel.engine import EngineResult, InferenceEngine
from kestrel.errors import NotServing
from kestrel.server.client_counts import ClientCounts
from kestrel.server.config import ServerConfig
from kestrel.server.images import ImageFetcher, NoRemoteImages
from kestrel.threads import Threads

logger = logging.getLogger("kestrel.server")


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


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


@dataclass
class ServerState:
    """`app.state.kestrel`."""

    config: ServerConfig
    engine: InferenceEngine | None = None
    phase: Phase = Phase.STARTING
    failure: BaseException | None = None
    """Why it could not start."""
    images: ImageFetcher = field(default_factory=NoRemoteImages)
    observers: list[Observer] = field(default_factory=list)
    running: dict[str, RequestInfo] = field(default_factory=dict)
    """Engine requests without their answer, by id."""
    pending_body_bytes: int = 0
    started_at_s: int = field(default_factory=lambda: int(time.time()))
    """When the server was made, in seconds since 1970."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the server is ready, or has failed to become so."""
    body_threads: Threads = field(default_factory=lambda: Threads("body", 2))
    """Where large bodies, and the pictures in them, are decoded."""
    answer_threads: Threads = field(default_factory=lambda: Threads("answer", 2))
    """Where large answers are written."""
    keys: ApiKeys = field(init=False)
    clients: ClientCounts = field(init=False)

    def __post_init__(self) -> None:
        self.keys = ApiKeys(self.config.api_keys)
        self.clients = ClientCounts(self.config.max_requests_per_client)

    @property
    def ready(self) -> bool:
        return self.phase is Phase.READY and self.engine is not None and self.engine.is_running

    @property
    def draining(self) -> bool:
        return self.phase is Phase.DRAINING

    @property
    def is_warm(self) -> bool:
        """Whether the engine runs and its first requests are behind it; draining does not change that."""
        started = self.phase in (Phase.READY, Phase.DRAINING)
        return started and self.engine is not None and self.engine.fault is None

    @property
    def model_name(self) -> str | None:
        """The name clients see."""
        if self.config.served_model_name is not None:
            return self.config.served_model_name
        return None if self.engine is None else self.engine.model_name

    def require_serving(self) -> InferenceEngine:
        """The engine, for a new request. Raises NotServing while starting or draining."""
        if self.phase is Phase.READY and self.engine is not None:
            return self.engine
        if self.phase is Phase.DRAINING:
            raise NotServing("the server is shutting down; send the request to another one")
        raise NotServing("the server is still starting; retry when /ready answers 200")

    def close(self) -> None:
        self.body_threads.close()
        self.answer_threads.close()

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
