"""Attention of prefill chunks over pages as a Triton kernel against the plain version."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, distance  # isort: skip - before any kernel

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from kestrel.kernels.paged_attention import attend_chunks as plain
from kestrel.kernels.triton.paged_attention import ChunksTuning, attend_chunks
from tests.exhaustive import sweep
from tests.kernels.page_orders import Order, head_major, orders

BLOCKS = {"more keys": ChunksTuning(16, 32), "more queries": ChunksTuning(32, 16), "chosen": None}
PICTURE, TEXT = 1, 0
Span: TypeAlias = tuple[int, int, int]
"""Positions before a chunk, its own, and whether they all see each other."""
CASES: dict[str, tuple[int, int, int, int, list[Span]]] = {
    "one query": (1, 1, 64, 16, [(0, 1, TEXT)]),
    "full blocks": (2, 2, 64, 16, [(0, 64, PICTURE), (64, 32, TEXT), (0, 32, TEXT)]),
    "odd sizes, an empty chunk": (3, 3, 40, 7, [(0, 29, PICTURE), (29, 5, TEXT), (3, 0, TEXT), (0, 0, PICTURE)]),
    "a picture after text, text after nothing": (2, 2, 64, 16, [(9, 37, PICTURE), (0, 43, TEXT), (46, 1, TEXT)]),
    "groups of two": (4, 2, 64, 16, [(0, 33, PICTURE), (33, 18, TEXT), (50, 1, TEXT)]),
    "groups of seven, odd head": (7, 1, 72, 4, [(5, 9, TEXT)]),
    # 90 positions leave the same rest as 730: 26 of a block of 64.
    "pictures and prompts": (1, 1, 64, 16, [(0, 90, PICTURE), (90, 20, TEXT), (0, 77, TEXT)]),
    "a prompt": (1, 1, 64, 16, [(90, 20, TEXT)]),
    "no chunks": (2, 2, 64, 16, []),
}
NOT_A_PAGE = 2**40
GAP = 2
"""Queries between chunks that belong to none."""


@dataclass(frozen=True)
class Chunks:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    pages: Tensor
    first: Tensor
    count: Tensor
    start: Tensor
    bidirectional: Tensor
    max_count: int

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        where = self.first, self.count, self.start, self.bidirectional
        return self.q, self.k_cache, self.v_cache, self.pages, *where, self.max_count

    def owned(self) -> list[int]:
        """The queries of all chunks."""
        spans = zip(self.first.tolist(), self.count.tolist(), strict=True)
        return [query for first, count in spans for query in range(first, first + count)]

    def slots(self, chunk: int, num_keys: int) -> Tensor:
        p, page_size = torch.arange(num_keys, device=self.pages.device), self.k_cache.shape[1]
        return self.pages[chunk, p // page_size] * page_size + p % page_size


def chunks(case: str, device: str, dtype: torch.dtype = torch.float32, order: Order = head_major) -> Chunks:
    return chunks_of(*CASES[case], device=device, dtype=dtype, order=order)


def chunks_of(
    heads: int, kv_heads: int, head_dim: int, page_size: int, spans: list[Span],
    device: str, dtype: torch.dtype, order: Order = head_major,
) -> Chunks:  # fmt: skip
    """Pages in disorder, then entries that name no page; slots that no chunk has keys in are full of NaN."""
    draw = Draw(device, dtype)
    width = 2 + max(((start + count) // page_size for start, count, _ in spans), default=0)
    disorder = torch.randperm(len(spans) * width, generator=torch.Generator().manual_seed(1))
    pages = (1 + disorder).view(len(spans), width).to(device)
    cache_size = (1 + pages.numel(), page_size, kv_heads, head_dim)
    first, behind = [], GAP
    for _, count, _ in spans:
        first.append(behind)
        behind += count + GAP
    start, count, bidirectional = (
        torch.tensor([span[i] for span in spans], dtype=torch.int64, device=device) for i in range(3)
    )
    made = Chunks(
        draw(behind, heads, head_dim), draw(*cache_size), draw(*cache_size),
        pages, torch.tensor(first, dtype=torch.int64, device=device), count, start, bidirectional,
        max((span[1] for span in spans), default=0),
    )  # fmt: skip
    foreign = torch.ones(cache_size[0] * page_size, dtype=torch.bool, device=device)
    for chunk, (begin, length, _) in enumerate(spans):
        foreign[made.slots(chunk, begin + length)] = False
        pages[chunk, -(-(begin + length) // page_size) :] = NOT_A_PAGE
    for cache in (made.k_cache, made.v_cache):
        cache.flatten(0, 1)[foreign] = float("nan")
    return replace(made, k_cache=order(made.k_cache), v_cache=order(made.v_cache))


def by_hand(given: Chunks) -> Tensor:
    """A loop over chunks, queries and heads in double precision; the queries of chunks only, chunk after chunk."""
    out = torch.zeros_like(given.q, dtype=torch.float64)
    group = given.q.shape[1] // given.k_cache.shape[2]
    k_slots, v_slots = given.k_cache.double().flatten(0, 1), given.v_cache.double().flatten(0, 1)
    for c, (first, count, start) in enumerate(
        zip(given.first.tolist(), given.count.tolist(), given.start.tolist(), strict=True)
    ):
        for i in range(count):
            slots = given.slots(c, start + count if given.bidirectional[c] else start + i + 1)
            for h in range(given.q.shape[1]):
                k, v = k_slots[slots, h // group], v_slots[slots, h // group]
                out[first + i, h] = (k @ given.q[first + i, h].double() / given.q.shape[2] ** 0.5).softmax(0) @ v
    return out[given.owned()]


@orders
@pytest.mark.parametrize("case", CASES)
def test_the_plain_version_does_what_its_contract_says(case: str, order: Order) -> None:
    given = chunks(case, "cpu", order=order)
    got = plain(*given.arguments())[given.owned()]
    torch.testing.assert_close(got.double(), by_hand(given), rtol=1e-5, atol=1e-5)


# The blocks that are chosen have the sizes of both others in another pairing: a few cases are enough for them.
CHOSEN = ("one query", "odd sizes, an empty chunk", "groups of seven, odd head", "pictures and prompts", "no chunks")
WAYS = [(case, blocks) for case in CASES for blocks in BLOCKS if blocks != "chosen" or case in CHOSEN]
PAIRS = [("odd sizes, an empty chunk", "more keys"), ("groups of two", "more queries")]


@devices
@orders
@sweep(("case", "blocks"), WAYS, always=[way for way in WAYS if way[1] == "chosen" or way in PAIRS])
def test_chunks_attend_to_their_own_keys_and_to_nothing_else(case: str, blocks: str, order: Order, device: str) -> None:
    given = chunks(case, device, order=order)
    got = attend_chunks(*given.arguments(), tuning=BLOCKS[blocks])[given.owned()]
    torch.testing.assert_close(got.double(), by_hand(given), rtol=2e-6, atol=2e-6)


@devices
@sweep("case", ["full blocks", "groups of two", "pictures and prompts", "a prompt"], always=["groups of two"])
def test_half_precision_is_no_further_from_the_truth_than_the_plain_version(case: str, device: str) -> None:
    """In the blocks chosen for it."""
    given = chunks(case, device, HALF[device])
    exact, owned = by_hand(given), given.owned()
    far = distance(attend_chunks(*given.arguments())[owned], exact)
    assert far <= 1.05 * distance(plain(*given.arguments())[owned], exact)


@devices
@pytest.mark.parametrize("case", ["odd sizes, an empty chunk", "groups of two"])
def test_keys_and_values_of_float8_are_read_with_their_scales(case: str, device: str) -> None:
    wide = chunks(case, device)
    k_cache, v_cache = wide.k_cache.to(torch.float8_e4m3fn), wide.v_cache.to(torch.float8_e4m3fn)
    exact = by_hand(replace(wide, k_cache=k_cache.float() * 0.5, v_cache=v_cache.float() * 3.0))
    narrow = replace(wide, k_cache=k_cache, v_cache=v_cache)
    for version in (plain, attend_chunks):
        got = version(*narrow.arguments(), k_scale=0.5, v_scale=3.0)[wide.owned()]
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.parametrize("version", [plain, attend_chunks])
def test_queries_and_results_may_be_columns_of_a_wider_tensor_and_nothing_else_is_written(
    version: Callable[..., Tensor], device: str
) -> None:
    given = chunks("a picture after text, text after nothing", device)
    num_queries, width = given.q.shape[0], 2 * 64
    wide = Draw(device)(num_queries, 3 * width)
    wide[:, :width] = given.q.flatten(1)
    before = wide.clone()
    q, out = wide[:, :width].view(-1, 2, 64), wide[:, width : 2 * width].view(-1, 2, 64)
    assert version(*replace(given, q=q).arguments(), out_THD=out) is out
    owned = torch.zeros(num_queries, dtype=torch.bool, device=device)
    owned[given.owned()] = True
    assert torch.equal(out[owned], version(*given.arguments())[owned])
    before[owned, width : 2 * width] = wide[owned, width : 2 * width]
    assert torch.equal(wide, before)


@devices
def test_what_describes_the_chunks_may_be_narrow(device: str) -> None:
    given = chunks("odd sizes, an empty chunk", device)
    first, count, start = (x.to(torch.int32) for x in (given.first, given.count, given.start))
    described = replace(given, first=first, count=count, start=start, bidirectional=given.bidirectional.bool())
    for version in (plain, attend_chunks):
        got, expected = version(*described.arguments()), version(*given.arguments())
        assert torch.equal(got[given.owned()], expected[given.owned()])


@devices
def test_more_room_than_the_longest_chunk_needs_changes_nothing(device: str) -> None:
    given = chunks("odd sizes, an empty chunk", device)
    roomy = replace(given, max_count=3 * given.max_count)
    for version in (plain, partial(attend_chunks, tuning=ChunksTuning(16, 16))):
        got, expected = version(*roomy.arguments()), version(*given.arguments())
        torch.testing.assert_close(got[given.owned()], expected[given.owned()], rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_a_captured_launch_serves_other_chunks() -> None:
    given = chunks("groups of two", "cuda")
    expected = attend_chunks(*given.arguments())
    held = replace(given, first=given.first * 0, count=given.count * 0, start=given.start * 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend_chunks(*held.arguments())
    for target, source in ((held.first, given.first), (held.count, given.count), (held.start, given.start)):
        target.copy_(source)
    graph.replay()
    assert torch.equal(got[given.owned()], expected[given.owned()])


@pytest.mark.parametrize("max_count", [1, 20, 64, 730, 4096])
def test_blocks_of_full_precision_are_small(max_count: int) -> None:
    assert ChunksTuning.of(max_count, head_dim=64, bytes_per_number=4).block_queries <= 32
