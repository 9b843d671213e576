"""The public engine. `InferenceEngine` and its snapshot are read when they are asked for: they import torch."""

from typing import TYPE_CHECKING, Any

from kestrel.engine.streams import EngineResult, EngineStream, StreamChunk

if TYPE_CHECKING:
    from kestrel.engine.api import InferenceEngine
    from kestrel.engine.snapshot import EngineSnapshot

__all__ = ["EngineResult", "EngineSnapshot", "EngineStream", "InferenceEngine", "StreamChunk"]


def __getattr__(name: str) -> Any:
    if name in ("EngineSnapshot", "InferenceEngine"):
        from kestrel.engine import api  # noqa: PLC0415

        return getattr(api, name)
    raise AttributeError(f"module 'kestrel.engine' has no attribute {name!r}")
