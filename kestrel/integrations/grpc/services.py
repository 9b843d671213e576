"""The methods of the two services, inference and health: each reads its message, asks the host, answers or refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

from kestrel import __version__
from kestrel.errors import DeadlineExceeded, ModelNotFound, RequestError, shown
from kestrel.integrations.grpc.calls import (
    Call,
    Host,
    Interruption,
    Method,
    Places,
    ReaderStalled,
    Received,
    Visitor,
    in_time,
    log_fault,
    parsed,
)
from kestrel.integrations.grpc.messages import (
    INFERENCE,
    Message,
    Protocol,
    fill_response,
    input_tensors,
    require_model,
    require_usual,
)
from kestrel.integrations.inference_protocol import (
    BOOL,
    INPUTS,
    MODEL,
    OUTPUT,
    VERSION,
    Answer,
    SkillCall,
    answers,
    message_of,
    read_call,
)

STREAMS_PER_CLIENT = 64
"""Each may have a message in gRPC's hands that is not complete."""
MAX_REQUESTS = 64
"""Unanswered requests of one stream; the next is read when one of them is done."""
STALL_S = 1.0
"""A write that is as old as this when its request must be over has a client that does not read."""
SERVICES = ("", INFERENCE)
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
WATCHES, WATCHES_PER_ADDRESS = 64, 8
WATCH_S = 0.25
"""How often a watched status is looked at, once for all who watch."""

Write: TypeAlias = Callable[[Any], Coroutine[Any, Any, None]]
AnswerAll: TypeAlias = Callable[[Any, Write], Coroutine[Any, Any, None]]


