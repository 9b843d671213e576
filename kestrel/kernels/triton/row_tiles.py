"""A row of D numbers held in registers as two tiles, so that few lanes idle.

The first is the largest power of two in D, the second what is left of it: 1152 = 1024 + 128, 4304 = 4096 + 208 of 256.
"""

# pyright: reportOperatorIssue=false
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


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
