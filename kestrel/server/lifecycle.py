"""A server's life: load, warm up, serve, drain on SIGTERM, end.

The application loads its engine in the background of its own start, so that health routes answer from the first moment.
`serve` runs it under uvicorn with the signals handled here:
- the first SIGTERM or SIGINT stops admission (503), lets accepted requests finish within the drain time, exits with 0
- a second one ends the process immediately
- when the model is lost, clients are told and `serve` raises why, also in the middle of a drain
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

import uvicorn
from starlette.applications import Starlette

from kestrel.engine.api import warm_up
from kestrel.engine.served import ServedEngine
from kestrel.errors import ConfigError, EngineStopped
from kestrel.server.config import ServerConfig
from kestrel.server.connections import (
    ListeningSocket,
    TimedProtocol,
    connection_limit,
    raise_file_limit,
    timed_protocol,
)
from kestrel.server.state import Phase, ServerState, app_state

logger = logging.getLogger("kestrel.server")

EngineFactory: TypeAlias = Callable[[], Awaitable[ServedEngine]]
EngineSource: TypeAlias = ServedEngine | EngineFactory
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 5.0
"""What is left after the drain time for responses to leave and connections to close."""
NAP_S = 0.02


def engine_lifespan(source: EngineSource) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    """Gets the engine ready in the background; an engine made by a factory is shut down at the end."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        state = app_state(app)
        starting = asyncio.create_task(_start(state, source))
        try:
            yield
        finally:
            if not starting.done():
                starting.cancel()
            await asyncio.wait({starting})
            if state.drains_until_s is None:
                state.begin_drain()
            if state.engine is not None and not isinstance(source, ServedEngine):
                await state.engine.shutdown(timeout_s=state.drain_left_s)
            state.close()

    return lifespan


async def _start(state: ServerState, source: EngineSource) -> None:
    try:
        state.engine = source if isinstance(source, ServedEngine) else await source()
        seconds = await warm_up(state.engine)
        logger.info("warmed up in %.1f s", seconds)
        if state.phase is Phase.STARTING:
            state.phase = Phase.READY
    except Exception as error:
        state.failure = state.failure or error
        state.phase = Phase.FAILED
        state.failed.set()
    finally:
        state.settled.set()


async def serve(app: Starlette, announce: Callable[[str], None]) -> None:
    """Serve until a signal ends it; raises what kept it from starting. `announce` gets the address once it is ready."""
    state = app_state(app)
    server = _Server(uvicorn_config(app, state.config))
    raise_file_limit()
    listening = bind(state.config)
    signals = _Signals(server, state)
    with signals.handled():
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        failing = asyncio.create_task(_end_when_failed(server, state))
        settled = asyncio.create_task(state.settled.wait())
        await asyncio.wait({serving, settled}, return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()
        if state.phase is Phase.READY:
            _set_apart_what_stays()
            announce(address_of(listening, state.config))
        await serving
        failing.cancel()
    if state.failure is not None:
        raise state.failure


async def _end_when_failed(server: uvicorn.Server, state: ServerState) -> None:
    await state.failed.wait()
    await _until_answered(state, GRACE_S)
    server.should_exit = True


async def _until_answered(state: ServerState, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while state.accepted and time.monotonic() < until_s:
        await asyncio.sleep(NAP_S)


def _set_apart_what_stays() -> None:
    """The model, the modules and the routes live as long as the process: no collection need look at them again."""
    gc.collect()
    gc.freeze()


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket. It names TCP: asyncio sends small writes immediately only on sockets that do."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = ListeningSocket(family, connection_limit(config), config.send_timeout_s)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
        listening.listen(2048)
        return listening
    except OSError as error:
        listening.close()
        raise ConfigError(
            "port", f"cannot listen on {config.host}:{config.port} ({error.strerror}); free it or choose another --port"
        ) from error


def address_of(listening: socket.socket, config: ServerConfig) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{config.scheme}://{host}:{listening.getsockname()[1]}{config.root_path}/"


def uvicorn_config(app: Starlette, config: ServerConfig) -> uvicorn.Config:
    made = uvicorn.Config(
        app,
        http=timed_protocol(config.receive_timeout_s, config.send_timeout_s),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(config.trusted_proxies),
        forwarded_allow_ips=list(config.trusted_proxies),
        timeout_keep_alive=config.keep_alive_timeout_s,
        timeout_graceful_shutdown=int(GRACE_S),
        h11_max_incomplete_event_size=config.max_header_bytes,
        ssl_certfile=config.tls_cert_file,
        ssl_keyfile=config.tls_key_file,
    )
    try:
        made.load()
    except OSError as error:  # also what the ssl module raises
        reason = error.strerror or "not a PEM file"
        raise ConfigError(
            "tls_cert_file", f"the certificate or its key cannot be used ({reason}); check both"
        ) from error
    return made


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, and with an end for those who do not take theirs."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Hangs up a little before uvicorn would cancel what still runs and log it as a fault."""
        timer = asyncio.get_running_loop().call_later(GRACE_S - 1.0, self._hang_up)
        await super().shutdown(sockets)
        timer.cancel()

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, TimedProtocol):
                connection.hang_up()


class _Signals:
    def __init__(self, server: uvicorn.Server, state: ServerState) -> None:
        self._server = server
        self._state = state
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def handled(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in END_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)  # what came before was held
        try:
            yield
        finally:
            for number in END_SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._draining is not None:
            os._exit(128 + number)
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Admit nobody, wait for those who are in, then stop listening."""
        state = self._state
        state.begin_drain()
        state.refuse_arriving()
        logger.info("draining: %d requests are unanswered", len(state.accepted))
        await _until_answered(state, state.config.drain_timeout_s)
        if state.accepted and state.engine is not None:
            logger.warning("the drain time is over; %d requests are cut off", len(state.accepted))
            state.end_all(EngineStopped("the server was shut down before the request finished"))
            await state.engine.shutdown(drain=False, timeout_s=0.0)
        self._server.should_exit = True
