"""Adapters on their way to another process: their numbers as one block of bytes, and plain values that say what lies
where. No object of an adapter is pickled.

A large block is a file in memory, made by the thread that loads the adapter. The other process maps it, so that the
step that brings an adapter waits for no copy of it. Small ones, and those beyond MAX_BLOCKS, are sent as bytes.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kestrel.adapters.adapter import SIDES, Adapter, AdapterFormat, AdapterTarget, LowRankPair, ProjInput, Side

MIN_BLOCK_BYTES = 2**20
MAX_BLOCKS = 32
"""Each holds two file descriptors, one of them for its map; the server's connections need some too."""
_ALIGNMENT = 64

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


class MemoryBlock:
    """A file in memory, without a name; it ends with the last process that maps it or holds its handle."""

    _living: ClassVar[weakref.WeakSet[MemoryBlock]] = weakref.WeakSet()

    def __init__(self, num_bytes: int) -> None:
        if hasattr(os, "memfd_create"):
            self.handle = os.memfd_create("kestrel-adapter")
        else:
            with tempfile.TemporaryFile() as file:
                self.handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.handle)
        os.ftruncate(self.handle, num_bytes)
        self._living.add(self)

    @classmethod
    def of(cls, num_bytes: int) -> MemoryBlock | None:
        """None where bytes are better sent: few of them, or too many blocks."""
        if num_bytes < MIN_BLOCK_BYTES or len(cls._living) >= MAX_BLOCKS:
            return None
        try:
            return cls(num_bytes)
        except OSError:  # out of handles
            return None


@dataclass(frozen=True, eq=False)
class SharedAdapter(Adapter):
    """An adapter whose tensors lie in a block."""

    block: MemoryBlock = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor in a block; each begins at the next multiple of 64 bytes."""

    layer: int
    matrix: str
    side: Side
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class SentAdapter:
    """What a runtime needs of an adapter, in plain values."""

    format: AdapterFormat
    rank: int
    alpha: float | None
    proj_input: ProjInput
    layout: tuple[TensorPlace, ...]
    numbers: Bytes | None = None
    """The block itself, unless it has a handle."""
    handle: int | None = None
    """Of the block, in the process that holds this."""

    @classmethod
    def of(cls, adapter: Adapter) -> SentAdapter:
        plain = (adapter.format, adapter.rank, adapter.alpha, adapter.proj_input, _layout(adapter))
        if isinstance(adapter, SharedAdapter):
            return cls(*plain, handle=adapter.block.handle)
        numbers = np.empty(_num_bytes(plain[-1]), dtype=np.uint8)
        _fill(torch.from_numpy(numbers), adapter)
        return cls(*plain, numbers=numbers)

    def adapter(self) -> Adapter:
        """For the side that received it; uses the handle up."""
        if self.handle is not None:
            memory = _mapped(self.handle, _num_bytes(self.layout), mmap.MAP_PRIVATE)
            os.close(self.handle)
        else:
            assert self.numbers is not None
            memory = torch.from_numpy(self.numbers.copy())
        return Adapter(self.format, self.rank, _targets(memory, self.layout), self.alpha, self.proj_input)


def in_shared_memory(adapter: Adapter) -> Adapter:
    """The adapter with its numbers where another process can map them; as it is where that does not pay."""
    layout = _layout(adapter)
    block = MemoryBlock.of(_num_bytes(layout))
    if block is None:
        return adapter
    memory = _mapped(block.handle, _num_bytes(layout), mmap.MAP_SHARED)
    _fill(memory, adapter)
    said = {field.name: getattr(adapter, field.name) for field in fields(Adapter)}
    return SharedAdapter(**{**said, "targets": _targets(memory, layout)}, block=block)


def _layout(adapter: Adapter) -> tuple[TensorPlace, ...]:
    return tuple(
        TensorPlace(layer, matrix, side, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for (layer, matrix), pair in adapter.targets.items()
        for side in SIDES
        for tensor in (getattr(pair, side),)
    )


def _mapped(handle: int, num_bytes: int, flags: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(handle, num_bytes, flags=flags), dtype=torch.uint8)


def _num_bytes(layout: tuple[TensorPlace, ...]) -> int:
    return sum(-(-place.num_bytes // _ALIGNMENT) * _ALIGNMENT for place in layout)


def _tensors(memory: Tensor, layout: tuple[TensorPlace, ...]) -> Iterator[Tensor]:
    """The tensors in a block; nothing is copied."""
    start = 0
    for place in layout:
        yield memory[start : start + place.num_bytes].view(getattr(torch, place.dtype)).view(place.shape)
        start += -(-place.num_bytes // _ALIGNMENT) * _ALIGNMENT


def _fill(memory: Tensor, adapter: Adapter) -> None:
    layout = _layout(adapter)
    for place, tensor in zip(layout, _tensors(memory, layout), strict=True):
        tensor.copy_(getattr(adapter.targets[AdapterTarget(place.layer, place.matrix)], place.side))


def _targets(memory: Tensor, layout: tuple[TensorPlace, ...]) -> Mapping[AdapterTarget, LowRankPair]:
    tensors = list(_tensors(memory, layout))
    return MappingProxyType(
        {
            AdapterTarget(place.layer, place.matrix): LowRankPair(tensors[at], tensors[at + 1])
            for at, place in enumerate(layout)
            if place.side == "a"
        }
    )
