"""Decode attention over pages as Triton kernels against the plain version."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, distance  # isort: skip - before any kernel

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kestrel.kernels.paged_attention import attend_rows as plain
from kestrel.kernels.triton.paged_attention import RowsTuning, attend_rows
from tests.exhaustive import sweep
from tests.kernels.page_orders import Order, head_major, orders

SPLITS = {"one split": RowsTuning(target_programs=1), "many splits": RowsTuning(block_keys=16, min_keys_per_split=16)}
CASES = {
    "one head, one key": (1, 1, 64, 16, [1]),
    "full pages": (4, 4, 64, 16, [32, 64]),
    "odd sizes, an empty row": (3, 3, 40, 7, [5, 0, 50, 49]),
    "groups of two": (4, 2, 64, 16, [33, 0, 17]),
    "groups of seven, odd head": (7, 1, 72, 4, [41]),
    "no rows": (2, 2, 64, 16, []),
}


@dataclass(frozen=True)
class Rows:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    pages: Tensor
    num_keys: Tensor

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k_cache, self.v_cache, self.pages, self.num_keys


def rows(case: str, device: str, dtype: torch.dtype = torch.float32, order: Order = head_major) -> Rows:
    """Pages in disorder; a page that nobody reads is full of NaN, and so is the end of a row's last page."""
    heads, kv_heads, head_dim, page_size, num_keys = CASES[case]
    draw = Draw(device, dtype)
    width = 1 + max((-(-n // page_size) for n in num_keys), default=1)
    disorder = torch.randperm(len(num_keys) * width, generator=torch.Generator().manual_seed(1))
    pages = (1 + disorder).view(len(num_keys), width)
    used = torch.zeros((1 + len(num_keys) * width) * page_size, dtype=torch.bool)
    for row, count in enumerate(num_keys):
        used[[int(pages[row, p // page_size]) * page_size + p % page_size for p in range(count)]] = True
    k_cache, v_cache = (draw(len(used), kv_heads, head_dim) for _ in range(2))
    k_cache[~used.to(device)] = float("nan")
    v_cache[~used.to(device)] = float("nan")
    k_cache, v_cache = (order(cache.unflatten(0, (-1, page_size))) for cache in (k_cache, v_cache))
    keys = torch.tensor(num_keys, dtype=torch.int64, device=device)
    return Rows(draw(len(num_keys), heads, head_dim), k_cache, v_cache, pages.to(device), keys)


def by_hand(given: Rows) -> Tensor:
    """A loop over rows and heads in double precision."""
    out = torch.zeros_like(given.q, dtype=torch.float64)
    _, page_size, kv_heads, _ = given.k_cache.shape
    k_slots, v_slots = given.k_cache.double().flatten(0, 1), given.v_cache.double().flatten(0, 1)
    for b, count in enumerate(given.num_keys.tolist()):
        places = torch.arange(count, device=given.q.device)
        slots = given.pages[b, places // page_size] * page_size + places % page_size
        for h in range(given.q.shape[1]):
            kv_head = h * kv_heads // given.q.shape[1]
            k, v = k_slots[slots, kv_head], v_slots[slots, kv_head]
            out[b, h] = (k @ given.q[b, h].double() / given.q.shape[2] ** 0.5).softmax(0) @ v
    return out


@orders
@pytest.mark.parametrize("case", CASES)
def test_the_plain_version_does_what_its_contract_says(case: str, order: Order) -> None:
    given = rows(case, "cpu", order=order)
    given.k_cache.nan_to_num_(), given.v_cache.nan_to_num_()
    torch.testing.assert_close(plain(*given.arguments()).double(), by_hand(given), rtol=1e-5, atol=1e-5)


@devices
@orders
@sweep("tuning", SPLITS, always=["many splits"])
@sweep("case", CASES, always=["odd sizes, an empty row", "groups of two", "groups of seven, odd head", "no rows"])
def test_rows_attend_to_their_own_keys_and_to_nothing_else(case: str, tuning: str, order: Order, device: str) -> None:
    given = rows(case, device, order=order)
    got = attend_rows(*given.arguments(), tuning=SPLITS[tuning])
    torch.testing.assert_close(got.double(), by_hand(given), rtol=2e-6, atol=2e-6)


@devices
@pytest.mark.parametrize("case", ["full pages", "groups of two"])
def test_half_precision_is_no_further_from_the_truth_than_the_plain_version(case: str, device: str) -> None:
    given = rows(case, device, HALF[device])
    given.k_cache.nan_to_num_(), given.v_cache.nan_to_num_()
    exact = by_hand(given)
    assert distance(attend_rows(*given.arguments()), exact) <= 1.05 * distance(plain(*given.arguments()), exact)


@devices
@pytest.mark.parametrize("case", ["odd sizes, an empty row", "groups of two"])
def test_keys_and_values_of_float8_are_read_with_their_scales(case: str, device: str) -> None:
    wide = rows(case, device)
    k_cache, v_cache = wide.k_cache.to(torch.float8_e4m3fn), wide.v_cache.to(torch.float8_e4m3fn)
    narrow = replace(wide, k_cache=k_cache, v_cache=v_cache)
    same = replace(wide, k_cache=k_cache.float() * 0.5, v_cache=v_cache.float() * 3.0)
    got = attend_rows(*narrow.arguments(), k_scale=0.5, v_scale=3.0)
    torch.testing.assert_close(got.double(), by_hand(same), rtol=1e-5, atol=1e-5)


@devices
def test_queries_and_results_may_be_columns_of_a_wider_tensor(device: str) -> None:
    given = rows("full pages", device)
    wide = Draw(device)(2, 3 * 4 * 64)
    wide[:, : 4 * 64] = given.q.flatten(1)
    expected = attend_rows(*given.arguments())
    untouched = wide[:, 8 * 64 :].clone()
    q, out = wide[:, : 4 * 64].view(2, 4, 64), wide[:, 4 * 64 : 8 * 64].view(2, 4, 64)
    attend_rows(q, *given.arguments()[1:], out_BHD=out)
    assert torch.equal(out, expected)
    assert torch.equal(wide[:, 8 * 64 :], untouched)
