"""Kernels that start while the one before them ends (programmatic dependent launch, from Hopper on).

A kernel that takes part calls `wait_for_inputs` before it reads what another kernel wrote, and before it writes
anything; weights may be read earlier. It is launched with `**dependent()`.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

FIRST_CAPABILITY = 9


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def dependent() -> dict[str, Any]:
    """Launch options; without effect on older GPUs and in the interpreter."""
    if _has_gpu() and _is_supported(torch.cuda.current_device()):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@lru_cache(maxsize=1)
def _has_gpu() -> bool:
    return isinstance(wait_for_inputs, JITFunction) and torch.cuda.is_available()


@lru_cache(maxsize=64)
def _is_supported(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index)[0] >= FIRST_CAPABILITY
