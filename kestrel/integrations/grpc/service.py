"""The methods of the inference service: each reads its message, asks the host, and answers or refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import wraps
from typing import TypeAlias

import grpc

from kestrel import __version__
from kestrel.api_keys import offered_keys
from kestrel.errors import RequestError
from kestrel.integrations.grpc.host import Host, Visitor
from kestrel.integrations.grpc.protocol import INFERENCE, Behaviour, Message, Protocol
from kestrel.integrations.grpc.streams import ClientGone, StreamSession, Write
from kestrel.integrations.grpc.tensors import fill_response, input_tensors, require_model, require_usual
from kestrel.integrations.inference_protocol.errors import kind_of, message_of
from kestrel.integrations.inference_protocol.inputs import BOOL, INPUTS, MODEL, VERSION, read_call
from kestrel.integrations.inference_protocol.outputs import OUTPUT, Answer, answers

Context: TypeAlias = grpc.aio.ServicerContext
logger = logging.getLogger("kestrel.grpc")


class InferenceService:
    def __init__(self, protocol: Protocol, host: Host, closing: asyncio.Event) -> None:
        self._protocol = protocol
        self._host = host
        self._closing = closing
        self._response = protocol.message("inference.ModelInferResponse")
        self._stream_response = protocol.message("inference.ModelStreamInferResponse")

    def behaviours(self) -> dict[str, Behaviour]:
        return {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": _refusing(self._model_ready),
            "ModelMetadata": _refusing(self._model_metadata),
            "ModelConfig": _refusing(self._model_config),
            "ModelInfer": _refusing(self._model_infer),
            "ModelStreamInfer": _refusing(self._model_stream_infer),
        }

    # ------------------------------------------------------------------ the server and its model

    async def _server_live(self, request: Message, context: Context) -> Message:
        return self._protocol.message("inference.ServerLiveResponse")(live=self._host.is_alive)

    async def _server_ready(self, request: Message, context: Context) -> Message:
        return self._protocol.message("inference.ServerReadyResponse")(ready=self._host.is_ready)

    async def _server_metadata(self, request: Message, context: Context) -> Message:
        return self._protocol.message("inference.ServerMetadataResponse")(name="kestrel", version=__version__)

    async def _model_ready(self, request: Message, context: Context) -> Message:
        require_model(request.name, request.version, self._names)
        return self._protocol.message("inference.ModelReadyResponse")(ready=self._host.is_ready)

    async def _model_metadata(self, request: Message, context: Context) -> Message:
        self._admit(context)
        require_model(request.name, request.version, self._names)
        return self._protocol.message("inference.ModelMetadataResponse")(
            name=request.name,
            versions=[VERSION],
            platform="kestrel",
            inputs=[{"name": known.name, "datatype": known.datatype, "shape": [1]} for known in INPUTS],
            outputs=[{"name": OUTPUT, "datatype": "BYTES", "shape": [1]}],
        )

    async def _model_config(self, request: Message, context: Context) -> Message:
        self._admit(context)
        require_model(request.name, request.version, self._names)
        inputs = [
            {
                "name": known.name,
                "data_type": "TYPE_BOOL" if known.datatype == BOOL else "TYPE_STRING",
                "dims": [1],
                "optional": True,
            }
            for known in INPUTS
        ]
        return self._protocol.message("inference.ModelConfigResponse")(
            config={
                "name": request.name,
                "backend": "kestrel",
                "max_batch_size": 0,
                "input": inputs,
                "output": [{"name": OUTPUT, "data_type": "TYPE_STRING", "dims": [1]}],
                "model_transaction_policy": {"decoupled": True},
            }
        )

    # ------------------------------------------------------------------ requests

    async def _model_infer(self, request: Message, context: Context) -> Message:
        visitor = self._admit(context)
        response = self._response()
        async with aclosing(self._answers(visitor, request, "ModelInfer")) as answers_in_turn:
            async for answer in answers_in_turn:
                fill_response(response, request, answer)
        return response

    async def _model_stream_infer(self, requests: AsyncIterator[Message], context: Context) -> None:
        visitor = self._admit(context)

        async def answer_all(request: Message, write: Write) -> None:
            try:
                async with aclosing(self._answers(visitor, request, "ModelStreamInfer")) as answers_in_turn:
                    async for answer in answers_in_turn:
                        response = self._stream_response()
                        fill_response(response.infer_response, request, answer)
                        await write(response)
            except ClientGone:
                raise
            except Exception as error:
                _log_fault(error)
                response = self._stream_response(error_message=message_of(error))
                response.infer_response.model_name, response.infer_response.id = request.model_name, request.id
                await write(response)

        await StreamSession(answer_all, context.write, self._closing).serve(requests)

    async def _answers(self, visitor: Visitor, request: Message, method: str) -> AsyncGenerator[Answer, None]:
        with visitor.request(f"/{INFERENCE}/{method}", request.ByteSize()) as hosted:
            require_model(request.model_name, request.model_version, self._names)
            require_usual(request)
            call = await read_call(input_tensors(request), self._host.max_image_bytes)
            if call.stream and method == "ModelInfer":
                raise RequestError("STREAM", "is true, but this call has one response; use ModelStreamInfer")
            async with hosted.run(call.skill, call.fields, stream=call.stream) as stream:
                async for answer in answers(stream, call.stream):
                    yield answer

    @property
    def _names(self) -> tuple[str, ...]:
        return (MODEL, *self._host.model_names)

    def _admit(self, context: Context) -> Visitor:
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        keys = offered_keys(headers.get("authorization", ""), headers.get("x-moondream-auth", ""))
        return self._host.admit(keys, _address(context.peer()))


def _refusing(behaviour: Behaviour) -> Behaviour:
    """The behaviour, with its failures as status codes."""

    @wraps(behaviour)
    async def refusing(request: Message, context: Context) -> Message:
        try:
            return await behaviour(request, context)
        except Exception as error:
            _log_fault(error)
            await _abort(context, error)

    return refusing


async def _abort(context: Context, error: BaseException) -> None:
    await context.abort(grpc.StatusCode[kind_of(error).grpc], message_of(error))


def _log_fault(error: BaseException) -> None:
    if kind_of(error).grpc == "INTERNAL":
        logger.error("a request failed", exc_info=error)


def _address(peer: str) -> str:
    """The client's address without its port: "ipv4:10.0.0.1:5000" is 10.0.0.1."""
    return peer.partition(":")[2].rpartition(":")[0].strip("[]") or "unknown"
