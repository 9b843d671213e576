"""Low-rank adapters: what one is, the file formats it comes in, and where it comes from.

The library, and what reads and writes files, are read when they are asked for: they import torch.
"""

from typing import TYPE_CHECKING, Any

from kestrel.adapters.adapter import (
    AdaptedMatrix,
    Adapter,
    AdapterId,
    AdapterShape,
    AdapterTarget,
    ExpertShape,
    LowRankPair,
)

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kestrel.adapters import library, loading  # noqa: PLC0415

        return getattr(loading if name in ("load_adapter", "save_adapter") else library, name)
    raise AttributeError(f"module 'kestrel.adapters' has no attribute {name!r}")
