"""The protocol's messages and services, made from descriptors when the endpoint starts.

They live in a pool of their own: generated code would enter them into the process-wide one, where a client of the same
protocol in the same process has messages of the same names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

DESCRIPTORS = Path(__file__).parent / "descriptors.binpb"
"""Compiled from the .proto files beside it by scripts/compile-protocol."""
INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"

Message: TypeAlias = Any
"""A message whose type exists at run time only."""
Behaviour: TypeAlias = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Any]


class Protocol:
    def __init__(self) -> None:
        self._pool = DescriptorPool()
        for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
            self._pool.Add(file)

    def message(self, name: str) -> Callable[..., Message]:
        """The type of a message, such as inference.ModelInferRequest."""
        return GetMessageClass(self._pool.FindMessageTypeByName(name))

    def handler(self, service: str, behaviours: Mapping[str, Behaviour]) -> grpc.GenericRpcHandler:
        """A service with a behaviour for each of its methods. All get their messages as an iterator of bytes."""
        methods = self._pool.FindServiceByName(service).methods
        return grpc.method_handlers_generic_handler(
            service, {method.name: _method_handler(method, behaviours[method.name]) for method in methods}
        )


def _method_handler(method: Any, behaviour: Behaviour) -> grpc.RpcMethodHandler:
    """One message or many is the same to HTTP/2; gRPC reads those of a stream only when it is asked for them."""
    streams = method.server_streaming
    make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
    return make(behaviour, response_serializer=GetMessageClass(method.output_type).SerializeToString)
