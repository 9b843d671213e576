"""Attention of rows with a common beginning, against the one that reads every row's keys for itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kestrel.kernels.paged_attention import attend_joined, attend_padded, attend_shared, join_keys, write_kv
from tests.kernels.page_orders import Order, orders

SLOTS, HEAD_DIM = 400, 16
PAGES = (25, 16)
FP8 = torch.float8_e4m3fn
Attend = Callable[..., Tensor]


def attend_as_joined(
    q_NQHD: Tensor, k_cache: Tensor, v_cache: Tensor, shared_S: Tensor, own_NK: Tensor, seen_NQK: Tensor, *scales: float
) -> Tensor:
    return attend_joined(q_NQHD, k_cache, v_cache, *join_keys(shared_S, own_NK, seen_NQK), *scales)


BOTH = pytest.mark.parametrize("attend", [attend_shared, attend_as_joined])


def drawn(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@BOTH
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    ("rows", "queries", "shared", "own"), [(5, 1, 64, 9), (2, 3, 33, 1), (1, 4, 1, 7), (16, 1, 300, 2)]
)
def test_it_equals_attention_over_all_keys_of_each_row(
    heads: int, kv_heads: int, rows: int, queries: int, shared: int, own: int, attend: Attend
) -> None:
    q_NQHD = drawn(rows, queries, heads, HEAD_DIM, seed=0)
    k_cache, v_cache = drawn(*PAGES, kv_heads, HEAD_DIM, seed=1), drawn(*PAGES, kv_heads, HEAD_DIM, seed=2)
    dice = torch.Generator().manual_seed(3)
    shared_S, own_NK = torch.randperm(SLOTS, generator=dice)[:shared], torch.randint(SLOTS, (rows, own), generator=dice)
    mask_NQK = torch.rand(rows, queries, own, generator=dice) < 0.5
    mask_NQK[0] = False  # a row that sees nothing but what is shared
    found = attend(q_NQHD, k_cache, v_cache, shared_S, own_NK, mask_NQK)
    all_NK = torch.cat((shared_S.expand(rows, -1), own_NK), dim=1)
    all_NQK = torch.cat((torch.ones(rows, queries, shared, dtype=torch.bool), mask_NQK), dim=2)
    torch.testing.assert_close(found, attend_padded(q_NQHD, k_cache, v_cache, all_NK, all_NQK), rtol=1e-5, atol=2e-6)


@BOTH
def test_bfloat16_is_rounded_once_at_the_end(attend: Attend) -> None:
    q_NQHD, own_NK = drawn(4, 1, 2, HEAD_DIM, seed=0).bfloat16() * 4, torch.arange(SLOTS)[-20:].view(4, 5)
    k_cache, v_cache = drawn(*PAGES, 2, HEAD_DIM, seed=1).bfloat16(), drawn(*PAGES, 2, HEAD_DIM, seed=2).bfloat16()
    rest = (torch.arange(100), own_NK, torch.ones(4, 1, 5, dtype=torch.bool))
    found = attend(q_NQHD, k_cache, v_cache, *rest)
    wide = attend(q_NQHD.float(), k_cache.float(), v_cache.float(), *rest)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wide.bfloat16())


@BOTH
@orders
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_narrow_caches_are_written_and_read_with_their_scales(dtype: torch.dtype, order: Order, attend: Attend) -> None:
    k_cache, v_cache = order(torch.zeros(2, *PAGES, 2, HEAD_DIM, dtype=dtype))
    scales = (0.5, 0.25) if dtype == FP8 else (1.0, 1.0)
    every = torch.arange(SLOTS)
    write_kv(k_cache, v_cache, every, drawn(SLOTS, 2, HEAD_DIM, seed=1), drawn(SLOTS, 2, HEAD_DIM, seed=2), *scales)
    q_NQHD, own_NK = drawn(4, 1, 2, HEAD_DIM, seed=0), every[-20:].view(4, 5)
    seen = torch.ones(4, 1, 5, dtype=torch.bool)
    found = attend(q_NQHD, k_cache, v_cache, every[:100], own_NK, seen, *scales)
    all_NK = torch.cat((every[:100].expand(4, -1), own_NK), dim=1)
    expected = attend_padded(q_NQHD, k_cache, v_cache, all_NK, torch.ones(4, 1, 105, dtype=torch.bool), *scales)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
