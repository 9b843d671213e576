"""kestrel serve: the engine over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kestrel.cli.config_file import take_defaults_from_file
from kestrel.cli.config_flags import with_flags
from kestrel.config import RuntimeConfig
from kestrel.server.config import ServerConfig


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
    # Here and not above: help and refused settings need no web framework.
    from kestrel.cli.serving import run_server  # noqa: PLC0415

    run_server(server, config)
