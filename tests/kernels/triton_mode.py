"""Where Triton kernels are tested: on the GPU of this machine, or without one in Triton's interpreter.

Import this before any kernel: the interpreter is chosen when a kernel is defined.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# The default of Triton so far; from 3.9 on it warns that this will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]
devices = pytest.mark.parametrize("device", [pytest.param(d, marks=[pytest.mark.gpu] * (d == "cuda")) for d in DEVICES])

HALF = {"cuda": torch.bfloat16, "cpu": torch.float16}
"""The interpreter multiplies bfloat16 as if it were integers."""


class Draw:
    """Normal random numbers, the same in every run."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        self._device, self._dtype = device, dtype
        self._dice = torch.Generator().manual_seed(0)

    def __call__(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=self._dice) * scale).to(self._device, self._dtype)

    def integers(self, high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=self._dice).to(self._device)


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Of two tensors as vectors."""
    return float((got.double() - exact.double()).norm())
