"""kestrel serve --grpc-port: the gRPC endpoint beside the HTTP server, each unknown to the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kestrel.errors import ConfigError
from kestrel.server.host import ServerHost
from kestrel.server.state import ServerState

REMEDY = "needs grpcio, which is not installed; run `pip install -e '.[grpc]'` in the checkout, or leave it out"


@asynccontextmanager
async def grpc_beside(state: ServerState) -> AsyncIterator[str | None]:
    """Listens while the block runs, if a port is set; gives what clients connect to."""
    config = state.config
    if config.grpc_port is None:
        yield None
        return
    try:
        from kestrel.integrations.grpc.endpoint import EndpointOptions, GrpcEndpoint  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError("grpc_port", REMEDY) from error
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
