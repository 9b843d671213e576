"""Low-rank adapters: what one is, and the file formats it comes in."""

from kestrel.adapters.adapter import Adapter, AdapterShape, AdapterTarget, ExpertShape, LowRankPair
from kestrel.adapters.loading import load_adapter
from kestrel.adapters.saving import save_adapter

__all__ = [
    "Adapter",
    "AdapterShape",
    "AdapterTarget",
    "ExpertShape",
    "LowRankPair",
    "load_adapter",
    "save_adapter",
]
