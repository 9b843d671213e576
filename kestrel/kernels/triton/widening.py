"""float8 numbers as bfloat16, by moving bits.

A GPU has few lanes for conversions to bfloat16, and a kernel that converts every number it reads may wait for them.
The bits of a float8 number, moved to their places in a bfloat16, are that number times 2⁻¹²⁰: two by two that takes
five instructions, which all lanes have.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

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