@dataclass
class _Asked:
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
            "ModelStatistics": Method(self._model_statistics),
            "RepositoryIndex": Method(self._repository_index),
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

    async def _about_model(self, call: Call, message: str) -> Message:
        """A request that names the model. Raises ModelNotFound for another one."""
        request = parsed(self._protocol.message(message), (await call.receive()).take())
        require_model(request.name, request.version, self._names)
        return request

    async def _model_ready(self, call: Call) -> Message:
        await self._about_model(call, "inference.ModelReadyRequest")
        return self._protocol.message("inference.ModelReadyResponse")(ready=self._host.is_ready)

    async def _model_metadata(self, call: Call) -> Message:
        request = await self._about_model(call, "inference.ModelMetadataRequest")
        return self._protocol.message("inference.ModelMetadataResponse")(
            name=request.name,
            versions=[VERSION],
            platform="kestrel",
            inputs=[{"name": known.name, "datatype": known.datatype, "shape": known.shape} for known in INPUTS],
            outputs=[{"name": OUTPUT, "datatype": "BYTES", "shape": [1]}],
        )

    async def _model_config(self, call: Call) -> Message:
        request = await self._about_model(call, "inference.ModelConfigRequest")
        inputs = [
            {
                "name": known.name,
                "data_type": "TYPE_BOOL" if known.datatype == BOOL else "TYPE_STRING",
                "dims": known.shape,
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

    async def _model_statistics(self, call: Call) -> Message:
        """Without a name, of the model under each of its names."""
        request = parsed(self._protocol.message("inference.ModelStatisticsRequest"), (await call.receive()).take())
        if request.name:
            require_model(request.name, request.version, self._names)
        told = self._host.statistics
        parts = {"success": told.success, "fail": told.fail, "queue": told.queue, "compute_infer": told.compute}
        numbers = {
            "version": VERSION,
            "last_inference": told.last_ms,
            "inference_count": told.success.count,
            "execution_count": told.success.count,
            "inference_stats": {name: {"count": part.count, "ns": part.ns} for name, part in parts.items()},
        }
        names = [request.name] if request.name else self._names
        return self._protocol.message("inference.ModelStatisticsResponse")(
            model_stats=[{"name": name, **numbers} for name in names]
        )

    async def _repository_index(self, call: Call) -> Message:
        request = parsed(self._protocol.message("inference.RepositoryIndexRequest"), (await call.receive()).take())
        if request.repository_name:
            raise RequestError("repository_name", f"{shown(request.repository_name)} is not known; leave it out")
        is_ready = self._host.is_ready
        state = {"version": VERSION, "state": "READY" if is_ready else "UNAVAILABLE"}
        names = self._names if is_ready or not request.ready else ()
        return self._protocol.message("inference.RepositoryIndexResponse")(
            models=[{"name": name, **state} for name in names]
        )

    # ------------------------------------------------------------------ requests

    async def _model_infer(self, call: Call) -> Message:
        received = await call.receive()
        call.must_leave_s = asyncio.get_running_loop().time() + self._host.request_timeout_s
        asked, response = _Asked(), self._response()
        async with aclosing(self._answers(call.admitted, received, "ModelInfer", asked)) as answers_in_turn:
            async for answer in answers_in_turn:
                fill_response(response, asked, answer)
        return response

    async def _model_stream_infer(self, call: Call) -> None:
        visitor, host = call.admitted, self._host

        async def answer_all(received: Received, write: Write) -> None:
            asked = _Asked()
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
        self, visitor: Visitor, received: Received, method: str, asked: _Asked
    ) -> AsyncGenerator[Answer, None]:
        with visitor.request(f"/{INFERENCE}/{method}", received.num_bytes) as hosted:
            call = await self._read(received, method, asked)
            async with hosted.run(call.skill, call.fields, stream=call.stream) as stream:
                call.fields.clear()
                async for answer in answers(stream, call.stream):
                    yield answer

    async def _read(self, received: Received, method: str, asked: _Asked) -> SkillCall:
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
        return tuple(dict.fromkeys((MODEL, *self._host.model_names)))


async def _received(requests: AsyncIterator[bytes]) -> AsyncIterator[Received]:
    async for data in requests:
        received = Received(data)
        del data
        yield received


# ---------------------------------------------------------------------- one ModelStreamInfer call


class ClientGone(Exception):
    """Nobody reads the answers any more."""


@dataclass(frozen=True)
class StreamLimits:
    idle_s: float
    """What the next request may take while none is running."""
    request_s: float
    """What an answer may take; the call ends when its client does not read it until then."""


class StreamSession:
    """Many requests side by side, their answers in the order in which they are there.

    `answer_all(request, write)` answers one request, refusals included. After `closing` no more are read. `stall` ends
    the call when its client does not read.
    """

    def __init__(
        self, answer_all: AnswerAll, write: Write, closing: asyncio.Event, limits: StreamLimits, stall: Interruption
    ) -> None:
        self._answer_all = answer_all
        self._write = write
        self._closing = closing
        self._limits = limits
        self._stall = stall
        self._room = asyncio.Semaphore(MAX_REQUESTS)
        self._one_at_a_time = asyncio.Lock()
        self._writing_since_s: float | None = None
        self._is_over = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, requests: AsyncIterator[Any]) -> None:
        """Until the client has sent its last request and all are answered. Cancelled, it ends those still running."""
        closing = asyncio.ensure_future(self._closing.wait())
        with self._stall:
            try:
                while (request := await self._next(requests, closing)) is not None:
                    task = asyncio.create_task(self._answer(request))
                    self._tasks.add(task)
                    task.add_done_callback(self._put_aside)
                while self._tasks:
                    await asyncio.wait(self._tasks)
            finally:
                self._is_over = True
                left = {closing, *self._tasks}
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)

    async def _next(self, requests: AsyncIterator[Any], closing: asyncio.Future[Any]) -> Any | None:
        """The next request, once there is room for it; None at the end of them, or when the server closes."""
        await self._room.acquire()
        coming = asyncio.ensure_future(anext(requests, None))
        idle_s = self._limits.idle_s
        try:
            while True:
                await asyncio.wait({coming, closing}, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
                if coming.done() or closing.done():
                    return coming.result() if coming.done() else None
                if not self._tasks:
                    raise DeadlineExceeded(
                        f"no request came for {idle_s:g} s (stream_idle_timeout_s); open a new stream"
                    )
        finally:
            coming.cancel()

    async def _answer(self, request: Any) -> None:
        watch = _Deadline(self._limits.request_s, self._end_if_stalled)
        try:
            await self._answer_all(request, self._write_in_turn)
        finally:
            watch.stop()
            self._room.release()

    def _end_if_stalled(self) -> bool:
        """Whether the call is ended. A client that reads gets what is left, such as the refusal."""
        since_s = self._writing_since_s
        if since_s is None or asyncio.get_running_loop().time() - since_s < STALL_S:
            return False
        self._stall.interrupt()
        return True

    async def _write_in_turn(self, response: Any) -> None:
        """Waits while the client does not read, and so does whoever makes the answers. Raises ClientGone."""
        async with self._one_at_a_time:
            self._writing_since_s = asyncio.get_running_loop().time()
            try:
                await self._write(response)
            except asyncio.CancelledError:
                if not self._is_over:
                    self._stall.interrupt()  # gRPC takes no other write after one that was given up
                raise
            except Exception as error:
                raise ClientGone from error
            finally:
                self._writing_since_s = None

    def _put_aside(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # ClientGone: the call ends as well


class _Deadline:
    """Asks `is_ended` after so many seconds, and again until it says yes."""

    def __init__(self, seconds: float, is_ended: Callable[[], bool]) -> None:
        self._is_ended = is_ended
        self._timer = asyncio.get_running_loop().call_later(seconds, self._ask)

    def stop(self) -> None:
        self._timer.cancel()

    def _ask(self) -> None:
        if not self._is_ended():
            self._timer = asyncio.get_running_loop().call_later(STALL_S, self._ask)


# ---------------------------------------------------------------------- health


class HealthService:
    """gRPC's own: serving from the moment the engine is warm until the server drains."""

    def __init__(self, protocol: Protocol, host: Host, closing: asyncio.Event) -> None:
        self._request = protocol.message("grpc.health.v1.HealthCheckRequest")
        self._response = protocol.message("grpc.health.v1.HealthCheckResponse")
        self._host = host
        self._closing = closing
        self._watches = Places("watches", "end some, or call Check", per_client=WATCHES_PER_ADDRESS, in_all=WATCHES)
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def methods(self) -> dict[str, Method]:
        return {"Check": Method(self._check, needs_key=False), "Watch": Method(self._watch, needs_key=False)}

    async def _check(self, call: Call) -> Message:
        request = parsed(self._request, (await call.receive()).take())
        if request.service not in SERVICES:
            raise ModelNotFound(f"there is no service {shown(request.service)}; ask for {INFERENCE!r} or leave it out")
        return self._response(status=self._status(request.service))

    async def _watch(self, call: Call) -> None:
        request = parsed(self._request, (await call.receive()).take())
        self._watches.take(call.address)
        try:
            told = None
            while not self._closing.is_set():
                status = self._status(request.service)
                if status != told:
                    told = status
                    await self._write(call, status)
                else:
                    await self._next_change()
        finally:
            self._watches.give_back(call.address)

    async def _write(self, call: Call, status: int) -> None:
        seconds = self._host.receive_timeout_s
        unread = ReaderStalled(f"the status was not read within {seconds:g} s (receive_timeout_s); read it")
        with in_time(self._host, seconds, unread):
            await call.write(self._response(status=status))

    async def _next_change(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(self._host.is_ready))
        await self._changed.wait()

    async def _look(self, ready: bool) -> None:
        """Until the server closes, or nobody watches."""
        while not self._closing.is_set() and self._watches.num_taken:
            await asyncio.sleep(WATCH_S)
            if self._host.is_ready != ready:
                ready = self._host.is_ready
                self._tell()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> int:
        if service not in SERVICES:
            return SERVICE_UNKNOWN
        return SERVING if self._host.is_ready else NOT_SERVING
