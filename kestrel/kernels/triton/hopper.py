"""What attention kernels for Hopper GPUs (H100, H200) share, in Gluon, Triton's language for warps and barriers.

Groups of four warps compute, one more warp loads ahead of them. The groups take turns at the tensor cores: while one
multiplies, the others raise to powers.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Names of Triton 3.9, and those of 3.6.
load_async = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_async = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret


@gluon.jit
def new_barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def wait_for_turn(turns, count, GROUP: gl.constexpr):
    """The first group may begin; the others wait to be let in."""
    if GROUP == 0:
        mbarrier.wait(turns.index(GROUP), (count & 1) ^ 1)
    else:
        mbarrier.wait(turns.index(GROUP), count & 1)


@gluon.jit
def pass_turn(turns, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    mbarrier.arrive(turns.index((GROUP + 1) % GROUPS))


@gluon.jit
def weigh(scores, top, weight, score_scale):
    """(probabilities before they are divided by their weight, highest score so far, weight, what earlier sums keep).

    Scores are to the base 2.
    """
    new_top = gl.maximum(top, gl.max(scores, 1) * score_scale)
    p = gl.exp2(scores * score_scale - new_top[:, None])
    kept = gl.exp2(top - new_top)
    return p.to(gl.bfloat16), new_top, weight * kept + gl.sum(p, 1), kept
