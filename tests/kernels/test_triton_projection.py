"""Projection, rotation and storing in one Triton kernel against the plain version, and against two kernels."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, distance  # isort: skip - before any kernel

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kestrel.kernels.projection import project_and_store as plain
from kestrel.kernels.rotary import rope_tables
from kestrel.kernels.triton.linear import Tuning, small_linear
from kestrel.kernels.triton.projection import project_and_store
from kestrel.kernels.triton.rotary import rotate_and_store
from tests.kernels.page_orders import Order, head_major, orders

NUM_PAGES, PAGE_SIZE = 10, 5


class Sizes(NamedTuple):
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    dim: int


CASES = {
    "one row, half of a head rotates": Sizes(1, 2, 2, 16, 8, 40),
    "one row, grouped, all of a head rotates": Sizes(1, 2, 1, 16, 16, 64),
    "several rows, blocks that end inside a head": Sizes(5, 3, 1, 40, 12, 72),
    "sixteen rows": Sizes(16, 4, 2, 32, 32, 64),
    "no rows": Sizes(0, 2, 2, 16, 8, 16),
}


class Given:
    """Arguments of one call, and caches to be written."""

    def __init__(
        self,
        case: str,
        device: str,
        dtype: torch.dtype = torch.float32,
        order: Order = head_major,
        rotates: bool = True,
    ) -> None:
        own, draw = CASES[case], Draw(device, dtype)
        width = (own.heads + 2 * own.kv_heads) * own.head_dim
        self.x, self.weight = draw(own.rows, own.dim), draw(width, own.dim, scale=own.dim**-0.5)
        self.bias, self.norm = draw(width), draw(own.dim)
        self.heads = own.heads, own.kv_heads
        self.tables = rope_tables(64, own.rotary_dim, 10_000.0, device) if rotates else (None, None)
        self.positions = Draw(device).integers(64, own.rows)
        order_of_slots = torch.randperm(NUM_PAGES * PAGE_SIZE, generator=torch.Generator().manual_seed(2))
        self.slots = order_of_slots[: own.rows].to(device)
        size = (NUM_PAGES, PAGE_SIZE, own.kv_heads, own.head_dim)
        self.caches = tuple(order(torch.full(size, number, device=device).to(dtype)) for number in (7.0, 9.0))

    def run(self, project: Any, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
        """q, keys and values of fresh caches."""
        caches = [cache.clone(memory_format=torch.preserve_format) for cache in self.caches]
        options = {"bias_F": self.bias, "scale_F": None, "norm": None, **more}
        at = (*self.heads, *self.tables, self.positions, self.slots, *caches)
        q = project(
            self.x, self.weight, options.pop("bias_F"), options.pop("scale_F"), options.pop("norm"), *at, **options
        )
        return (q, *caches)


def in_two_kernels(
    x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None, norm: tuple[Tensor, float] | None, *at: Any
) -> Tensor:
    return rotate_and_store(small_linear(x, weight, bias, scale_F=scale, norm=norm), *at)


@devices
@orders
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_queries_keys_and_values_end_where_the_plain_version_puts_them(
    case: str, has_norm: bool, order: Order, device: str
) -> None:
    given = Given(case, device, order=order)
    norm = (given.norm, 1e-5) if has_norm else None
    got, expected = (given.run(project, norm=norm) for project in (project_and_store, plain))
    assert got[0].is_contiguous()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=3e-5)


@devices
@pytest.mark.parametrize("case", list(CASES)[1:4])
def test_without_tables_and_bias_nothing_is_rotated_or_added(case: str, device: str) -> None:
    given = Given(case, device, rotates=False)
    got, expected = (given.run(project, bias_F=None) for project in (project_and_store, plain))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=3e-5)


@devices
@pytest.mark.parametrize("case", list(CASES)[:4])
def test_one_kernel_and_two_give_the_same_bits(case: str, device: str) -> None:
    """Rows of the base model go by two where a neighbour has an adapter, by one elsewhere."""
    given = Given(case, device, HALF[device])
    for got, expected in zip(given.run(project_and_store), given.run(in_two_kernels), strict=True):
        assert torch.equal(got, expected)


@devices
@pytest.mark.parametrize("num_rows", [1, 7])
def test_weights_of_float8_and_columns_of_wider_tensors_are_read(num_rows: int, device: str) -> None:
    given = Given("one row, grouped, all of a head rotates", device)
    draw = Draw(device)
    wide, scale = draw(num_rows, 96), draw(len(given.weight))
    given.x, given.weight = wide[:, 32:], given.weight.to(torch.float8_e4m3fn)
    given.positions, given.slots = (torch.arange(num_rows, device=device) + first for first in (40, 3))
    got, expected = (given.run(project, scale_F=scale) for project in (project_and_store, plain))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=3e-5)


@devices
@pytest.mark.parametrize("block_out", [2, 16, 32])
def test_blocks_of_any_size_hold_whole_pairs(block_out: int, device: str) -> None:
    given = Given("several rows, blocks that end inside a head", device)
    got = given.run(project_and_store, tuning=Tuning(max(16, block_out), 32))
    torch.testing.assert_close(got, given.run(plain), rtol=1e-4, atol=3e-5)
    given = Given("one row, grouped, all of a head rotates", device)
    got = given.run(project_and_store, tuning=Tuning(block_out, 64))
    torch.testing.assert_close(got, given.run(plain), rtol=1e-4, atol=3e-5)


@devices
@pytest.mark.parametrize("case", list(CASES)[:4])
def test_half_precision_is_no_further_from_the_truth_than_the_plain_version(case: str, device: str) -> None:
    given = Given(case, device, HALF[device])
    got, rounded = given.run(project_and_store), given.run(plain)
    given.x, given.weight, given.bias = (t.double() for t in (given.x, given.weight, given.bias))
    given.caches = tuple(cache.double() for cache in given.caches)
    for mine, theirs, truth in zip(got, rounded, given.run(plain), strict=True):
        assert distance(mine, truth) <= 1.05 * distance(theirs, truth)


@pytest.mark.gpu
def test_float8_caches_receive_what_two_kernels_put_there() -> None:
    """Not in the interpreter, which does not round to the nearest float8."""
    given = Given("sixteen rows", "cuda", torch.bfloat16)
    given.caches = tuple(cache.to(torch.float8_e4m3fn) for cache in given.caches)
    scales = {"k_scale": 0.01, "v_scale": 0.02}
    got = given.run(project_and_store, **scales)
    expected = given.run(lambda *all_of_it, **scales: in_two_kernels(*all_of_it, None, *scales.values()), **scales)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
