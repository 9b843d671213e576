"""float8 numbers as bfloat16 by moving bits, against torch's conversion of every code there is."""

# pyright: reportArgumentType=false
from __future__ import annotations

from tests.kernels.triton_mode import devices  # isort: skip - before any kernel

import pytest
import torch
import triton
import triton.language as tl

from kestrel.kernels.triton.device_functions import widened

ALL_CODES = 256
PACK = 4
"""Numbers that are moved together: each code has to come up in every place."""


@triton.jit
def _widen(x_ptr, out_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out_ptr + at, widened(tl.load(x_ptr + at), out_ptr.dtype.element_ty))


def run(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(widened, as torch converts them) of every finite code."""
    every = torch.arange(ALL_CODES, dtype=torch.uint8, device=device)
    codes = torch.cat([every.roll(place) for place in range(PACK)]).view(torch.float8_e4m3fn)
    got = torch.empty(len(codes), dtype=dtype, device=device)
    _widen[(1,)](codes, got, COUNT=len(codes), num_warps=1)  # so that a lane has several numbers
    is_finite = codes.float().isfinite()
    assert is_finite.sum() == PACK * (ALL_CODES - 2)
    return got[is_finite], codes.to(dtype)[is_finite]


@pytest.mark.gpu
def test_every_finite_number_becomes_itself_in_bfloat16() -> None:
    """Not in the interpreter, which knows no instructions of a GPU."""
    got, expected = run(torch.bfloat16, "cuda")
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))  # the sign of zero, too


@devices
def test_other_numbers_are_converted_as_ever(device: str) -> None:
    got, expected = run(torch.float32, device)
    assert torch.equal(got, expected)
