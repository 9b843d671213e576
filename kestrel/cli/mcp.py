"""kestrel mcp: a model's skills as tools of an assistant."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kestrel.cli.config_flags import with_flags
from kestrel.cli.console import note, run_to_end
from kestrel.cli.loading import check_model, note_default_model, refuse_local_settings
from kestrel.config import RuntimeConfig, setting
from kestrel.errors import ConfigError, KestrelError, shown

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

    from kestrel.client.model import Model

KEY_VARIABLE = "KESTREL_API_KEY"
REMEDY = "kestrel mcp needs the package mcp 2, which is not installed; run `pip install -e '.[mcp]'` in the checkout"
EVERY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class McpOptions:
    allow: tuple[str, ...] = setting(
        (), "A folder whose pictures may be read. Repeatable. Default: the current folder.", metavar="DIR"
    )
    allow_urls: bool = setting(
        False, "Also fetch pictures from public web addresses.", flags=("--allow-urls",), show_default=False
    )
    http: str | None = setting(
        None,
        "Listen here over HTTP, at /mcp, instead of stdin and stdout; the host is 127.0.0.1 unless given.",
        metavar="[HOST:]PORT",
    )
    endpoint: str | None = setting(
        None, "Ask this Kestrel server instead of an engine here, such as http://gpu-box:8080.", metavar="URL"
    )
    api_key: str | None = setting(
        None, f"The server's key. Default: that of {KEY_VARIABLE}, if any.", is_shown=False, metavar="KEY"
    )


@with_flags
def mcp(*, options: McpOptions, config: RuntimeConfig) -> None:
    """Offer a model to assistants as tools of the Model Context Protocol.

    kestrel mcp --model moondream2 --allow ~/Pictures

    The tools are look, describe, find, count and read_text. The first call loads the model. Without --http, stdin and
    stdout belong to the protocol.
    """
    folders, address = _folders(options.allow), None if options.http is None else _address(options.http)
    open_model = _opener(options, config)
    try:
        from kestrel.mcp_server import Pictures, PictureTools, make_server  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise KestrelError(REMEDY) from error
    from kestrel.server.request_images import RemoteImages  # noqa: PLC0415

    pictures = Pictures(folders, config.max_image_bytes, RemoteImages(None) if options.allow_urls else None)
    tools = PictureTools(open_model, pictures)
    server = make_server(tools, pictures)
    try:
        if address is None:
            _run_over_stdio(server)
        else:
            _run_over_http(server, *address)
    finally:
        tools.close()


def _run_over_stdio(server: MCPServer) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever waits for stdin cannot be cancelled
    try:
        asyncio.run(server.run_stdio_async())
    finally:
        signal.signal(signal.SIGINT, before)


def _run_over_http(server: MCPServer, host: str, port: int) -> None:
    from kestrel.mcp_server import host_rules  # noqa: PLC0415

    note(f"the tools are at http://{f'[{host}]' if ':' in host else host}:{port}/mcp")
    try:
        run_to_end(server.run_streamable_http_async(host=host, port=port, transport_security=host_rules(host, port)))
    except SystemExit:  # of uvicorn, which has said why
        raise ConfigError("--http", f"nothing can listen at {host}, port {port}; give another address") from None


def _folders(names: tuple[str, ...]) -> list[Path]:
    folders = [Path(name).expanduser() for name in names or (".",)]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError("--allow", f"{str(folder)!r} is not a folder; name one that holds pictures")
    return folders


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        raise ConfigError("--http", f"{shown(text)} is not an address; write it as in 127.0.0.1:8090")
    if host in EVERY_ADDRESS:
        message = f"{host} is not an address that clients can use; give the machine's own address, or 127.0.0.1"
        raise ConfigError("--http", message)
    return host, int(port)


def _opener(options: McpOptions, config: RuntimeConfig) -> Callable[[], Model]:
    from kestrel.client.refusals import base_url  # noqa: PLC0415

    if options.endpoint is not None:
        if config != RuntimeConfig():
            refuse_local_settings(config)
        url, key = base_url(options.endpoint, "--endpoint"), options.api_key or os.environ.get(KEY_VARIABLE) or None
        return lambda: _asked(url, key)
    if options.api_key is not None:
        raise ConfigError("--api-key", "is for a server; name it with --endpoint, or leave the key out")
    check_model(config)
    return lambda: _loaded(config)


def _asked(url: str, key: str | None) -> Model:
    from kestrel.client.model import vl  # noqa: PLC0415

    return vl(endpoint=url, api_key=key)


def _loaded(config: RuntimeConfig) -> Model:
    from kestrel.client.model import vl  # noqa: PLC0415

    model = vl(config=config)
    note_default_model(config)
    return model
