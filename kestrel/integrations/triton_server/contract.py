"""What Triton's Python backend gives to a model, as far as it is used here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


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


Requests = Sequence[Request]
