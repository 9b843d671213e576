"""The engine as a model of NVIDIA's Triton Inference Server, in its Python backend.

Not to be confused with kernels/triton, the language. Triton calls `initialize`, `execute` and `finalize` on its main
thread. The engine lives on a thread of its own; every request becomes a task there, which answers through Triton's
response sender and always ends with the final flag: without it the client waits for ever and the server cannot stop.
Triton tells of clients that have left only when asked, so each task asks.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

import numpy as np

from kestrel import __version__, default_model
from kestrel.config import RuntimeConfig, runtime_config_from
from kestrel.engine import InferenceEngine
from kestrel.engine.allocator import keep_freed_memory
from kestrel.engine.api import warm_up
from kestrel.integrations.inference_protocol import (
    BOOL,
    BYTES,
    INPUTS,
    OUTPUT,
    Answer,
    InputTensor,
    TritonCode,
    answers,
    kind_of,
    message_of,
    read_call,
)

POLL_S = 0.1
"""How often a request asks whether its client is still there. Each time costs a message between two processes."""
DRAIN_S = 25.0
"""What accepted requests get at the end; Triton itself waits 30 s by default (--exit-timeout-secs)."""
KINDS = {"O": BYTES, "S": BYTES, "b": BOOL}
"""From NumPy's kinds to the protocol's names of data types."""
JOIN_S = 5.0
T = TypeVar("T")


class KestrelBackend:
    """Settings come from the environment: KESTREL_MODEL, KESTREL_DEVICE and every other KESTREL_ variable."""

    def __init__(self, utilities: Utilities, environment: Mapping[str, str] = os.environ) -> None:
        keep_freed_memory()
        config = runtime_config_from(environment)
        self._utilities = utilities
        self._unanswered: set[Future[None]] = set()
        if config.model is None and config.weights is None:
            utilities.Logger.log_warn(f"{default_model.DESCRIPTION} For real pictures set KESTREL_MODEL.")
        began_s = time.monotonic()
        self._thread = _EngineThread(config)
        took_s = time.monotonic() - began_s
        utilities.Logger.log_info(f"kestrel {__version__}: {self._engine.model_name} is warm after {took_s:.1f} s")

    @property
    def _engine(self) -> InferenceEngine:
        return self._thread.engine

    def execute(self, requests: Sequence[Request]) -> None:
        """Hands requests over and returns at once."""
        for request in requests:
            channel = _ResponseChannel(self._utilities, request.get_response_sender())
            try:
                tensors = self._tensors(request)
            except Exception as error:
                self._refuse(channel, error)
                continue
            answering = self._thread.submit(self._answer(tensors, channel))
            self._unanswered.add(answering)
            answering.add_done_callback(self._put_aside)

    def finalize(self) -> None:
        """Triton's word that nothing more will come: what was accepted is answered, then the engine ends."""
        deadline_s = time.monotonic() + DRAIN_S
        unanswered = wait(self._unanswered.copy(), DRAIN_S).not_done
        self._thread.stop(max(deadline_s - time.monotonic(), 0.0))
        num_pages = self._engine.snapshot().num_used_pages
        self._utilities.Logger.log_info(
            f"kestrel: ended with {len(unanswered)} requests unanswered and {num_pages} KV pages in use"
        )

    def _put_aside(self, answered: Future[None]) -> None:
        self._unanswered.discard(answered)
        if (error := answered.exception()) is not None:
            self._log_fault(error)

    # ------------------------------------------------------------------ one request

    def _tensors(self, request: Request) -> list[InputTensor]:
        found: list[InputTensor] = []
        for known in INPUTS:
            tensor = self._utilities.get_input_tensor_by_name(request, known.name)
            if tensor is not None:
                values = tensor.as_numpy()
                datatype = KINDS.get(values.dtype.kind, str(values.dtype))
                found.append(InputTensor(known.name, datatype, values.shape, values.ravel().tolist()))
        return found

    async def _answer(self, tensors: list[InputTensor], channel: _ResponseChannel) -> None:
        answering = asyncio.ensure_future(self._send_answers(tensors, channel))
        watching = asyncio.ensure_future(_until_cancelled(channel))
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            answering.cancel()  # of no effect when it is done
            await asyncio.wait({answering})
        finally:
            watching.cancel()
        if answering.cancelled():
            self._utilities.Logger.log_info("kestrel: a client left before its answer; its request is ended")
            channel.end()
        elif (error := answering.exception()) is not None:
            self._refuse(channel, error)

    async def _send_answers(self, tensors: list[InputTensor], channel: _ResponseChannel) -> None:
        call = await read_call(tensors, self._engine.config.max_image_bytes, self._engine.text_threads)
        async with await self._engine.run(call.skill, stream=True, read_along=call.stream, **call.fields) as stream:
            async for answer in answers(stream, call.stream):
                channel.send(answer)

    def _refuse(self, channel: _ResponseChannel, error: BaseException) -> None:
        """What is not the client's business goes to the log alone."""
        if kind_of(error).triton is TritonCode.INTERNAL:
            self._log_fault(error)
        channel.refuse(error)

    def _log_fault(self, error: BaseException) -> None:
        self._utilities.Logger.log_error("".join(traceback.format_exception(error)))


