"""Draws without a sort against the plain version: the same ids, wherever rounding decides nothing."""

from __future__ import annotations

from tests.kernels.triton_mode import devices  # isort: skip - before any kernel

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.row_tables import DrawingRows
from kestrel.kernels.sampling import Truncation, chosen, exponentials, truncate
from kestrel.kernels.sampling import draw_ids as plain_draw_ids
from kestrel.kernels.triton.sampling import DrawTuning, draw_ids, exponential, uniform
from tests.exhaustive import sweep

SMALL = DrawTuning(block_ids=32, num_warps=1, row_ids=64, row_warps=1)
TUNINGS = [SMALL, DrawTuning(64, 1, 16, 1), DrawTuning(256, 1, 512, 1)]
NARROW = 1e-5
"""Rounding may decide where shares or times are closer than this."""
INF = float("inf")
CUTS = {
    "nothing": {},
    "top_p": {"top_p": 0.31},
    "nearly all": {"top_p": 0.97},
    "hardly anything": {"top_p": 1e-6},
    "top_k": {"top_k": 7},
    "one": {"top_k": 1},
    "more than there are": {"top_k": 1000, "top_p": 0.83},
    "min_p": {"min_p": 0.2},
    "top_k and top_p": {"top_k": 12, "top_p": 0.77},
    "everything": {"top_k": 12, "top_p": 0.93, "min_p": 0.1},
}


