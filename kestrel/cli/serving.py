"""What `kestrel serve` does once its settings are read."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from kestrel.cli.console import note, stderr_console
from kestrel.cli.grpc_port import grpc_beside
from kestrel.cli.loading import LoadingBars, note_default_model
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.engine.adapters import given_key
from kestrel.engine.allocator import give_back_freed_memory, keep_freed_memory
from kestrel.engine.compute_process import ComputeProcess, can_compute_apart
from kestrel.errors import ConfigError, EngineStopped
from kestrel.runtime.device import choose_device
from kestrel.server.config import ServerConfig
from kestrel.server.http import create_app
from kestrel.server.lifecycle import serve as serve_app
from kestrel.server.logs import configure_logs, lossy_stderr
from kestrel.server.state import app_state

logger = logging.getLogger("kestrel.server")


def run_server(server: ServerConfig, config: RuntimeConfig) -> None:
    with lossy_stderr(), _compute_process(server, config) as process:
        if process is not None:
            give_back_freed_memory()
        elif choose_device(config).type == "cpu":
            keep_freed_memory()
        configure_logs(server.log_format)
        if not server.is_loopback and not server.has_keys:
            note(f"anybody who can reach {server.host} can use this server: no API key is set")
        asyncio.run(_serve(server, config, process))
        if process is not None and process.has_died:
            raise EngineStopped(process.ending())


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
        configure_logs(server.log_format)

    with ComputeProcess(config, prepare) as process:
        yield process


async def _serve(server: ServerConfig, config: RuntimeConfig, process: ComputeProcess | None) -> None:
    app = create_app(lambda: _load(config, process), server)
    async with grpc_beside(app_state(app)) as grpc_target:
        await serve_app(app, lambda address: _announce(address, config, grpc_target))


async def _load(config: RuntimeConfig, process: ComputeProcess | None) -> InferenceEngine:
    with LoadingBars(stderr_console()) as bars:
        try:
            if process is None:
                return await InferenceEngine.create(config, progress=bars)
            engine = InferenceEngine.start(config, await asyncio.to_thread(process.ready, bars), api_key=given_key())
            process.watch(lambda error: _end_without_model(engine, error))
            return engine
        except asyncio.CancelledError:
            bars.abandon()
            if process is not None:
                process.kill()
            raise


def _end_without_model(engine: InferenceEngine, error: EngineStopped) -> None:
    """As if this process had died itself: whoever watches over it may start it anew. Clients are told first."""
    logger.error("%s", error)
    engine.fail(error)
    os.kill(os.getpid(), signal.SIGTERM)


def _announce(address: str, config: RuntimeConfig, grpc_target: str | None) -> None:
    note_default_model(config)
    note(f"Application startup complete. Playground and API: {address}")
    if grpc_target is not None:
        note(f"The same model over gRPC (KServe v2): {grpc_target}")