async def _until_cancelled(channel: _ResponseChannel) -> None:
    await asyncio.sleep(POLL_S)
    while not channel.is_cancelled:
        await asyncio.sleep(POLL_S)


# ---------------------------------------------------------------------- the way back to a client


class _ResponseChannel:
    """For one thread. After the final response Triton frees what the sender stands for and must not be asked again:
    `is_cancelled` would bring the whole server down."""

    def __init__(self, utilities: Utilities, sender: Sender) -> None:
        self._utilities = utilities
        self._sender = sender
        self._final = utilities.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._has_ended = False

    @property
    def is_cancelled(self) -> bool:
        """Whether the client has left; costs a message between two processes."""
        return not self._has_ended and self._sender.is_cancelled()

    def send(self, answer: Answer) -> None:
        text = self._utilities.Tensor(OUTPUT, np.array([answer.text], dtype=np.object_))
        response = self._utilities.InferenceResponse(output_tensors=[text])
        if answer.is_final:
            self._end(response)
        else:
            self._sender.send(response)

    def refuse(self, error: BaseException) -> None:
        """One clean error, which is also the end."""
        codes = self._utilities.TritonError
        code = {
            TritonCode.UNKNOWN: codes.UNKNOWN,
            TritonCode.INTERNAL: codes.INTERNAL,
            TritonCode.NOT_FOUND: codes.NOT_FOUND,
            TritonCode.INVALID_ARG: codes.INVALID_ARG,
            TritonCode.UNAVAILABLE: codes.UNAVAILABLE,
            TritonCode.UNSUPPORTED: codes.UNSUPPORTED,
        }[kind_of(error).triton]
        self._end(self._utilities.InferenceResponse(error=codes(message_of(error), code)))

    def end(self) -> None:
        """Without a word, for a client that has left."""
        self._end(None)

    def _end(self, response: object | None) -> None:
        if self._has_ended:
            raise RuntimeError("the request has had its final response")
        self._has_ended = True
        if response is None:
            self._sender.send(flags=self._final)
        else:
            self._sender.send(response, flags=self._final)


# ---------------------------------------------------------------------- the engine's thread


class _EngineThread:
    """An engine on an event loop in a thread of its own. Loads the model when made; raises what prevents it."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kestrel-loop", daemon=True)
        self._thread.start()
        try:
            self.engine = self.submit(_ready_engine(config)).result()
        except BaseException:
            self._end_loop()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self, drain_s: float) -> None:
        """Let accepted requests finish, within `drain_s`; then end engine and loop."""
        try:
            self.submit(self.engine.shutdown(timeout_s=drain_s)).result()
        finally:
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _ready_engine(config: RuntimeConfig) -> InferenceEngine:
    engine = await InferenceEngine.create(config)
    try:
        await warm_up(engine)
    except BaseException:
        await engine.shutdown(drain=False)
        raise
    return engine


# ---------------------------------------------------------------------- what is used of Triton


class Tensor(Protocol):
    def as_numpy(self) -> np.ndarray: ...


class Sender(Protocol):
    """Answers one request. A response with the final flag is the last."""

    def send(self, response: Any = None, flags: int = 0) -> None: ...

    def is_cancelled(self) -> bool: ...


class Request(Protocol):
    def get_response_sender(self) -> Sender: ...


class ErrorType(Protocol):
    """`TritonError`: the type of an error response, with its codes."""

    UNKNOWN: Any
    INTERNAL: Any
    NOT_FOUND: Any
    INVALID_ARG: Any
    UNAVAILABLE: Any
    UNSUPPORTED: Any

    def __call__(self, message: str, code: Any) -> Any: ...


class LoggerType(Protocol):
    def log_info(self, message: str) -> None: ...

    def log_warn(self, message: str) -> None: ...

    def log_error(self, message: str) -> None: ...


class Utilities(Protocol):
    """`triton_python_backend_utils`, which exists inside Triton only."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL: int
    Tensor: Callable[[str, np.ndarray], Any]
    InferenceResponse: Callable[..., Any]
    TritonError: ErrorType
    Logger: LoggerType

    def get_input_tensor_by_name(self, request: Any, name: str) -> Tensor | None: ...