def drawing(num_rows: int, device: str, **how: float | list[float]) -> DrawingRows:
    """Rows with other seeds and counts each; numbers are those of all rows or one for each."""

    def column(name: str, default: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(num_rows, dtype=dtype, device=device) + torch.tensor(
            how.get(name, default), dtype=dtype, device=device
        )

    nothing = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return DrawingRows(
        last_id=nothing, last_kind=nothing, last_value=torch.zeros(num_rows, 2, device=device), state=nothing,
        spent=nothing, generated=torch.arange(num_rows, device=device) * 3, budget=nothing, max_total=nothing,
        seed=(torch.arange(num_rows, device=device) - 1) * 7046029254386353, temperature=column("temperature", 1.0),
        top_k=column("top_k", 0, torch.int64), top_p=column("top_p", 1.0), min_p=column("min_p", 0.0),
    )  # fmt: skip


def few(device: str, on_gpu: int) -> int:
    """Rows: half as many where each is interpreted."""
    return on_gpu if device == "cuda" else on_gpu // 2


def randn(*size: int, device: str, scale: float = 1.0, seed: int = 0) -> Tensor:
    return (torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * scale).to(device)


def is_sure(scores_BV: Tensor, rows_B: Tensor, rows: DrawingRows) -> Tensor:
    """[B]: neither a slightly lower or higher top_p or min_p nor slightly other times would change the draw."""
    expected = plain_draw_ids(scores_BV, rows_B, rows)
    sure_B = torch.ones_like(rows_B, dtype=torch.bool)
    for way in (-NARROW, NARROW):
        moved = replace(rows, top_p=(rows.top_p + way).clamp(min=0), min_p=rows.min_p * (1 + way))
        sure_B &= (plain_draw_ids(scores_BV, rows_B, moved) == expected).flatten()
    how = Truncation(rows.temperature[rows_B], rows.top_k[rows_B], rows.top_p[rows_B], rows.min_p[rows_B])
    probs_BV, order_BV = truncate(scores_BV, how)
    noise_BV = exponentials(rows.seed[rows_B], rows.generated[rows_B], scores_BV.shape[1])
    times_B2 = (noise_BV.gather(1, order_BV) / probs_BV).sort(-1).values[:, :2]
    is_close_B = times_B2[:, -1] < times_B2[:, 0] * (1 + NARROW)
    return sure_B & ~(is_close_B & (how.temperature_B > 0) & (scores_BV.shape[1] > 1))


def check(
    scores_BV: Tensor, rows: DrawingRows, rows_B: Tensor | None = None, tuning: DrawTuning = SMALL, unsure: int = 0
) -> Tensor:
    """Both versions give the same, but for so many entries at most; gives the ids."""
    rows_B = torch.arange(len(scores_BV), device=scores_BV.device) if rows_B is None else rows_B
    got, expected = draw_ids(scores_BV, rows_B, rows, tuning=tuning), plain_draw_ids(scores_BV, rows_B, rows)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    sure_B = is_sure(scores_BV, rows_B, rows)
    assert int((~sure_B).sum()) <= unsure
    assert got[0, sure_B, 0].tolist() == expected[0, sure_B, 0].tolist()
    return chosen(got)[1]


@devices
@sweep("cut", CUTS, always=["nothing", "top_p", "everything"])
def test_draws_are_those_of_the_plain_version(cut: str, device: str) -> None:
    count = few(device, 8)
    flat, peaked = randn(count, 101, device=device), randn(count, 101, device=device, scale=4.0, seed=1)
    ids = check(torch.cat((flat, peaked)), drawing(2 * count, device, temperature=0.8, **CUTS[cut]))
    assert len(set(ids.tolist())) > count


@devices
@sweep("cut", CUTS, always=["top_k", "everything"])
def test_of_equal_scores_the_smaller_ids_come_first(cut: str, device: str) -> None:
    # No share of whole ids among 101 or 12 equals is a top_p; of three heights, many are equal at every edge.
    count = few(device, 6)
    heights = torch.randint(3, (count, 101), generator=torch.Generator().manual_seed(2)).float()
    equal = torch.cat((torch.zeros(count, 101), heights)).to(device)
    ids = check(equal, drawing(2 * count, device, **CUTS[cut]))
    if "top_k" in CUTS[cut]:
        assert int(ids[:count].max()) < CUTS[cut]["top_k"]


@devices
@sweep("cut", ["nothing", "top_p", "top_k", "everything", "more than there are"], always=["top_p", "everything"])
def test_masked_ids_are_never_drawn(cut: str, device: str) -> None:
    scores_BV = randn(8, 70, device=device)
    mask_BV = torch.rand(8, 70, generator=torch.Generator().manual_seed(3)) < 0.8
    mask_BV[:3], mask_BV[0, 69], mask_BV[1, 0], mask_BV[2, 33] = True, False, False, False
    scores_BV[mask_BV] = -INF
    ids = check(scores_BV, drawing(8, device, **CUTS[cut]))
    assert ids[:3].tolist() == [69, 0, 33]
    assert scores_BV[torch.arange(8), ids].isfinite().all()


@devices
def test_rows_that_take_the_most_likely_id_stand_beside_rows_that_draw(device: str) -> None:
    scores_BV = randn(8, 90, device=device)
    scores_BV[2, 17] = scores_BV[2, 80] = 9.0
    temperature = [1.0, 0.0, 0.0, 2.0, 0.0, 1e-7, 1e4, 1e-3]
    ids = check(scores_BV, drawing(8, device, temperature=temperature, top_p=0.9))
    likeliest = scores_BV.argmax(-1).tolist()
    assert [ids[row] == likeliest[row] for row in (1, 2, 4, 5, 7)] == [True] * 5
    assert int(ids[2]) == 17
    assert ids.tolist() != likeliest


@devices
@sweep("cut", ["nothing", "top_p", "top_k and top_p"], always=["top_k and top_p"])
@pytest.mark.parametrize("temperature", [1e-6, 1e-2, 1e5])
def test_temperatures_of_any_size(temperature: float, cut: str, device: str) -> None:
    scores_BV = randn(6, 65, device=device, scale=20.0).round().clamp(max=20.0) * 1000.0
    check(scores_BV, drawing(6, device, temperature=temperature, **CUTS[cut]))


@devices
@sweep("tuning", TUNINGS, always=TUNINGS[1:2])
@pytest.mark.parametrize("vocab", [1, 31, 64, 129])
def test_blocks_of_any_size_and_vocabularies_that_fill_none_of_them(
    vocab: int, tuning: DrawTuning, device: str
) -> None:
    scores_BV = randn(4, vocab + 3, device=device, seed=vocab)[:, :vocab]
    check(scores_BV, drawing(4, device, top_k=30, top_p=0.9), tuning=tuning)


@devices
def test_rows_come_in_any_order_and_more_than_once(device: str) -> None:
    many = {"temperature": [0.5, 1.0, 2.0, 1.0, 0.0], "top_k": [0, 5, 0, 9, 0], "top_p": [0.5, 1.0, 0.9, 0.6, 0.0]}
    rows = drawing(5, device, **many)
    rows_B = torch.tensor([3, 0, 2, 1, 4, 4, 4], device=device)
    scores_BV = randn(7, 80, device=device)
    together = check(scores_BV, rows, rows_B)
    alone = [int(check(scores_BV[b : b + 1], rows, rows_B[b : b + 1])) for b in range(7)]
    assert together.tolist() == alone


@devices
@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_scores_that_are_not_finite_are_recognised(bad: float, device: str) -> None:
    scores_BV = randn(4, 70, device=device)
    scores_BV[1:3, 40] = bad
    if bad == -INF:
        scores_BV[1:3] = bad
    rows = drawing(4, device, temperature=[1.0, 1.0, 0.0, 1.0], top_p=0.5, top_k=5)
    rows_B = torch.arange(4, device=device)
    got, expected = draw_ids(scores_BV, rows_B, rows, tuning=SMALL), plain_draw_ids(scores_BV, rows_B, rows)
    assert chosen(got)[0].tolist() == chosen(expected)[0].tolist() == [True, False, False, True]
    assert got[0, [0, 2, 3], 0].tolist() == expected[0, [0, 2, 3], 0].tolist()
    assert 0 <= int(chosen(got)[1][1]) < 70


@triton.jit
def _noise(seed_ptr, count_ptr, u_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, exponential(uniform(tl.load(seed_ptr), tl.load(count_ptr), i)))
    tl.store(out_ptr + BLOCK + i, exponential(tl.load(u_ptr + i)))


@devices
@pytest.mark.parametrize(("seed", "count"), [(0, 0), (-(2**63), 7), (2**63 - 1, 2**40), (-5, 1)])
def test_waiting_times_are_those_of_the_plain_version_and_exact(seed: int, count: int, device: str) -> None:
    u = torch.cat((torch.logspace(-54, 0, 510, base=2.0), torch.tensor([2.0**-54, 0.25]))).clamp(max=1 - 2.0**-24)
    seed_1, count_1 = (torch.tensor([number], device=device) for number in (seed, count))
    out = torch.empty(2, 512, device=device)
    _noise[(1,)](seed_1, count_1, u.to(device), out, BLOCK=512)
    torch.testing.assert_close(out[0], exponentials(seed_1, count_1, 512)[0], rtol=5e-7, atol=0.0)
    torch.testing.assert_close(out[1].cpu().double(), -torch.log1p(-u.double()), rtol=5e-7, atol=0.0)


def shares_are_right(draw: Callable[..., Tensor], device: str, num_draws: int, **how: float) -> None:
    """Chi-square of four degrees of freedom: a right sampler exceeds 23.5 with one in 10 000 seeds."""
    shares = torch.tensor([0.05, 0.4, 0.25, 0.1, 0.2])
    scores_BV = shares.log().to(device).repeat(num_draws, 1)
    ids = chosen(draw(scores_BV, torch.arange(num_draws, device=device), drawing(num_draws, device, **how)))[1].cpu()
    kept = {"top_k": shares >= 0.2, "min_p": shares >= 0.1}.get(next(iter(how), ""), shares > 0)
    expected = torch.where(kept, shares, 0.0) / shares[kept].sum() * num_draws
    counts = torch.bincount(ids, minlength=5)
    assert counts[~kept].sum() == 0
    assert float(((counts - expected)[kept] ** 2 / expected[kept]).sum()) < 23.5


@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"min_p": 0.2}])
def test_ids_are_drawn_as_often_as_they_are_likely(how: dict[str, float]) -> None:
    shares_are_right(plain_draw_ids, "cpu", 4000, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"min_p": 0.2}])
def test_a_gpu_draws_ids_as_often_as_they_are_likely(how: dict[str, float]) -> None:
    shares_are_right(draw_ids, "cuda", 4000, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_full_vocabularies_of_many_rows(scale: float, cut: str) -> None:
    logits_BV = randn(64, 51201, device="cuda", scale=scale)
    for scores_BV in (logits_BV[:, :51200], logits_BV[:, :51200].bfloat16().float()):
        check(scores_BV, drawing(64, "cuda", temperature=0.7, **CUTS[cut]), tuning=DrawTuning(), unsure=2)
