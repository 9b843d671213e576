"""Attention inside each crop on Hopper GPUs (H100, H200), written in Gluon.

Programs stay on their multiprocessors and take tile after tile: 192 queries of one head of one crop, 64 for each of
three groups of warps. In a turn a group issues the product with the values of one block of keys and the scores of the
next block.

A head of 65 to 80 numbers lies in two tiles, 64 and 16 wide. Loads fill up what lies past the head and past the crop
with zeros, and stores leave it out, so nothing is masked but the scores of keys past the crop. Those keys come first.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kestrel.kernels.triton.hopper import load_async, new_barriers, pass_turn, store_async, wait_for_turn, weigh

MAIN, REST = gl.constexpr(64), gl.constexpr(16)
GROUPS = gl.constexpr(3)
QUERIES = gl.constexpr(64)
"""Of a group."""
KEYS = gl.constexpr(128)
STAGES = gl.constexpr(3)
GROUP_REGISTERS, LOADER_REGISTERS = gl.constexpr(160), gl.constexpr(24)

# Places in the tuples of tiles and of barriers.
Q, Q_REST, K, K_REST, V, V_REST = (gl.constexpr(place) for place in range(6))
Q_ARRIVED, Q_FREE, K_ARRIVED, K_FREE, V_ARRIVED, V_FREE = (gl.constexpr(place) for place in range(6))

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
MAIN_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
REST_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))


@gluon.jit
def _place_of(tile, num_heads, tiles_per_head):
    """(number of the tile in its head, head, crop); neighbours share their keys."""
    return tile % tiles_per_head, tile // tiles_per_head % num_heads, tile // (tiles_per_head * num_heads)


@gluon.jit
def _load(main, rest, crop, first, head, arrived, main_tile, rest_tile):
    """Rows of one head as (64, 16) wide tiles."""
    mbarrier.expect(arrived, main.block_type.nbytes + rest.block_type.nbytes)
    load_async(main, [crop, first, head, 0], arrived, main_tile)
    load_async(rest, [crop, first, head, MAIN], arrived, rest_tile)


@gluon.jit
def _load_tiles(q_main, q_rest, kv_main, kv_rest, tiles, barriers, counts):
    """The group that loads. Queries have two places, used in turn; keys and values go round STAGES of them."""
    q_tiles, q_rests, k_tiles, k_rests, v_tiles, v_rests = tiles
    q_arrived, q_free, k_arrived, k_free, v_arrived, v_free = barriers
    num_tiles, num_heads, tiles_per_head, num_blocks = counts
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        number, head, crop = _place_of(tile, num_heads, tiles_per_head)
        for group in gl.static_range(GROUPS):
            at = (turn & 1) * GROUPS + group
            mbarrier.wait(q_free.index(at), (turn // 2 & 1) ^ 1)
            first = (number * GROUPS + group) * QUERIES
            _load(q_main, q_rest, crop, first, head, q_arrived.index(at), q_tiles.index(at), q_rests.index(at))
        for n in range(num_blocks):
            first = (num_blocks - 1 - n) * KEYS
            block = turn * num_blocks + n
            at = block % STAGES
            free = (block // STAGES & 1) ^ 1
            mbarrier.wait(k_free.index(at), free)
            k_head = num_heads + head
            _load(kv_main, kv_rest, crop, first, k_head, k_arrived.index(at), k_tiles.index(at), k_rests.index(at))
            mbarrier.wait(v_free.index(at), free)
            v_head = 2 * num_heads + head
            _load(kv_main, kv_rest, crop, first, v_head, v_arrived.index(at), v_tiles.index(at), v_rests.index(at))


@gluon.jit
def _begin_scores(q, q_rest, k_tile, k_rest, scores):
    k = k_tile.reshape([KEYS, MAIN]).permute((1, 0))
    scores = warpgroup_mma(q, k, scores, use_acc=False, is_async=True)
    return warpgroup_mma(q_rest, k_rest.reshape([KEYS, REST]).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _begin_sums(p, v_tile, v_rest, sums, rest_sums):
    p_main = gl.convert_layout(p, gl.DotOperandLayout(0, MAIN_SUMS, 2))
    p_rest = gl.convert_layout(p, gl.DotOperandLayout(0, REST_SUMS, 2))
    sums = warpgroup_mma(p_main, v_tile.reshape([KEYS, MAIN]), sums, is_async=True)
    return sums, warpgroup_mma(p_rest, v_rest.reshape([KEYS, REST]), rest_sums, is_async=True)


@gluon.jit
def _first_scores(q, q_rest, tiles, barriers, turns, block, count, GROUP: gl.constexpr):
    at = block % STAGES
    mbarrier.wait(barriers[K_ARRIVED].index(at), block // STAGES & 1)
    wait_for_turn(turns, count, GROUP)
    scores = gl.zeros([QUERIES, KEYS], gl.float32, SCORES)
    scores = _begin_scores(q, q_rest, tiles[K].index(at), tiles[K_REST].index(at), scores)
    pass_turn(turns, GROUP, GROUPS)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(barriers[K_FREE].index(at))
    return scores


@gluon.jit
def _next_scores(q, q_rest, p, scores, sums, rest_sums, tiles, barriers, turns, block, count, GROUP: gl.constexpr):
    """Scores of the next block of keys, and the sums with this one's values."""
    at, next_at = block % STAGES, (block + 1) % STAGES
    mbarrier.wait(barriers[V_ARRIVED].index(at), block // STAGES & 1)
    mbarrier.wait(barriers[K_ARRIVED].index(next_at), (block + 1) // STAGES & 1)
    wait_for_turn(turns, count, GROUP)
    sums, rest_sums = _begin_sums(p, tiles[V].index(at), tiles[V_REST].index(at), sums, rest_sums)
    # Without this wait, scores and probabilities would not fit into the registers together.
    sums, rest_sums = warpgroup_mma_wait(0, deps=[sums, rest_sums])
    scores = _begin_scores(q, q_rest, tiles[K].index(next_at), tiles[K_REST].index(next_at), scores)
    pass_turn(turns, GROUP, GROUPS)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(barriers[V_FREE].index(at))
    mbarrier.arrive(barriers[K_FREE].index(next_at))
    return scores, sums, rest_sums


@gluon.jit
def _last_sums(p, sums, rest_sums, tiles, barriers, turns, block, count, GROUP: gl.constexpr):
    at = block % STAGES
    mbarrier.wait(barriers[V_ARRIVED].index(at), block // STAGES & 1)
    wait_for_turn(turns, count, GROUP)
    sums, rest_sums = _begin_sums(p, tiles[V].index(at), tiles[V_REST].index(at), sums, rest_sums)
    pass_turn(turns, GROUP, GROUPS)
    sums, rest_sums = warpgroup_mma_wait(0, deps=[sums, rest_sums])
    mbarrier.arrive(barriers[V_FREE].index(at))
    return sums, rest_sums


@gluon.jit
def _scaled(sums, rest_sums, factor):
    factor_main = gl.convert_layout(factor, gl.SliceLayout(1, MAIN_SUMS))
    factor_rest = gl.convert_layout(factor, gl.SliceLayout(1, REST_SUMS))
    return sums * factor_main[:, None], rest_sums * factor_rest[:, None]


@gluon.jit
def _attend_tiles(out_main, out_rest, tiles, barriers, turns, counts, num_rows, score_scale, GROUP: gl.constexpr):
    """A group that computes."""
    num_tiles, num_heads, tiles_per_head, num_blocks = counts
    is_key = (num_blocks - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES)) < num_rows
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        block, count = turn * num_blocks, turn * (num_blocks + 1)
        mine = (turn & 1) * GROUPS + GROUP
        q = tiles[Q].index(mine).reshape([QUERIES, MAIN])
        q_rest = tiles[Q_REST].index(mine).reshape([QUERIES, REST])
        mbarrier.wait(barriers[Q_ARRIVED].index(mine), turn // 2 & 1)
        scores = _first_scores(q, q_rest, tiles, barriers, turns, block, count, GROUP)
        if turn > 0:  # what was stored of the tile before has left its place by now
            tma.store_wait(0)
            mbarrier.arrive(barriers[Q_FREE].index(((turn + 1) & 1) * GROUPS + GROUP))
        scores = gl.where(is_key[None, :], scores, float("-inf"))
        top = gl.full([QUERIES], -1.0e30, gl.float32, gl.SliceLayout(1, SCORES))
        weight = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(1, SCORES))
        p, top, weight, kept = weigh(scores, top, weight, score_scale)
        sums = gl.zeros([QUERIES, MAIN], gl.float32, MAIN_SUMS)
        rest_sums = gl.zeros([QUERIES, REST], gl.float32, REST_SUMS)
        for n in range(1, num_blocks):
            scores, sums, rest_sums = _next_scores(
                q, q_rest, p, scores, sums, rest_sums, tiles, barriers, turns, block + n - 1, count + n, GROUP
            )
            p, top, weight, kept = weigh(scores, top, weight, score_scale)
            sums, rest_sums = _scaled(sums, rest_sums, kept)
        sums, rest_sums = _last_sums(
            p, sums, rest_sums, tiles, barriers, turns, block + num_blocks - 1, count + num_blocks, GROUP
        )
        sums, rest_sums = _scaled(sums, rest_sums, 1.0 / weight)
        q.store(sums.to(gl.bfloat16))
        q_rest.store(rest_sums.to(gl.bfloat16))
        fence_async_shared()
        number, head, crop = _place_of(tile, num_heads, tiles_per_head)
        first = (number * GROUPS + GROUP) * QUERIES
        store_async(out_main, [crop, first, head, 0], tiles[Q].index(mine))
        store_async(out_rest, [crop, first, head, MAIN], tiles[Q_REST].index(mine))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles", "num_heads", "tiles_per_head", "num_blocks", "num_rows"])
def _attend_crops(
    q_main, q_rest, kv_main, kv_rest, out_main, out_rest,
    num_tiles, num_heads, tiles_per_head, num_blocks, num_rows, score_scale,
):  # fmt: skip
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * GROUPS, 1, QUERIES, 1, MAIN], q_main.layout)
    q_rests = gl.allocate_shared_memory(gl.bfloat16, [2 * GROUPS, 1, QUERIES, 1, REST], q_rest.layout)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, 1, MAIN], kv_main.layout)
    k_rests = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, 1, REST], kv_rest.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, 1, MAIN], kv_main.layout)
    v_rests = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEYS, 1, REST], kv_rest.layout)
    q_arrived, q_free = new_barriers(2 * GROUPS, 1), new_barriers(2 * GROUPS, 1)
    k_arrived, k_free = new_barriers(STAGES, 1), new_barriers(STAGES, GROUPS)
    v_arrived, v_free = new_barriers(STAGES, 1), new_barriers(STAGES, GROUPS)
    turns = new_barriers(GROUPS, 1)
    fence_async_shared()
    tiles = (q_tiles, q_rests, k_tiles, k_rests, v_tiles, v_rests)
    barriers = (q_arrived, q_free, k_arrived, k_free, v_arrived, v_free)
    counts = (num_tiles, num_heads, tiles_per_head, num_blocks)
    gl.warp_specialize(
        [
            (_attend_tiles, (out_main, out_rest, tiles, barriers, turns, counts, num_rows, score_scale, 0)),
            (_attend_tiles, (out_main, out_rest, tiles, barriers, turns, counts, num_rows, score_scale, 1)),
            (_attend_tiles, (out_main, out_rest, tiles, barriers, turns, counts, num_rows, score_scale, 2)),
            (_load_tiles, (q_main, q_rest, kv_main, kv_rest, tiles, barriers, counts)),
        ],
        [4, 4, 1],
        [GROUP_REGISTERS, GROUP_REGISTERS, LOADER_REGISTERS],
    )


