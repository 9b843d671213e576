"""What several kernels call: activations of fp32 numbers, float8 made wide, rows held in registers."""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass

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
def gated(h, g, GATE: tl.constexpr):
    """`kestrel.kernels.moe_mlp.gate_hidden` of the two halves."""
    if GATE == "silu":
        # Limited, so that the exponential stays finite.
        return h / (1.0 + tl.exp(tl.minimum(-h, 80.0))) * g
    return gelu_erf(h) * (g + 1.0)


@triton.jit
def tanh(x):
    """1 - 2 / (1 + exp(2x)), to an absolute error of 1e-7."""
    # Limited, so that the exponential stays finite.
    return 1.0 - 2.0 / (1.0 + tl.exp(tl.minimum(2.0 * x, 80.0)))


# ---------------------------------------------------------------------- float8 as bfloat16
# By moving bits.
#
# A GPU has few lanes for conversions to bfloat16, and a kernel that converts every number it reads may wait for them.
# The bits of a float8 number, moved to their places in a bfloat16, are that number times 2⁻¹²⁰: two by two that takes
# five instructions, which all lanes have.


# Four float8 numbers of one register to four bfloat16 of two. 0x7B80 is 2¹²⁰; the sum with -0 makes it a product.
_MOVE_BITS = tl.constexpr("""
{
    .reg .b32 moved, sign, factor, nothing;
    mov.b32 factor, 0x7B807B80;
    mov.b32 nothing, 0x80008000;
    prmt.b32 sign, $2, 0, 0x1404;
    shr.b32 moved, sign, 4;
    and.b32 moved, moved, 0x07F007F0;
    lop3.b32 moved, sign, 0x80008000, moved, 0xEA;
    fma.rn.bf16x2 $0, moved, factor, nothing;
    prmt.b32 sign, $2, 0, 0x3424;
    shr.b32 moved, sign, 4;
    and.b32 moved, moved, 0x07F007F0;
    lop3.b32 moved, sign, 0x80008000, moved, 0xEA;
    fma.rn.bf16x2 $1, moved, factor, nothing;
}
""")


@triton.jit
def widened(x, DTYPE: tl.constexpr):
    """x in DTYPE. Exact, but float8's NaN becomes 480: what was quantised has none."""
    if x.dtype == tl.float8e4nv and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(_MOVE_BITS, "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4)
    return x.to(DTYPE)


# ---------------------------------------------------------------------- rows
# A row of D numbers held in registers as two tiles, so that few lanes idle.
#
# The first is the largest power of two in D, the second what is left of it: 1152 = 1024 + 128, 4304 = 4096 + 208 of
# 256.


@dataclass(frozen=True, slots=True)
class RowTiles:
    main: int
    rest: int
    """0: the first tile is the whole row."""
    is_rest_masked: bool

    @classmethod
    def of(cls, dim: int) -> RowTiles:
        main = 1 << (dim.bit_length() - 1)
        rest = triton.next_power_of_2(dim - main) if dim > main else 0
        return cls(main, rest, is_rest_masked=main + rest != dim)


@triton.jit
def load_tile(ptr, offset, cols, dim, MASKED: tl.constexpr):
    """Numbers beyond the row are 0."""
    if MASKED:
        return tl.load(ptr + offset + cols, mask=cols < dim, other=0.0)
    return tl.load(ptr + offset + cols)


@triton.jit
def store_tile(ptr, offset, cols, dim, value, MASKED: tl.constexpr):
    if MASKED:
        tl.store(ptr + offset + cols, value.to(ptr.dtype.element_ty), mask=cols < dim)
    else:
        tl.store(ptr + offset + cols, value.to(ptr.dtype.element_ty))
