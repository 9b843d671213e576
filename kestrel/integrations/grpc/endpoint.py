"""A gRPC server on the event loop of its caller, beside whatever else runs there."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import grpc

from kestrel.errors import ConfigError
from kestrel.integrations.grpc.health import HealthService
from kestrel.integrations.grpc.host import Host
from kestrel.integrations.grpc.protocol import HEALTH, INFERENCE, Protocol
from kestrel.integrations.grpc.service import InferenceService

KEEP_ALIVE_MS = 60_000
"""After so much silence a client is asked whether it is there; one that vanished without a word is noticed so."""
GRACE_S = 5.0
"""What calls get to end once no request is running."""


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    address: str
    port: int
    """0 takes a free one."""
    max_message_bytes: int
    max_metadata_bytes: int
    tls_cert_file: str | None = None
    tls_key_file: str | None = None


class GrpcEndpoint:
    """`async with GrpcEndpoint(host, options) as endpoint:` listens from the beginning of the block to its end."""

    def __init__(self, host: Host, options: EndpointOptions) -> None:
        self._options = options
        self._closing = asyncio.Event()
        protocol = Protocol()
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", options.max_message_bytes),
                ("grpc.max_metadata_size", options.max_metadata_bytes),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", KEEP_ALIVE_MS),
            ]
        )
        inference = InferenceService(protocol, host, self._closing).behaviours()
        health = HealthService(protocol, host, self._closing).behaviours()
        self._server.add_generic_rpc_handlers(
            (protocol.handler(INFERENCE, inference), protocol.handler(HEALTH, health))
        )
        self.port = 0

    async def __aenter__(self) -> GrpcEndpoint:
        self.port = self._listen()
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        await self._server.stop(GRACE_S)

    @property
    def target(self) -> str:
        """What clients connect to."""
        return f"{_in_brackets(self._options.address)}:{self.port}"

    def _listen(self) -> int:
        options = self._options
        target = f"{_in_brackets(options.address)}:{options.port}"
        try:
            credentials = self._credentials()
            if credentials is None:
                port = self._server.add_insecure_port(target)
            else:
                port = self._server.add_secure_port(target, credentials)
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigError("grpc_port", f"cannot listen on {target}; free it or choose another --grpc-port")
        return port

    def _credentials(self) -> grpc.ServerCredentials | None:
        cert, key = self._options.tls_cert_file, self._options.tls_key_file
        if cert is None or key is None:
            return None
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
            return grpc.ssl_server_credentials([(Path(key).read_bytes(), Path(cert).read_bytes())])
        except OSError as error:  # also what the ssl module raises
            reason = error.strerror or "not a PEM file"
            raise ConfigError(
                "tls_cert_file", f"the certificate or its key cannot be used ({reason}); check both"
            ) from error


def _in_brackets(address: str) -> str:
    return f"[{address}]" if ":" in address else address
