"""The public engine."""

from kestrel.engine.api import InferenceEngine
from kestrel.engine.results import EngineResult, StreamChunk
from kestrel.engine.streams import EngineStream

__all__ = ["EngineResult", "EngineStream", "InferenceEngine", "StreamChunk"]
