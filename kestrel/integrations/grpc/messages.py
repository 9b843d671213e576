"""The protocol's messages and services, made from descriptors when the endpoint starts, and the tensors in them.

The messages live in a pool of their own: generated code would enter them into the process-wide one, where a client of
the same protocol in the same process has messages of the same names.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from kestrel.errors import ModelNotFound, RequestError, shown
from kestrel.integrations.inference_protocol import BOOL, BYTES, OUTPUT, VERSION, Answer, InputTensor, Unsupported

DESCRIPTORS = Path(__file__).parent / "descriptors.binpb"
"""Compiled from the .proto files beside it by scripts/compile-protocol."""
INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
EMPTY_FINAL = "triton_enable_empty_final_response"
"""Asks for a last empty response where the last full one is not marked as such; here it always is."""
FINAL = "triton_final_response"
_LENGTH = struct.Struct("<I")

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


# ---------------------------------------------------------------------- tensors


def require_model(name: str, version: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ModelNotFound(f"model {shown(name)} is not served here; use {known[0]!r}")
    if version not in ("", VERSION):
        raise ModelNotFound(f"version {shown(version)} of {name} is not served here; use {VERSION!r} or leave it out")


def require_usual(request: Message) -> None:
    """Refuse what asks for more than a plain request with its one output."""
    for name in request.parameters:
        if name != EMPTY_FINAL:
            raise Unsupported("parameters", f"{shown(name)} has no effect here; leave it out (see the input SETTINGS)")
    for output in request.outputs:
        if output.name != OUTPUT:
            raise RequestError("outputs", f"there is no {shown(output.name)}; the one output is {OUTPUT}")
    for tensor in (*request.inputs, *request.outputs):
        if tensor.parameters:
            names = ", ".join(sorted(tensor.parameters))
            raise Unsupported(tensor.name, f"has parameters ({names}); send the data in the message")


def input_tensors(request: Message) -> Iterator[InputTensor]:
    """In either of the two forms that the protocol has for a tensor's contents."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RequestError("raw_input_contents", f"has {len(raw)} entries for {len(request.inputs)} inputs")
    for number, tensor in enumerate(request.inputs):
        if raw and tensor.HasField("contents"):
            raise RequestError(tensor.name, "has its data in contents and in raw_input_contents; send it once")
        values = _raw_values(tensor, raw[number]) if raw else _listed_values(tensor)
        yield InputTensor(tensor.name, tensor.datatype, tuple(tensor.shape), values)


def _listed_values(tensor: Message) -> list[bytes] | list[bool]:
    if tensor.datatype == BYTES:
        return list(tensor.contents.bytes_contents)
    return list(tensor.contents.bool_contents)


def _raw_values(tensor: Message, data: bytes) -> list[bytes] | list[bool]:
    """Texts each follow their length in four bytes, little end first; truth values are a byte each."""
    if tensor.datatype == BOOL:
        return [byte != 0 for byte in data]
    if tensor.datatype != BYTES:
        return []  # the type is refused by the input's own name
    values: list[bytes] = []
    place = 0
    while place < len(data):
        start = place + _LENGTH.size
        length = _LENGTH.unpack_from(data, place)[0] if start <= len(data) else len(data)
        if start + length > len(data):
            raise RequestError(tensor.name, f"is cut off: {len(data) - place} bytes are left at byte {place}")
        values.append(data[start : start + length])
        place = start + length
    return values


def fill_response(response: Message, request: Message, answer: Answer) -> None:
    """Enter an answer into a fresh response to the request."""
    response.model_name, response.model_version, response.id = request.model_name, VERSION, request.id
    response.parameters[FINAL].bool_param = answer.is_final
    response.outputs.add(name=OUTPUT, datatype=BYTES, shape=[1])
    response.raw_output_contents.append(_LENGTH.pack(len(answer.text)) + answer.text)
