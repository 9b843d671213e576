"""kestrel serve: the engine over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from kestrel.cli.config_file import take_defaults_from_file
from kestrel.cli.config_flags import with_flags
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


def _read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    take_defaults_from_file(context, path, (ServerConfig, RuntimeConfig))
    return path


@with_flags
def serve(
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="YAML file with any of the settings below, by their names with underscores. Flags and variables win.",
            envvar="KESTREL_CONFIG",
            show_envvar=False,
            is_eager=True,
            callback=_read_config_file,
        ),
    ] = None,
    *,
    server: ServerConfig,
    config: RuntimeConfig,
) -> None:
    """Serve a model over HTTP.

    kestrel serve --model moondream2

    POST /v1/query, /v1/caption, /v1/point, /v1/detect and /v1/segment take JSON with the picture as base64.
    --grpc-port also offers them in the protocol of KServe and Triton.
    SIGTERM or Ctrl-C lets accepted requests finish; a second one ends at once.
    """
    run_server(server, config)


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
