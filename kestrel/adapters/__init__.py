"""Low-rank adapters: what one is, the file formats it comes in, and where it comes from."""

from kestrel.adapters.adapter import (
    AdaptedMatrix,
    Adapter,
    AdapterId,
    AdapterShape,
    AdapterTarget,
    ExpertShape,
    LowRankPair,
)
from kestrel.adapters.library import AdapterLibrary, LibrarySnapshot, LoadedAdapter
from kestrel.adapters.loading import load_adapter, save_adapter

__all__ = [
    "AdaptedMatrix",
    "Adapter",
    "AdapterId",
    "AdapterLibrary",
    "AdapterShape",
    "AdapterTarget",
    "ExpertShape",
    "LibrarySnapshot",
    "LoadedAdapter",
    "LowRankPair",
    "load_adapter",
    "save_adapter",
]
