"""What `kestrel serve` does once its settings are read."""

from __future__ import annotations

import asyncio

from kestrel.cli.console import note, stderr_console
from kestrel.cli.grpc_port import grpc_beside
from kestrel.cli.loading import LoadingBars, note_default_model
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.engine.allocator import keep_freed_memory
from kestrel.server.config import ServerConfig
from kestrel.server.http import create_app
from kestrel.server.lifecycle import serve as serve_app
from kestrel.server.logs import configure_logs
from kestrel.server.state import app_state


def run_server(server: ServerConfig, config: RuntimeConfig) -> None:
    keep_freed_memory()
    configure_logs(server.log_format)
    if not server.is_loopback and not server.api_keys:
        note(f"anybody who can reach {server.host} can use this server: no API key is set")
    asyncio.run(_serve(server, config))


async def _serve(server: ServerConfig, config: RuntimeConfig) -> None:
    app = create_app(lambda: _load(config), server)
    async with grpc_beside(app_state(app)) as grpc_target:
        await serve_app(app, lambda address: _announce(address, config, grpc_target))


async def _load(config: RuntimeConfig) -> InferenceEngine:
    with LoadingBars(stderr_console()) as bars:
        try:
            return await InferenceEngine.create(config, progress=bars)
        except asyncio.CancelledError:
            bars.abandon()
            raise


def _announce(address: str, config: RuntimeConfig, grpc_target: str | None) -> None:
    note_default_model(config)
    note(f"Application startup complete. Playground and API: {address}")
    if grpc_target is not None:
        note(f"The same model over gRPC (KServe v2): {grpc_target}")