def fits(qkv_NPC: Tensor, n_heads: int) -> bool:
    """Whether the kernel takes these: heads that two tiles hold and that begin at addresses a load can start from."""
    head_dim = qkv_NPC.shape[2] // (3 * n_heads)
    return qkv_NPC.dtype == torch.bfloat16 and MAIN.value < head_dim <= MAIN.value + REST.value and head_dim % 8 == 0


def attend_crops(qkv_NPC: Tensor, n_heads: int) -> Tensor:
    """[N, P, D], heads side by side, ready for the output projection."""
    num_crops, num_rows, width = qkv_NPC.shape
    head_dim = width // (3 * n_heads)
    assert fits(qkv_NPC, n_heads)
    assert qkv_NPC.is_contiguous()
    out_NPHE = torch.empty(num_crops, num_rows, n_heads, head_dim, dtype=qkv_NPC.dtype, device=qkv_NPC.device)
    if out_NPHE.numel() == 0:
        return out_NPHE.flatten(2)
    heads_NPHE = qkv_NPC.view(num_crops, num_rows, 3 * n_heads, head_dim)
    tiles_per_head = triton.cdiv(num_rows, GROUPS.value * QUERIES.value)
    num_tiles = num_crops * n_heads * tiles_per_head
    num_programs = min(num_tiles, torch.cuda.get_device_properties(qkv_NPC.device).multi_processor_count)
    _attend_crops[(num_programs,)](
        *_tiles_of(heads_NPHE, QUERIES.value), *_tiles_of(heads_NPHE, KEYS.value), *_tiles_of(out_NPHE, QUERIES.value),
        num_tiles, n_heads, tiles_per_head, triton.cdiv(num_rows, KEYS.value), num_rows,
        math.log2(math.e) / math.sqrt(head_dim), num_warps=4, maxnreg=128,
    )  # fmt: skip
    return out_NPHE.flatten(2)


def _tiles_of(x_NPHE: Tensor, num_rows: int) -> list[TensorDescriptor]:
    """So many rows of one head, 64 and 16 wide."""
    layouts = ((MAIN.value, gl.NVMMASharedLayout(128, 16, rank=4)), (REST.value, gl.NVMMASharedLayout(32, 16, rank=4)))
    return [TensorDescriptor.from_tensor(x_NPHE, [1, num_rows, 1, width], layout) for width, layout in layouts]
