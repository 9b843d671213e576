"""The public engine."""

from kestrel.engine.api import InferenceEngine
from kestrel.engine.snapshot import EngineSnapshot
from kestrel.engine.streams import EngineResult, EngineStream, StreamChunk

__all__ = ["EngineResult", "EngineSnapshot", "EngineStream", "InferenceEngine", "StreamChunk"]
