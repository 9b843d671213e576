"""Activations inside kernels, of fp32 numbers."""

# pyright: reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu_tanh(x):
    """x / (1 + exp(-2u)), which is x/2 · (1 + tanh u), u = sqrt(2/π) · (x + 0.044715 x³)."""
    # Limited, so that the exponential stays finite.
    minus_2u = -1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(tl.minimum(minus_2u, 80.0)))


@triton.jit
def gelu_erf(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def tanh(x):
    """1 - 2 / (1 + exp(2x)), to an absolute error of 1e-7."""
    # Limited, so that the exponential stays finite.
    return 1.0 - 2.0 / (1.0 + tl.exp(tl.minimum(2.0 * x, 80.0)))
