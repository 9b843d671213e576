"""The public engine."""

from kestrel.engine.api import InferenceEngine
from kestrel.engine.results import EngineResult, StreamChunk
from kestrel.engine.snapshot import EngineSnapshot
from kestrel.engine.streams import EngineStream

__all__ = ["EngineResult", "EngineSnapshot", "EngineStream", "InferenceEngine", "StreamChunk"]
