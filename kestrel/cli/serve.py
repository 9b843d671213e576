"""kestrel serve: the engine over HTTP. A flag outranks the environment, that the YAML file, and that a default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kestrel.cli.config_flags import with_flags
from kestrel.cli.loading import check_model
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError, shown
from kestrel.server.config import ServerConfig
from kestrel.server.config_file import read_config_file


def config_option(*groups: type) -> Any:
    """The option of a YAML file with settings of these groups."""

    def take_defaults(context: typer.Context, path: Path | None) -> Path | None:
        """What the file says becomes the default of the other options."""
        if path is not None:
            context.default_map = {**(context.default_map or {}), **read_config_file(path, groups)}
        return path

    return typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="YAML file with any of the settings below, by their names with underscores. Flags and environment "
        "variables override it.",
        envvar="KESTREL_CONFIG",
        show_envvar=False,
        is_eager=True,
        callback=take_defaults,
    )


@with_flags
def serve(
    config_file: Annotated[Path | None, config_option(ServerConfig, RuntimeConfig)] = None,
    *,
    server: ServerConfig,
    config: RuntimeConfig,
) -> None:
    """Serve a model over HTTP.

    kestrel serve --model moondream2

    POST /v1/query, /v1/caption, /v1/point, /v1/detect and /v1/segment take JSON with the picture as base64, or a form.
    /v1/chat/completions, /v1/completions and /v1/embeddings are routes of the OpenAI API.
    --grpc-port also offers the skills in the protocol of KServe and Triton.
    After SIGTERM or Ctrl-C accepted requests may finish; a second signal ends the server immediately.
    """
    check_model(config)
    _check_certificate(server)
    if server.grpc_port == server.port != 0:
        raise ConfigError("grpc_port", f"{server.port} is also the port for HTTP (--port); choose another one")
    # Here and not above: help and refused settings need neither torch nor a web framework.
    from kestrel.cli.run_server import run_server  # noqa: PLC0415

    run_server(server, config)


def _check_certificate(server: ServerConfig) -> None:
    """Whether the files are there; what is in them is read by the server."""
    for name in ("tls_cert_file", "tls_key_file"):
        path = getattr(server, name)
        if path is not None and not Path(path).exists():
            raise ConfigError(name, f"there is no file {shown(path)}; give the path of a PEM file")
