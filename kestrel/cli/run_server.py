"""What `kestrel serve` does once its settings are read: processes, signals, loading, watchdog, gRPC endpoint."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from starlette.applications import Starlette

from kestrel.adapters.sources import given_key
from kestrel.cli.console import FAILED, OK, note, stderr_console
from kestrel.cli.loading import LoadingBars, note_default_model
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.engine.allocator import give_back_freed_memory, keep_freed_memory
from kestrel.engine.compute_process import ComputeProcess, can_compute_apart
from kestrel.errors import ConfigError, EngineStopped
from kestrel.runtime.device import choose_device
from kestrel.server.config import ServerConfig
from kestrel.server.host import ServerHost
from kestrel.server.http import create_app
from kestrel.server.lifecycle import END_SIGNALS
from kestrel.server.lifecycle import serve as serve_app
from kestrel.server.records import configure_logs, lossy_stderr
from kestrel.server.state import END_S, Phase, ServerState, app_state
from kestrel.skills import SkillRegistry, default_registry

logger = logging.getLogger("kestrel.server")

NAP_S = 1.0
"""Between two looks of the watchdog, or less where a step gets little time."""
GRPC_REMEDY = "needs grpcio, which is not installed; run `pip install -e '.[grpc]'` in the checkout, or leave it out"


def run_server(server: ServerConfig, config: RuntimeConfig) -> None:
    with lossy_stderr(), _signals_held(), _compute_process(server, config) as process:
        if process is not None:
            give_back_freed_memory()
        elif choose_device(config).type == "cpu":
            keep_freed_memory()
        _configure_logs(server)
        if not server.is_loopback and not server.has_keys:
            note(f"anybody who can reach {server.host} can use this server: no API key is set")
        app = create_app(lambda: _load(config, process, app_state(app)), server)
        watchdog = Watchdog(app_state(app), process)
        try:
            asyncio.run(_serve(app, config, watchdog))
        except EngineStopped:
            if watchdog.has_fired and process is None:
                os._exit(FAILED)  # the thread that hangs may hold what the interpreter waits for at its end
            raise
        finally:
            watchdog.stop()
        if process is not None and process.has_died:
            raise EngineStopped(process.ending())


def _configure_logs(server: ServerConfig) -> None:
    configure_logs(server.log_format, server.log_level, access=server.access_log)


@contextmanager
def _signals_held() -> Iterator[None]:
    """A signal that comes before the event loop handles it waits until then: it ends a server that starts like any."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _compute_process(server: ServerConfig, config: RuntimeConfig) -> Iterator[ComputeProcess | None]:
    """The process that the model is loaded in, where it gets one of its own."""
    can_be_apart = can_compute_apart(config)
    if server.compute_process == "own" and not can_be_apart:
        raise ConfigError("compute_process", "'own' works on a CPU under Linux only; use auto")
    if server.compute_process == "shared" or not can_be_apart:
        yield None
        return

    def prepare() -> None:
        keep_freed_memory()
        _configure_logs(server)

    with ComputeProcess(config, prepare) as process:
        yield process


async def _serve(app: Starlette, config: RuntimeConfig, watchdog: Watchdog) -> None:
    watchdog.start()
    async with grpc_beside(app_state(app)) as grpc_target:
        await serve_app(app, lambda address: _announce(address, config, grpc_target))


async def _load(config: RuntimeConfig, process: ComputeProcess | None, state: ServerState) -> InferenceEngine:
    with LoadingBars(stderr_console()) as bars:
        try:
            skills = skills_of(state.config.seed)
            if process is None:
                engine = await InferenceEngine.create(config, skills=skills, progress=bars)
                engine.watch(_failing(state))
                return engine
            ready = await asyncio.to_thread(process.ready, bars)
            engine = InferenceEngine.start(config, ready, skills=skills, api_key=given_key())
            process.watch(_failing(state))
            return engine
        except asyncio.CancelledError:
            bars.abandon()
            if process is not None:
                process.kill()
            raise


def skills_of(seed: int | None) -> SkillRegistry:
    """The usual ones; requests without a seed get theirs by chance, or in an order that the seed decides."""
    if seed is None:
        return default_registry()
    dice = random.Random(seed)
    return default_registry(lambda: dice.getrandbits(63))


def _failing(state: ServerState) -> Callable[[EngineStopped], None]:
    """Ends the server from any thread. It ends with an error, so that whoever watches over it starts it anew."""
    loop = asyncio.get_running_loop()

    def fail(error: EngineStopped) -> None:
        logger.error("%s", error)
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(state.fail, error)

    return fail


class Watchdog:
    """A thread that ends the server when its model hangs, and the process when an end that has begun does not come.

    It counts its naps and does not ask the clock: when the whole machine was paused, a step gets its time again.
    """

    def __init__(self, state: ServerState, process: ComputeProcess | None) -> None:
        self._state = state
        self._process = process
        self._timeout_s = state.config.step_timeout_s
        self._nap_s = min(NAP_S, self._timeout_s / 20)
        self._fail: Callable[[EngineStopped], None] | None = None
        self._stopped = threading.Event()
        self.has_fired = False

    def start(self) -> None:
        """On the server's event loop."""
        self._fail = _failing(self._state)
        threading.Thread(target=self._run, name="kestrel-watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        begun_s, waited_s = None, 0.0
        while not self._stopped.wait(self._nap_s):
            engine, before_s = self._state.engine, begun_s
            begun_s = None if engine is None else engine.busy_since_s
            waited_s = waited_s + self._nap_s if begun_s is not None and begun_s == before_s else 0.0
            if waited_s >= self._timeout_s and self._state.phase in (Phase.READY, Phase.DRAINING):
                self._end_hung()
            ends_by_s = self._state.ends_by_s
            if ends_by_s is not None and time.monotonic() > ends_by_s:
                logger.error("the server did not end by itself; its process is ended")
                os._exit(FAILED if self.has_fired or self._state.failure is not None else OK)

    def _end_hung(self) -> None:
        if self.has_fired or self._fail is None:
            return
        self.has_fired = True
        self._state.ends_by_s = time.monotonic() + END_S
        waited = f"no step has ended for {self._timeout_s:g} s while requests wait (step_timeout_s)"
        self._fail(EngineStopped(f"{waited}: the model hangs"))
        if self._process is not None:
            self._process.kill()


def _announce(address: str, config: RuntimeConfig, grpc_target: str | None) -> None:
    note_default_model(config)
    note(f"Application startup complete. Playground and API: {address}")
    if grpc_target is not None:
        note(f"The same model over gRPC (KServe v2): {grpc_target}")


@asynccontextmanager
async def grpc_beside(state: ServerState) -> AsyncIterator[str | None]:
    """The gRPC endpoint beside the HTTP server, if a port is set; gives what clients connect to."""
    config = state.config
    if config.grpc_port is None:
        yield None
        return
    try:
        from kestrel.integrations.grpc.endpoint import EndpointOptions, GrpcEndpoint  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError("grpc_port", GRPC_REMEDY) from error
    options = EndpointOptions(
        address=config.host,
        port=config.grpc_port,
        max_message_bytes=config.max_body_bytes,
        max_metadata_bytes=config.max_header_bytes,
        max_calls=config.max_grpc_calls,
        idle_connection_s=config.keep_alive_timeout_s,
        tls_cert_file=config.tls_cert_file,
        tls_key_file=config.tls_key_file,
    )
    async with GrpcEndpoint(ServerHost(state, "gRPC"), options) as endpoint:
        yield endpoint.target
