"""Low-rank adapters: what one is, the file formats it comes in, and where it comes from."""

from kestrel.adapters.adapter import Adapter, AdapterId, AdapterShape, AdapterTarget, ExpertShape, LowRankPair
from kestrel.adapters.library import AdapterLibrary, LibrarySnapshot, LoadedAdapter
from kestrel.adapters.loading import load_adapter, save_adapter

__all__ = [
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
