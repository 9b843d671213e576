"""One operation at one size: both versions, their inputs, and what the work amounts to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Result = Tensor | tuple[Tensor, ...]


class Maker:
    """Random inputs on one device in one dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._dice = torch.Generator(device).manual_seed(seed)

    def numbers(self, *size: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(size, generator=self._dice, device=self.device, dtype=torch.float32)
        return (drawn * scale).to(dtype or self.dtype)

    def integers(self, high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=self._dice, device=self.device)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._dice, device=self.device)


@dataclass(frozen=True, slots=True)
class Case:
    op: str
    size: str
    plain: Callable[..., Result]
    triton: Callable[..., Result]
    make: Callable[[Maker], tuple[Any, ...]]
    """Arguments for either version."""
    bytes_moved: int
    """What must be read and written once."""
    flop: int
    tunings: tuple[Any, ...]
    """Block sizes worth trying, as `tuning` of the Triton version."""
    is_plain_capturable: bool = True
    """Whether the plain version runs without reading on the host, as a CUDA graph needs."""
    gives_fp8: bool = False


def distance(got: Result, expected: Result) -> float:
    """The largest relative distance of two results, tensor by tensor as vectors."""
    pairs = zip(_tensors(got), _tensors(expected), strict=True)
    return max(float((g.double() - e.double()).norm() / e.double().norm().clamp(min=1e-30)) for g, e in pairs)


def _tensors(result: Result) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
