"""Kestrel as a Triton model. Everything is in the package; docs/triton.md says how to run it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from kestrel.integrations.triton_server import KestrelBackend


class TritonPythonModel:
    """The three calls that Triton's Python backend makes."""

    def initialize(self, args: Mapping[str, Any]) -> None:
        self._backend = KestrelBackend(pb_utils)

    def execute(self, requests: list[Any]) -> None:
        self._backend.execute(requests)

    def finalize(self) -> None:
        self._backend.finalize()
