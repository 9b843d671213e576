"""How kernels are launched: with block sizes that were measured, and while the kernel before them ends."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

# ---------------------------------------------------------------------- measured block sizes
# By operation and size; where nothing was measured, a kernel's own rules decide.
#
# A size is what the time depends on. Rows change with every batch, so they count in ranges that grow by four, named by
# their upper end: 1, 2 to 4, 5 to 16, 17 to 64 and so on. Kernels change their ways on these edges too (1, 4 and 16
# rows, 64 and 1024 for adapters). The rest belongs to the model and must be equal: dimensions of matrices and heads,
# dtypes. A measurement answers for its own range and for no other one. The vendor's products, whose time depends on how
# tiles fill the GPU, count rows in finer ranges: four between a power of two and the next.


class TunedSize(NamedTuple):
    op: str
    max_rows: int
    """The upper end of a range of rows."""
    dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


class TuningTable:
    def __init__(self, tunings: Mapping[TunedSize, Any]) -> None:
        self._tunings: dict[tuple[Any, ...], Any] = {(*size,): tuning for size, tuning in tunings.items()}

    def __len__(self) -> int:
        return len(self._tunings)

    def find(self, op: str, num_rows: int, dims: tuple[int, ...], *dtypes: torch.dtype) -> Any | None:
        """The `Tuning` of the kernel `op`, or None where its rules decide."""
        # A bare tuple is equal to a size and made in half the time; this runs at every launch.
        return self._tunings.get((op, rows_range(num_rows), dims, dtypes)) if self._tunings else None

    def find_in(self, op: str, max_rows: int, dims: tuple[int, ...], *dtypes: torch.dtype) -> Any | None:
        """The same for rows of a range that is named by its upper end."""
        return self._tunings.get((op, max_rows, dims, dtypes)) if self._tunings else None


NO_TABLE = TuningTable({})


def rows_range(num_rows: int) -> int:
    """The upper end of the range that a number of rows lies in."""
    return 1 << ((num_rows - 1).bit_length() + 1) // 2 * 2


def fine_rows_range(num_rows: int) -> int:
    """The same for ranges of a quarter of a power of two: ..., 64, 80, 96, 112, 128, 160, ..."""
    step = 1 << max(0, (num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step


LARGE_BLOCKS = 200 * 1024
"""Bytes of shared memory that a program of a data-centre GPU may have, from Hopper on."""


def has_room(device: torch.device) -> bool:
    """Whether programs may hold large blocks; other GPUs have half as much shared memory."""
    return device.type == "cuda" and _shared_bytes(device.index) >= LARGE_BLOCKS


@lru_cache(maxsize=64)
def _shared_bytes(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin


# ---------------------------------------------------------------------- dependent launch
# Kernels that start while the one before them ends (programmatic dependent launch, from Hopper on).
#
# A kernel that takes part calls `wait_for_inputs` before it reads what another such kernel of the step wrote, and
# before it writes anything. Weights may be read earlier, and so may what was there before the step or what a kernel
# that was launched in the usual way left: positions, slots, pages, the state of rows. It is launched with
# `**dependent()`.


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


# ---------------------------------------------------------------------- two chains of kernels at the same time
# With few rows a kernel mostly waits: for the one before it, and for memory. In a captured step two chains share that.
# The memory of the second chain is its own stream's, and is used again behind the next fork at the earliest.


def side_by_side(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    if not (_has_gpu() and torch.cuda.is_current_stream_capturing()):
        return first(), second()
    stream = torch.cuda.current_stream()
    side = _side_stream(stream.device_index)
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        of_second = second()
    of_first = first()
    stream.wait_stream(side)
    return of_first, of_second


@lru_cache(maxsize=64)
def _side_stream(device_index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index, priority=-1)


# ---------------------------------------------------------------------- kernels for Hopper alone
# They are written in Gluon, a young language: a compiler of another version may fail in any way. So each is tried
# before it is used, and where it fails the portable one does the work.


HOPPER = 9
"""Major number of the capability of an H100 or H200."""
CLOSE = 0.01
"""Relative distance of a right result in bfloat16; it is 0.002."""


def fault_of(kernel: Callable[[], Tensor], plain: Callable[[], Tensor]) -> str | None:
    """Why a kernel cannot be used: what it raised, or how far it is from the right result."""
    try:
        expected, got = plain().float(), kernel().float()
        distance = float((got - expected).norm() / expected.norm())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else 'no message'}"
    return None if distance < CLOSE else f"its result is {distance:.2g} from the right one"
