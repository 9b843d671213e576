"""The methods of the inference service: each reads its message, asks the host, and answers or refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from kestrel import __version__
from kestrel.errors import RequestError
from kestrel.integrations.grpc.calls import Call, Method, ReaderStalled, Received, log_fault, parsed
from kestrel.integrations.grpc.host import Host, Visitor
from kestrel.integrations.grpc.places import Places
from kestrel.integrations.grpc.protocol import INFERENCE, Message, Protocol
from kestrel.integrations.grpc.streams import ClientGone, StreamLimits, StreamSession, Write
from kestrel.integrations.grpc.tensors import fill_response, input_tensors, require_model, require_usual
from kestrel.integrations.inference_protocol.errors import message_of
from kestrel.integrations.inference_protocol.inputs import BOOL, INPUTS, MODEL, VERSION, read_call
from kestrel.integrations.inference_protocol.inputs import Call as ReadCall
from kestrel.integrations.inference_protocol.outputs import OUTPUT, Answer, answers

STREAMS_PER_CLIENT = 64
"""Each may have a message in gRPC's hands that is not complete."""


@dataclass
class Asked:
    """What the answers repeat of their request."""

    model_name: str = ""
    id: str = ""


class InferenceService:
    def __init__(self, protocol: Protocol, host: Host, closing: asyncio.Event, max_calls: int) -> None:
        self._protocol = protocol
        self._host = host
        self._closing = closing
        self._streams = Places("streams", "end some", per_client=STREAMS_PER_CLIENT, in_all=max_calls)
        self._request = protocol.message("inference.ModelInferRequest")
        self._response = protocol.message("inference.ModelInferResponse")
        self._stream_response = protocol.message("inference.ModelStreamInferResponse")

    def methods(self) -> dict[str, Method]:
        return {
            "ServerLive": Method(self._server_live, needs_key=False),
            "ServerReady": Method(self._server_ready, needs_key=False),
            "ServerMetadata": Method(self._server_metadata, needs_key=False),
            "ModelReady": Method(self._model_ready, needs_key=False),
            "ModelMetadata": Method(self._model_metadata),
            "ModelConfig": Method(self._model_config),
            "ModelInfer": Method(self._model_infer),
            "ModelStreamInfer": Method(self._model_stream_infer),
        }

    # ------------------------------------------------------------------ the server and its model

    async def _server_live(self, call: Call) -> Message:
        return self._protocol.message("inference.ServerLiveResponse")(live=self._host.is_alive)

    async def _server_ready(self, call: Call) -> Message:
        return self._protocol.message("inference.ServerReadyResponse")(ready=self._host.is_ready)

    async def _server_metadata(self, call: Call) -> Message:
        return self._protocol.message("inference.ServerMetadataResponse")(name="kestrel", version=__version__)

    async def _model_ready(self, call: Call) -> Message:
        request = parsed(self._protocol.message("inference.ModelReadyRequest"), (await call.receive()).take())
        require_model(request.name, request.version, self._names)
        return self._protocol.message("inference.ModelReadyResponse")(ready=self._host.is_ready)

    async def _model_metadata(self, call: Call) -> Message:
        request = parsed(self._protocol.message("inference.ModelMetadataRequest"), (await call.receive()).take())
        require_model(request.name, request.version, self._names)
        return self._protocol.message("inference.ModelMetadataResponse")(
            name=request.name,
            versions=[VERSION],
            platform="kestrel",
            inputs=[{"name": known.name, "datatype": known.datatype, "shape": [1]} for known in INPUTS],
            outputs=[{"name": OUTPUT, "datatype": "BYTES", "shape": [1]}],
        )

    async def _model_config(self, call: Call) -> Message:
        request = parsed(self._protocol.message("inference.ModelConfigRequest"), (await call.receive()).take())
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

    async def _model_infer(self, call: Call) -> Message:
        received = await call.receive()
        call.must_leave_s = asyncio.get_running_loop().time() + self._host.request_timeout_s
        asked, response = Asked(), self._response()
        async with aclosing(self._answers(call.admitted, received, "ModelInfer", asked)) as answers_in_turn:
            async for answer in answers_in_turn:
                fill_response(response, asked, answer)
        return response

    async def _model_stream_infer(self, call: Call) -> None:
        visitor, host = call.admitted, self._host

        async def answer_all(received: Received, write: Write) -> None:
            asked = Asked()
            try:
                async with aclosing(self._answers(visitor, received, "ModelStreamInfer", asked)) as answers_in_turn:
                    async for answer in answers_in_turn:
                        response = self._stream_response()
                        fill_response(response.infer_response, asked, answer)
                        await write(response)
            except ClientGone:
                raise
            except Exception as error:
                log_fault(error)
                response = self._stream_response(error_message=message_of(error))
                response.infer_response.model_name, response.infer_response.id = asked.model_name, asked.id
                await write(response)

        limits = StreamLimits(idle_s=host.stream_idle_timeout_s, request_s=host.request_timeout_s)
        limit = f"{host.request_timeout_s:g} s (request_timeout_s)"
        stall = host.interruption(ReaderStalled(f"the answers were not read within {limit}; read them as they come"))
        self._streams.take(visitor.client)
        try:
            await StreamSession(answer_all, call.write, self._closing, limits, stall).serve(_received(call.requests))
        finally:
            self._streams.give_back(visitor.client)

    async def _answers(
        self, visitor: Visitor, received: Received, method: str, asked: Asked
    ) -> AsyncGenerator[Answer, None]:
        with visitor.request(f"/{INFERENCE}/{method}", received.num_bytes) as hosted:
            call = await self._read(received, method, asked)
            async with hosted.run(call.skill, call.fields, stream=call.stream) as stream:
                call.fields.clear()
                async for answer in answers(stream, call.stream):
                    yield answer

    async def _read(self, received: Received, method: str, asked: Asked) -> ReadCall:
        request = parsed(self._request, received.take())
        asked.model_name, asked.id = request.model_name, request.id
        require_model(request.model_name, request.model_version, self._names)
        require_usual(request)
        call = await read_call(input_tensors(request), self._host.max_image_bytes, self._host.body_threads)
        if call.stream and method == "ModelInfer":
            raise RequestError("STREAM", "is true, but this call has one response; use ModelStreamInfer")
        return call

    @property
    def _names(self) -> tuple[str, ...]:
        return (MODEL, *self._host.model_names)


async def _received(requests: AsyncIterator[bytes]) -> AsyncIterator[Received]:
    async for data in requests:
        received = Received(data)
        del data
        yield received
