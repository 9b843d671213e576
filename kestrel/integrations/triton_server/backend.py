"""A model of Triton's Python backend over one engine.

Triton calls `initialize`, `execute` and `finalize` on its main thread. The engine lives on a thread of its own; every
request becomes a task there, which answers through Triton's response sender and always ends with the final flag:
without it the client waits for ever and the server cannot stop. Triton tells of clients that have left only when asked,
so each task asks.
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, wait

from kestrel import __version__, default_model
from kestrel.config import runtime_config_from
from kestrel.engine import InferenceEngine
from kestrel.engine.allocator import keep_freed_memory
from kestrel.integrations.inference_protocol.errors import TritonCode, kind_of
from kestrel.integrations.inference_protocol.inputs import BOOL, BYTES, INPUTS, InputTensor, read_call
from kestrel.integrations.inference_protocol.outputs import answers
from kestrel.integrations.triton_server.channel import ResponseChannel
from kestrel.integrations.triton_server.contract import Request, Requests, Utilities
from kestrel.integrations.triton_server.engine_thread import EngineThread

POLL_S = 0.1
"""How often a request asks whether its client is still there. Each time costs a message between two processes."""
DRAIN_S = 25.0
"""What accepted requests get at the end; Triton itself waits 30 s by default (--exit-timeout-secs)."""
KINDS = {"O": BYTES, "S": BYTES, "b": BOOL}
"""From NumPy's kinds to the protocol's names of data types."""


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
        self._thread = EngineThread(config)
        took_s = time.monotonic() - began_s
        utilities.Logger.log_info(f"kestrel {__version__}: {self._engine.model_name} is warm after {took_s:.1f} s")

    @property
    def _engine(self) -> InferenceEngine:
        return self._thread.engine

    def execute(self, requests: Requests) -> None:
        """Hands requests over and returns at once."""
        for request in requests:
            channel = ResponseChannel(self._utilities, request.get_response_sender())
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

    async def _answer(self, tensors: list[InputTensor], channel: ResponseChannel) -> None:
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

    async def _send_answers(self, tensors: list[InputTensor], channel: ResponseChannel) -> None:
        call = await read_call(tensors, self._engine.config.max_image_bytes, self._engine.text_threads)
        async with await self._engine.run(call.skill, stream=True, read_along=call.stream, **call.fields) as stream:
            async for answer in answers(stream, call.stream):
                channel.send(answer)

    def _refuse(self, channel: ResponseChannel, error: BaseException) -> None:
        """What is not the client's business goes to the log alone."""
        if kind_of(error).triton is TritonCode.INTERNAL:
            self._log_fault(error)
        channel.refuse(error)

    def _log_fault(self, error: BaseException) -> None:
        self._utilities.Logger.log_error("".join(traceback.format_exception(error)))


async def _until_cancelled(channel: ResponseChannel) -> None:
    await asyncio.sleep(POLL_S)
    while not channel.is_cancelled:
        await asyncio.sleep(POLL_S)
