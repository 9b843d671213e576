"""A gRPC server on the event loop of its caller, beside whatever else runs there."""

from __future__ import annotations

import asyncio
import resource
import ssl
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import grpc

from kestrel.errors import ConfigError
from kestrel.integrations.grpc.calls import OPEN_CALLS, Gate, Host
from kestrel.integrations.grpc.messages import HEALTH, INFERENCE, Protocol
from kestrel.integrations.grpc.services import HealthService, InferenceService

KEEP_ALIVE_MS = 60_000
"""After so much silence a client is asked whether it is there; one that vanished without a word is noticed so."""
CALLS_PER_CONNECTION = 128
"""A client with more opens another connection, or waits."""
SHARE_OF_FILES = 4
"""Connections may take this part of the files that the process may have open."""
BACKSTOP = 4
"""gRPC's own bound on calls lies so far above the gate's, which says what it refuses: it also counts what is over."""
IDENTITY_ALONE = 1
"""No compression, as over HTTP: not every release of gRPC bounds what a message unpacks to."""
MOST = 2**31 - 1
"""The largest value of an option."""
GRACE_S = 5.0
"""What calls get to end once no request is running."""


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    address: str
    port: int
    """0 takes a free one."""
    max_message_bytes: int
    max_metadata_bytes: int
    max_calls: int
    idle_connection_s: float
    tls_cert_file: str | None = None
    tls_key_file: str | None = None


class GrpcEndpoint:
    """`async with GrpcEndpoint(host, options) as endpoint:` listens from the beginning of the block to its end."""

    def __init__(self, host: Host, options: EndpointOptions) -> None:
        self._options = options
        self._closing = asyncio.Event()
        protocol, gate = Protocol(), Gate(host, options.max_calls)
        services = {
            INFERENCE: InferenceService(protocol, host, self._closing, options.max_calls).methods(),
            HEALTH: HealthService(protocol, host, self._closing).methods(),
        }
        self._server = grpc.aio.server(
            options=_channel_options(options), maximum_concurrent_rpcs=BACKSTOP * (options.max_calls + OPEN_CALLS)
        )
        self._server.add_generic_rpc_handlers(
            [
                protocol.handler(service, {name: gate.behaviour(method) for name, method in methods.items()})
                for service, methods in services.items()
            ]
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


def _channel_options(options: EndpointOptions) -> list[tuple[str, int]]:
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    values = [
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_metadata_size", options.max_metadata_bytes),
        ("grpc.compression_enabled_algorithms_bitset", IDENTITY_ALONE),
        ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", MOST if max_files < 0 else max_files // SHARE_OF_FILES),
        ("grpc.max_connection_idle_ms", round(1000 * options.idle_connection_s)),
        ("grpc.keepalive_time_ms", KEEP_ALIVE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),
    ]
    return [(name, min(value, MOST)) for name, value in values]


def _in_brackets(address: str) -> str:
    return f"[{address}]" if ":" in address else address
