"""Attention of chunks of queries over pages on Hopper GPUs (H100, H200), written in Gluon.

The contract is that of `attend_chunks`. Programs stay on their multiprocessors and take tile after tile, those with the
most keys first. A tile has 64 queries for each of two or three groups of warps: the same positions of two heads that
share keys, or further positions of one head. One more warp loads page by page. In a turn a group issues the product
with the values of one block of keys and the scores of the next block.

The last keys come first: only their scores need a mask. Pages past the last key are read as zeros, and so are the rest
of the values behind it: zero times what another request left there need not be zero.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kestrel.kernels.triton.hopper import load_async, new_barriers, pass_turn, reinterpret, wait_for_turn, weigh

QUERIES = gl.constexpr(64)
"""Of a group."""
KEYS = gl.constexpr(128)
BOX, WIDTH = gl.constexpr(16), gl.constexpr(64)
"""Keys, and numbers of their head, that one load brings: 128 bytes are the rows that shared memory is laid out in."""
BOXES = gl.constexpr(KEYS.value // BOX.value)
NO_PAGE = gl.constexpr(-1)

# Places in the tuple of barriers.
Q_ARRIVED, Q_FREE, K_ARRIVED, K_FREE, V_ARRIVED, V_FREE, LAST_ARRIVED, TURNS = (gl.constexpr(n) for n in range(8))
# Places in the tuple of what describes the chunks.
PAGES, FIRST, COUNT, START, SEES_ALL, PAGES_STRIDE, NUM_CHUNKS, NUM_HEADS, TILES_PER_HEAD = (
    gl.constexpr(n) for n in range(9)
)

ROWS = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def _size(chunks, level, HEADS: gl.constexpr, STEP: gl.constexpr):
    """Tiles of a level: none where its chunk has no such queries."""
    count = gl.load(chunks[COUNT] + level % chunks[NUM_CHUNKS]).to(gl.int32)
    return gl.where(_first_query(chunks, level, STEP) < count, chunks[NUM_HEADS] // HEADS, 0)


@gluon.jit
def _first_query(chunks, level, STEP: gl.constexpr):
    """The last queries have the most keys and come first, so that no long tile is left for the end."""
    return (chunks[TILES_PER_HEAD] - 1 - level // chunks[NUM_CHUNKS]) * STEP


@gluon.jit
def _next_tile(chunks, turn, level, before, GROUPS: gl.constexpr, SAME_QUERIES: gl.constexpr):
    """(level, tiles before it, number of the tile) of this program's next tile. A level is one block of queries of one
    chunk, with a tile for each head; past the last level there is nothing left to do.

    Programs take tiles forwards in one turn and backwards in the next, so that none has the longest of every turn. Only
    tiles that exist are counted: a captured step has many chunks without queries.
    """
    HEADS: gl.constexpr = GROUPS if SAME_QUERIES else 1
    STEP: gl.constexpr = QUERIES if SAME_QUERIES else QUERIES * GROUPS
    place = gl.program_id(0)
    place = gl.where(turn % 2 == 0, place, gl.num_programs(0) - 1 - place)
    number = turn * gl.num_programs(0) + place
    size = _size(chunks, level, HEADS, STEP)
    while (before + size <= number) & (level < chunks[NUM_CHUNKS] * chunks[TILES_PER_HEAD]):
        before += size
        level += 1
        size = _size(chunks, level, HEADS, STEP)
    return level, before, number


@gluon.jit
def _tile(chunks, level, number, GROUPS: gl.constexpr, SAME_QUERIES: gl.constexpr):
    """(chunk, first head, first query, blocks of keys) of a tile by its number in its level."""
    STEP: gl.constexpr = QUERIES if SAME_QUERIES else QUERIES * GROUPS
    chunk = level % chunks[NUM_CHUNKS]
    head = number * GROUPS if SAME_QUERIES else number
    first_query = _first_query(chunks, level, STEP)
    count = gl.load(chunks[COUNT] + chunk).to(gl.int32)
    start = gl.load(chunks[START] + chunk).to(gl.int32)
    sees_all = gl.load(chunks[SEES_ALL] + chunk) != 0
    last = gl.where(sees_all, count, gl.minimum(first_query + STEP, count))
    return chunk, head, first_query, gl.cdiv(start + last, KEYS)


# ---------------------------------------------------------------------- the warp that loads


@gluon.jit
def _load_block(cache, tiles, pages, first, stage, arrived, kv_head, HALVES: gl.constexpr, PAGE_SIZE: gl.constexpr):
    mbarrier.expect(arrived, KEYS * HALVES * WIDTH * 2)
    boxes = reinterpret(tiles.index(stage), gl.bfloat16, [HALVES * BOXES, 1, 1, BOX, WIDTH], cache.layout)
    for half in gl.static_range(HALVES):
        for i in gl.static_range(BOXES):
            where = [pages[i], kv_head, (first + i * BOX) % PAGE_SIZE, half * WIDTH]
            load_async(cache, where, arrived, boxes.index(half * BOXES + i))


@gluon.jit
def _clear_rest(tiles, stage, last, HALVES: gl.constexpr):
    """Zeros behind the last key in its box; `last` is its place in the block."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    is_key = gl.arange(0, BOX, gl.SliceLayout(1, LAYOUT)) <= last % BOX
    boxes = reinterpret(tiles.index(stage), gl.bfloat16, [HALVES * BOXES, BOX, WIDTH], ROWS)
    for half in gl.static_range(HALVES):
        box = boxes.index(half * BOXES + last // BOX)
        box.store(gl.where(is_key[:, None], box.load(LAYOUT), 0.0))


@gluon.jit
def _load_tiles(
    inputs, tiles, barriers, chunks,
    GROUP_SIZE: gl.constexpr, GROUPS: gl.constexpr, SAME_QUERIES: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Queries have two places, used in turn; keys and values go round STAGES of them."""
    q, k, v = inputs
    q_tiles, k_tiles, v_tiles = tiles
    turn, block, num_cleared = 0, 0, 0
    zero = gl.to_tensor(0)
    level, before, number = _next_tile(chunks, zero, zero, zero, GROUPS, SAME_QUERIES)
    while level < chunks[NUM_CHUNKS] * chunks[TILES_PER_HEAD]:
        chunk, head, first_query, num_blocks = _tile(chunks, level, number - before, GROUPS, SAME_QUERIES)
        first_row = gl.load(chunks[FIRST] + chunk).to(gl.int32) + first_query
        for group in gl.static_range(GROUPS):
            at = (turn & 1) * GROUPS + group
            mbarrier.wait(barriers[Q_FREE].index(at), (turn // 2 & 1) ^ 1)
            arrived = barriers[Q_ARRIVED].index(at)
            mbarrier.expect(arrived, QUERIES * HALVES * WIDTH * 2)
            row = first_row if SAME_QUERIES else first_row + group * QUERIES
            q_head = head + group if SAME_QUERIES else head
            boxes = reinterpret(q_tiles.index(at), gl.bfloat16, [HALVES, QUERIES, 1, WIDTH], q.layout)
            for half in gl.static_range(HALVES):
                load_async(q, [row, q_head, half * WIDTH], arrived, boxes.index(half))
        num_keys = (gl.load(chunks[START] + chunk) + gl.load(chunks[COUNT] + chunk)).to(gl.int32)
        kv_head = head // GROUP_SIZE
        table = chunks[PAGES] + chunk.to(gl.int64) * chunks[PAGES_STRIDE]
        for n in range(num_blocks):
            first = (num_blocks - 1 - n) * KEYS
            pages = ()
            for i in gl.static_range(BOXES):  # past the last key: a page that does not exist is read as zeros
                key = first + i * BOX
                page = gl.load(table + key // PAGE_SIZE, mask=key < num_keys, other=NO_PAGE)
                pages = pages + (page.to(gl.int32),)  # noqa: RUF005 - what the language has
            stage, is_free = (block + n) % STAGES, ((block + n) // STAGES & 1) ^ 1
            arrived = barriers[K_ARRIVED].index(stage)
            mbarrier.wait(barriers[K_FREE].index(stage), is_free)
            _load_block(k, k_tiles, pages, first, stage, arrived, kv_head, HALVES, PAGE_SIZE)
            arrived = barriers[V_ARRIVED].index(stage)
            mbarrier.wait(barriers[V_FREE].index(stage), is_free)
            if (num_keys < first + KEYS) & (num_keys % BOX != 0):
                last = barriers[LAST_ARRIVED].index(0)
                _load_block(v, v_tiles, pages, first, stage, last, kv_head, HALVES, PAGE_SIZE)
                mbarrier.wait(last, num_cleared & 1)
                _clear_rest(v_tiles, stage, num_keys - 1 - first, HALVES)
                fence_async_shared()
                mbarrier.arrive(arrived)
                num_cleared += 1
            else:
                _load_block(v, v_tiles, pages, first, stage, arrived, kv_head, HALVES, PAGE_SIZE)
        turn += 1
        block += num_blocks
        level, before, number = _next_tile(chunks, turn, level, before, GROUPS, SAME_QUERIES)


# ---------------------------------------------------------------------- a group that computes


@gluon.jit
def _begin_scores(q, scores, k_tiles, stage):
    return warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _begin_sums(p, sums, v_tiles, stage):
    p = gl.convert_layout(p, gl.DotOperandLayout(0, sums.type.layout, 2))
    return warpgroup_mma(p, v_tiles.index(stage), sums, is_async=True)


@gluon.jit
def _masked(scores, first_key, seen):
    keys = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    return gl.where(keys[None, :] < seen[:, None], scores, float("-inf"))


@gluon.jit
def _scaled(sums, factor):
    return sums * gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
def _pass_blocks(barriers, block, count, num_passed, GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Blocks that lie behind all queries of a group: it only takes its turns, so that the others can go on."""
    for n in range(num_passed):
        stage, phase = (block + n) % STAGES, (block + n) // STAGES & 1
        mbarrier.wait(barriers[K_ARRIVED].index(stage), phase)
        wait_for_turn(barriers[TURNS], count + n, GROUP)
        pass_turn(barriers[TURNS], GROUP, GROUPS)
        mbarrier.arrive(barriers[K_FREE].index(stage))
        mbarrier.wait(barriers[V_ARRIVED].index(stage), phase)
        mbarrier.arrive(barriers[V_FREE].index(stage))


@gluon.jit
def _attend(
    q, tiles, barriers, block, count, num_blocks, least_seen, seen, score_scale,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Sums of values and their weight, of one tile."""
    _, k_tiles, v_tiles = tiles
    turns = barriers[TURNS]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALVES * WIDTH, 16])
    stage = block % STAGES
    mbarrier.wait(barriers[K_ARRIVED].index(stage), block // STAGES & 1)
    wait_for_turn(turns, count, GROUP)
    scores = gl.zeros([QUERIES, KEYS], gl.float32, SCORES)
    scores = _begin_scores(q, scores, k_tiles, stage)
    pass_turn(turns, GROUP, GROUPS)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(barriers[K_FREE].index(stage))
    top = gl.full([QUERIES], -1.0e30, gl.float32, gl.SliceLayout(1, SCORES))
    weight = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(1, SCORES))
    p, top, weight, _ = weigh(_masked(scores, (num_blocks - 1) * KEYS, seen), top, weight, score_scale)
    sums = gl.zeros([QUERIES, HALVES * WIDTH], gl.float32, SUMS)
    for n in range(1, num_blocks):
        before, stage = (block + n - 1) % STAGES, (block + n) % STAGES
        mbarrier.wait(barriers[K_ARRIVED].index(stage), (block + n) // STAGES & 1)
        mbarrier.wait(barriers[V_ARRIVED].index(before), (block + n - 1) // STAGES & 1)
        wait_for_turn(turns, count + n, GROUP)
        if OVERLAP:
            scores = _begin_scores(q, scores, k_tiles, stage)
            sums = _begin_sums(p, sums, v_tiles, before)
            pass_turn(turns, GROUP, GROUPS)
            scores = warpgroup_mma_wait(1, deps=[scores])
        else:
            sums = _begin_sums(p, sums, v_tiles, before)
            # Without this wait, scores and probabilities would not fit into the registers together.
            sums = warpgroup_mma_wait(0, deps=[sums])
            scores = _begin_scores(q, scores, k_tiles, stage)
            pass_turn(turns, GROUP, GROUPS)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(barriers[V_FREE].index(before))
        mbarrier.arrive(barriers[K_FREE].index(stage))
        first_key = (num_blocks - 1 - n) * KEYS
        if first_key + KEYS > least_seen:
            scores = _masked(scores, first_key, seen)
        p, top, weight, kept = weigh(scores, top, weight, score_scale)
        if OVERLAP:
            # They did long ago; but nothing moves past this, and the assembler would put the next wait before powers.
            mbarrier.wait(barriers[V_ARRIVED].index(before), (block + n - 1) // STAGES & 1)
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(barriers[V_FREE].index(before))
        sums = _scaled(sums, kept)
    stage = (block + num_blocks - 1) % STAGES
    mbarrier.wait(barriers[V_ARRIVED].index(stage), (block + num_blocks - 1) // STAGES & 1)
    wait_for_turn(turns, count + num_blocks, GROUP)
    sums = _begin_sums(p, sums, v_tiles, stage)
    pass_turn(turns, GROUP, GROUPS)
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(barriers[V_FREE].index(stage))
    return sums, weight


@gluon.jit
def _attend_tiles(
    out, tiles, barriers, chunks,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, SAME_QUERIES: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    out_ptr, out_stride, score_scale, v_scale = out
    turn, block = 0, 0
    zero = gl.to_tensor(0)
    level, before, number = _next_tile(chunks, zero, zero, zero, GROUPS, SAME_QUERIES)
    while level < chunks[NUM_CHUNKS] * chunks[TILES_PER_HEAD]:
        chunk, head, first_query, num_blocks = _tile(chunks, level, number - before, GROUPS, SAME_QUERIES)
        if SAME_QUERIES:
            head += GROUP
        else:
            first_query += GROUP * QUERIES
        num_queries = gl.load(chunks[COUNT] + chunk).to(gl.int32)
        start = gl.load(chunks[START] + chunk).to(gl.int32)
        num_keys = start + num_queries
        least_seen = gl.where(gl.load(chunks[SEES_ALL] + chunk) != 0, num_keys, start + first_query + 1)
        seen = gl.minimum(least_seen + gl.arange(0, QUERIES, gl.SliceLayout(1, SCORES)), num_keys)
        at = (turn & 1) * GROUPS + GROUP
        mbarrier.wait(barriers[Q_ARRIVED].index(at), turn // 2 & 1)
        own_blocks = gl.cdiv(gl.minimum(least_seen + QUERIES - 1, num_keys), KEYS)
        passed = num_blocks - own_blocks
        # A tile has a turn for each of its blocks, and one more.
        _pass_blocks(barriers, block, block + turn, passed, GROUP, GROUPS, STAGES)
        sums, weight = _attend(
            tiles[0].index(at), tiles, barriers,
            block + passed, block + turn + passed, own_blocks, least_seen, seen, score_scale,
            GROUP, GROUPS, STAGES, HALVES, OVERLAP,
        )  # fmt: skip
        mbarrier.arrive(barriers[Q_FREE].index(at))
        sums = _scaled(sums, v_scale / weight)
        queries = first_query + gl.arange(0, QUERIES, gl.SliceLayout(1, sums.type.layout))
        columns = head * HALVES * WIDTH + gl.arange(0, HALVES * WIDTH, gl.SliceLayout(0, sums.type.layout))
        place = (gl.load(chunks[FIRST] + chunk).to(gl.int64) + queries)[:, None] * out_stride + columns[None, :]
        gl.store(out_ptr + place, sums.to(gl.bfloat16), mask=(queries < num_queries)[:, None])
        turn += 1
        block += num_blocks
        level, before, number = _next_tile(chunks, turn, level, before, GROUPS, SAME_QUERIES)


@gluon.jit(
    do_not_specialize=["num_chunks", "tiles_per_head", "pages_stride"],
    do_not_specialize_on_alignment=["pages_ptr", "first_ptr", "count_ptr", "start_ptr", "sees_all_ptr"],
)
def _attend_chunks(
    q, k, v, out_ptr, pages_ptr, first_ptr, count_ptr, start_ptr, sees_all_ptr,
    pages_stride, num_chunks, num_heads, tiles_per_head, out_stride, score_scale, v_scale,
    GROUP_SIZE: gl.constexpr, GROUPS: gl.constexpr, SAME_QUERIES: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, PAGE_SIZE: gl.constexpr, OVERLAP: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * GROUPS, QUERIES, HALVES * WIDTH], ROWS)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, HALVES * WIDTH], ROWS)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, HALVES * WIDTH], ROWS)
    barriers = (
        new_barriers(2 * GROUPS, 1), new_barriers(2 * GROUPS, 1),
        new_barriers(STAGES, 1), new_barriers(STAGES, GROUPS),
        new_barriers(STAGES, 1), new_barriers(STAGES, GROUPS),
        new_barriers(1, 1), new_barriers(GROUPS, 1),
    )  # fmt: skip
    fence_async_shared()
    tiles = (q_tiles, k_tiles, v_tiles)
    chunks = (
        pages_ptr, first_ptr, count_ptr, start_ptr, sees_all_ptr, pages_stride, num_chunks, num_heads, tiles_per_head
    )  # fmt: skip
    inputs, out = (q, k, v), (out_ptr, out_stride, score_scale, v_scale)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend_tiles, (out, tiles, barriers, chunks, 0, GROUPS, SAME_QUERIES, STAGES, HALVES, OVERLAP)),
                (_attend_tiles, (out, tiles, barriers, chunks, 1, GROUPS, SAME_QUERIES, STAGES, HALVES, OVERLAP)),
                (
                    _load_tiles,
                    (inputs, tiles, barriers, chunks, GROUP_SIZE, GROUPS, SAME_QUERIES, STAGES, HALVES, PAGE_SIZE),
                ),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_tiles, (out, tiles, barriers, chunks, 0, GROUPS, SAME_QUERIES, STAGES, HALVES, OVERLAP)),
                (_attend_tiles, (out, tiles, barriers, chunks, 1, GROUPS, SAME_QUERIES, STAGES, HALVES, OVERLAP)),
                (_attend_tiles, (out, tiles, barriers, chunks, 2, GROUPS, SAME_QUERIES, STAGES, HALVES, OVERLAP)),
                (
                    _load_tiles,
                    (inputs, tiles, barriers, chunks, GROUP_SIZE, GROUPS, SAME_QUERIES, STAGES, HALVES, PAGE_SIZE),
                ),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )


@dataclass(frozen=True, slots=True)
class HopperTuning:
    """How tiles are computed."""

    groups: int
    same_queries: bool
    """Of heads that share keys; otherwise groups have one head and queries that follow each other."""
    stages: int
    overlaps: bool
    """Whether a group raises to powers while its own product with values still runs."""

    @classmethod
    def of(cls, head_dim: int, group_size: int) -> HopperTuning:
        if head_dim == 2 * WIDTH.value:
            return cls(2, group_size % 2 == 0, stages=2, overlaps=True)
        return cls(3, group_size % 3 == 0, stages=4, overlaps=False)


REGISTERS = {2: (232, 40, 168), 3: (152, 56, 128)}
"""By number of groups: of a computing thread, of the loading warp, and on average over all threads."""


def attend_chunks(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages_CP: Tensor,
    first_C: Tensor,
    count_C: Tensor,
    start_C: Tensor,
    bidirectional_C: Tensor,
    max_count: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out_THD: Tensor | None = None,
    tuning: HopperTuning | None = None,
) -> Tensor:
    """Heads of 64 or 128 numbers in bfloat16; pages of whole boxes."""
    _, num_heads, head_dim = q_THD.shape
    (_, page_size, num_kv_heads, _), num_chunks = k_cache.shape, pages_CP.shape[0]
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format) if out_THD is None else out_THD
    assert out_THD.stride()[1:] == q_THD.stride()[1:] == (head_dim, 1)
    assert pages_CP.stride(1) == 1
    chosen = tuning or HopperTuning.of(head_dim, num_heads // num_kv_heads)
    queries = QUERIES.value * (1 if chosen.same_queries else chosen.groups)
    tiles_per_head = triton.cdiv(max_count, queries)
    num_tiles = tiles_per_head * num_chunks * (num_heads // chosen.groups if chosen.same_queries else num_heads)
    num_programs = min(num_tiles, torch.cuda.get_device_properties(q_THD.device).multi_processor_count)
    registers, loader_registers, average = REGISTERS[chosen.groups]
    _attend_chunks[(num_programs,)](
        _rows_of(q_THD, [QUERIES.value, 1, WIDTH.value]),
        # Pages, heads, positions, numbers: as they lie on a GPU, though loads work by strides.
        *(_rows_of(cache.transpose(1, 2), [1, 1, BOX.value, WIDTH.value]) for cache in (k_cache, v_cache)),
        out_THD, pages_CP, first_C, count_C, start_C, bidirectional_C,
        pages_CP.stride(0), num_chunks, num_heads, tiles_per_head, out_THD.stride(0),
        k_scale * math.log2(math.e) / math.sqrt(head_dim), v_scale,
        GROUP_SIZE=num_heads // num_kv_heads, GROUPS=chosen.groups, SAME_QUERIES=chosen.same_queries,
        STAGES=chosen.stages, HALVES=head_dim // WIDTH.value, PAGE_SIZE=page_size,
        OVERLAP=chosen.overlaps, REGISTERS=registers, LOADER_REGISTERS=loader_registers,
        num_warps=4, maxnreg=average,
    )  # fmt: skip
    return out_THD


def _rows_of(x: Tensor, box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, x.shape, x.stride(), box, gl.NVMMASharedLayout(128, 16, rank=len(box)))
