"""One pass of a resizer: a lane per result, its few taps one after another."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit(do_not_specialize=["num_results", "num_in", "num_out", "inner", "taps"])
def _resample(
    image_ptr, first_ptr, weights_ptr, out_ptr, num_results, num_in, num_out, inner, taps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_results
    b, o, a = n % inner, n // inner % num_out, n // inner // num_out
    first = tl.load(first_ptr + o, mask=inside, other=0)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for k in range(taps):
        place = first + k
        value = tl.load(image_ptr + (a * num_in + place) * inner + b, mask=inside & (place < num_in), other=0)
        total += value.to(tl.float64) * tl.load(weights_ptr + o * taps + k, mask=inside, other=0.0)
    limited = tl.minimum(tl.maximum(total + 0.5, 0.0), 255.0)
    tl.store(out_ptr + n, limited.to(tl.int32).to(tl.uint8), mask=inside)


def resample(image_AIB: Tensor, first_O: Tensor, weights_OK: Tensor) -> Tensor:
    """[A, O, B] uint8 of [A, I, B] uint8; `first_O` int64, `weights_OK` float64."""
    outer, num_in, inner = image_AIB.shape
    num_out, taps = weights_OK.shape
    assert image_AIB.dtype == torch.uint8
    assert weights_OK.dtype == torch.float64
    for tensor in (image_AIB, first_O, weights_OK):
        assert tensor.is_contiguous()
    out_AOB = torch.empty(outer, num_out, inner, dtype=torch.uint8, device=image_AIB.device)
    if out_AOB.numel() > 0:
        _resample[(triton.cdiv(out_AOB.numel(), BLOCK),)](
            image_AIB, first_O, weights_OK, out_AOB, out_AOB.numel(), num_in, num_out, inner, taps, BLOCK=BLOCK
        )
    return out_AOB
