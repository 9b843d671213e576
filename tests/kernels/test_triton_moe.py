"""Mixtures of experts as Triton kernels, for few tokens and for many, against the plain version."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, distance  # isort: skip - before any kernel

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kestrel.kernels.fp8 import weights_to_fp8
from kestrel.kernels.moe_mlp import Gate, moe_mlp_fp8, route_top_k
from kestrel.kernels.moe_mlp import moe_mlp as plain
from kestrel.kernels.triton.moe_grouped import Tuning, group_pairs, moe_grouped, moe_grouped_fp8
from kestrel.kernels.triton.moe_mlp import Tuning as SmallTuning
from kestrel.kernels.triton.moe_mlp import moe_small
from tests.exhaustive import sweep

CASES = {
    "one token": (1, 32, 16, 8, 2),
    "even sizes": (6, 64, 32, 4, 2),
    "odd sizes": (5, 37, 19, 5, 3),
    "every expert": (3, 16, 8, 3, 3),
    "no tokens": (0, 16, 8, 4, 2),
}
FEW_PROGRAMS = partial(moe_small, tuning=SmallTuning(gate_outputs=8, mix_outputs=16))
BOTH = pytest.mark.parametrize("run", [pytest.param(FEW_PROGRAMS, id="small"), pytest.param(moe_grouped, id="grouped")])


def routed(case: str, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, dim, inner, num_experts, k = CASES[case]
    draw = Draw(device, dtype)
    weights, ids = route_top_k(draw(num_tokens, num_experts), k)
    fc1, fc2 = draw(num_experts, 2 * inner, dim, scale=0.3), draw(num_experts, dim, inner, scale=0.3)
    return draw(num_tokens, dim), weights, ids, fc1, fc2


def in_double(x: Tensor, weights: Tensor, ids: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    return plain(x.double(), weights.double(), ids, fc1.double(), fc2.double())


@devices
@BOTH
@sweep("case", CASES, always=["odd sizes", "every expert", "no tokens"])
def test_tokens_go_through_their_experts_as_in_the_plain_version(
    case: str, run: Callable[..., Tensor], device: str
) -> None:
    given = routed(case, device)
    torch.testing.assert_close(run(*given).double(), in_double(*given), rtol=1e-5, atol=1e-5)


@devices
@BOTH
@sweep("case", CASES, always=["odd sizes"])
def test_the_gate_of_silu_is_that_of_the_plain_version(case: str, run: Callable[..., Tensor], device: str) -> None:
    given = routed(case, device)
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in given]
    torch.testing.assert_close(run(*given, gate="silu").double(), plain(*wide, gate="silu"), rtol=1e-5, atol=1e-5)


@devices
@BOTH
def test_half_precision_is_no_further_from_the_truth_than_the_plain_version(
    run: Callable[..., Tensor], device: str
) -> None:
    given = routed("even sizes", device, HALF[device])
    exact = in_double(*given)
    assert distance(run(*given), exact) <= 1.05 * distance(plain(*given), exact)


@devices
@BOTH
def test_experts_of_float8_are_read_with_a_scale_per_output(run: Callable[..., Tensor], device: str) -> None:
    x, weights, ids, fc1, fc2 = routed("even sizes", device)
    narrow1, narrow2 = fc1.to(torch.float8_e4m3fn), fc2.to(torch.float8_e4m3fn)
    draw = Draw(device)
    scale1, scale2 = draw(*fc1.shape[:2]).abs(), draw(*fc2.shape[:2]).abs()
    same = in_double(x, weights, ids, narrow1.float() * scale1[:, :, None], narrow2.float() * scale2[:, :, None])
    got = run(x, weights, ids, narrow1, narrow2, scale1, scale2)
    torch.testing.assert_close(got.double(), same, rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # places of no pair hold anything, also what is no number
@pytest.mark.parametrize(
    ("tuning", "gate"),
    [
        (None, "gelu"),
        (None, "silu"),
        (Tuning(rows_per_block=16, gate_outputs=16, mix_outputs=32, block_in=32), "gelu"),
    ],
)
def test_rows_of_float8_go_through_experts_of_float8(tuning: Tuning | None, gate: Gate, device: str) -> None:
    draw = Draw(device, HALF[device])
    x, fc1, fc2 = draw(40, 64), draw(4, 64, 64, scale=0.3), draw(4, 64, 32, scale=0.3)
    weights, ids = route_top_k(draw(40, 4), 2)
    (narrow1, scale1), (narrow2, scale2) = (weights_to_fp8(m.flatten(0, 1)) for m in (fc1, fc2))
    experts = (narrow1.view_as(fc1), narrow2.view_as(fc2), scale1.view(4, -1), scale2.view(4, -1))
    got = moe_grouped_fp8(x, weights, ids, *experts, tuning=tuning, gate=gate)
    expected = moe_mlp_fp8(x, weights, ids, *experts, gate=gate)
    # The interpreter rounds some numbers of float8 to their half.
    exact = plain(x, weights, ids, fc1, fc2, gate=gate).double()
    assert distance(got, expected.double()) < (2e-2 if device == "cuda" else 8e-2) * exact.norm()
    assert distance(expected, exact) < 0.1 * exact.norm()


@devices
def test_few_tokens_with_the_blocks_meant_for_them(device: str) -> None:
    given = routed("one token", device)
    torch.testing.assert_close(moe_small(*given).double(), in_double(*given), rtol=1e-5, atol=1e-5)


@devices
def test_several_blocks_of_one_expert(device: str) -> None:
    x, weights, ids, fc1, fc2 = routed("even sizes", device)
    x, weights = (t.repeat(9, *[1] * (t.ndim - 1)) for t in (x, weights))
    ids = torch.full((54, 2), 3, device=device)
    ids[::7, 1] = 1
    got = moe_grouped(x, weights, ids, fc1, fc2, tuning=Tuning(rows_per_block=16, gate_outputs=16, mix_outputs=32))
    torch.testing.assert_close(got.double(), in_double(x, weights, ids, fc1, fc2), rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.parametrize(("num_pairs", "num_experts", "rows"), [(1, 1, 16), (37, 5, 16), (1500, 7, 32), (64, 64, 16)])
def test_every_pair_has_one_place_in_a_block_of_its_expert(
    num_pairs: int, num_experts: int, rows: int, device: str
) -> None:
    ids = Draw(device).integers(num_experts, num_pairs)
    blocks = group_pairs(ids.view(-1, 1), num_experts, rows)
    experts = blocks.expert_G.tolist()
    places = blocks.pairs_R.view(-1, rows).tolist()
    found = {pair: expert for expert, block in zip(experts, places, strict=True) if expert >= 0 for pair in block}
    found.pop(-1, None)
    assert found == dict(enumerate(ids.tolist()))
    for expert in range(num_experts):
        own = [pair for e, block in zip(experts, places, strict=True) if e == expert for pair in block if pair >= 0]
        assert own == sorted(own)
        assert experts.count(expert) == -(-len(own) // rows)
