"""Activations inside kernels, of fp32 numbers."""

# pyright: reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu_tanh(x):
    """x / (1 + exp(-2u)), which is x/2 · (1 + tanh u), u = sqrt(2/π) · (x + 0.044715 x³)."""
    # exp(-2u) as a power of two, limited so that it stays finite.
    power = x * (-2.302208198144325 - 0.1029432395800235 * (x * x))
    # An inverse root is one instruction; a quotient of fp32 takes several to hold over its full range.
    root = tl.rsqrt(1.0 + tl.exp2(tl.minimum(power, 115.0)))
    return x * root * root


@triton.jit
def gelu_erf(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def tanh(x):
    """1 - 2 / (1 + exp(2x)), to an absolute error of 1e-7."""
    # Limited, so that the exponential stays finite.
    return 1.0 - 2.0 / (1.0 + tl.exp(tl.minimum(2.0 * x, 80.0)))
