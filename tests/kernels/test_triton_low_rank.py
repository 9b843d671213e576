"""The Triton version of the low-rank deltas against the plain one."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, devices  # isort: skip - before any kernel

from random import Random

import pytest
import torch

from kestrel.kernels.low_rank import SlotRows
from kestrel.kernels.low_rank import add_low_rank as plain
from kestrel.kernels.triton.low_rank import Tiles, add_low_rank

SHAPES = {
    "one row": (1, 24, 40, 8, [8]),
    "odd sizes, mixed ranks, an empty slot": (37, 100, 130, 48, [6, 48, 0, 17]),
    "the largest rank beside a small one": (5, 64, 72, 512, [512, 8]),
    "several tiles of one adapter": (70, 32, 48, 16, [16]),
}


def batch(shape: str, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    num_rows, num_in, num_out, max_rank, ranks = SHAPES[shape]
    dice = torch.Generator().manual_seed(len(shape))

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=dice).to(device, dtype)

    a, b = numbers(len(ranks), max_rank, num_in), numbers(len(ranks), num_out, max_rank)
    return numbers(num_rows, num_in), numbers(num_rows, num_out), a, b, torch.tensor(ranks, device=device)


def users_of(owners: list[int], ranks: list[int], device: str) -> list[SlotRows]:
    slots = sorted(set(owners) - {-1})
    return [
        SlotRows(slot, ranks[slot], torch.tensor([n for n, own in enumerate(owners) if own == slot], device=device))
        for slot in slots
    ]


@devices
@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_the_plain_version_and_leaves_other_rows_untouched(shape: str, device: str) -> None:
    x, y, a, b, rank = batch(shape, device, torch.float32)
    owners = [Random(f"{shape} {n}").randrange(-1, len(rank)) for n in range(len(x))]
    users = users_of(owners, rank.tolist(), device)
    expected = plain(y.clone(), x, users, a, b)
    got = add_low_rank(y.clone(), x, Tiles.of(users, torch.device(device)), a, b, rank)
    scale = expected.abs().max()
    torch.testing.assert_close(got / scale, expected / scale, rtol=0.0, atol=2e-6)
    without = [n for n, own in enumerate(owners) if own < 0]
    assert torch.equal(got[without], y[without])


@devices
def test_half_precision_is_no_further_from_the_truth_than_the_plain_version(device: str) -> None:
    x, y, a, b, rank = batch("several tiles of one adapter", device, HALF[device])
    users = users_of([0] * len(x), rank.tolist(), device)
    exact = plain(y.double(), x.double(), users, a.double(), b.double())
    got = add_low_rank(y.clone(), x, Tiles.of(users, torch.device(device)), a, b, rank)
    rounded = plain(y.clone(), x, users, a, b)
    assert (got.double() - exact).norm() <= 1.05 * (rounded.double() - exact).norm()


@devices
def test_an_empty_tile_does_nothing(device: str) -> None:
    x, y, a, b, rank = batch("one row", device, torch.float32)
    tiles = Tiles(torch.tensor([-1], device=device), torch.full((1, 16), 0, device=device))
    assert torch.equal(add_low_rank(y.clone(), x, tiles, a, b, rank), y)
