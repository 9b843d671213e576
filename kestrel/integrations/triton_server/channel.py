"""The way back to one client of Triton: answers, one end, and the question whether the client is still there."""

from __future__ import annotations

import numpy as np

from kestrel.integrations.inference_protocol.errors import TritonCode, kind_of, message_of
from kestrel.integrations.inference_protocol.outputs import OUTPUT, Answer
from kestrel.integrations.triton_server.contract import Sender, Utilities


class ResponseChannel:
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
