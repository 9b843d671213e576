"""Rotation and storing of a fused projection as a Triton kernel against the plain version."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, distance  # isort: skip - before any kernel

import pytest
import torch
from torch import Tensor

from kestrel.kernels.norms import rms_norm
from kestrel.kernels.rotary import apply_rope, rope_tables
from kestrel.kernels.rotary import rotate_and_store as plain
from kestrel.kernels.triton.rotary import RotateTuning, rotate_and_store
from tests.kernels.page_orders import Order, head_major, orders

NUM_PAGES, PAGE_SIZE = 10, 5
NUM_SLOTS = NUM_PAGES * PAGE_SIZE
CASES = {
    "Moondream's heads": (3, 32, 32, 64, 32),
    "one token": (1, 4, 4, 64, 32),
    "grouped, odd counts, odd head": (7, 6, 3, 40, 12),
    "every dimension rotates": (5, 2, 1, 16, 16),
    "no tokens": (0, 2, 2, 16, 8),
}
Given = tuple[Tensor, int, int, Tensor, Tensor, Tensor, Tensor]


def given(case: str, device: str, dtype: torch.dtype = torch.float32) -> tuple[Given, tuple[Tensor, Tensor]]:
    num_tokens, heads, kv_heads, head_dim, rotary_dim = CASES[case]
    draw = Draw(device, dtype)
    qkv = draw(num_tokens, (heads + 2 * kv_heads) * head_dim)
    cos, sin = rope_tables(64, rotary_dim, 10_000.0, device)
    positions = draw.integers(64, num_tokens)
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(2))[:num_tokens].to(device)
    tau = tuple(Draw(device)(num_tokens, n).abs() for n in (heads, kv_heads))
    return (qkv, heads, kv_heads, cos, sin, positions, slots), (tau[0], tau[1])


def caches(
    case: str, device: str, dtype: torch.dtype = torch.float32, order: Order = head_major
) -> tuple[Tensor, Tensor]:
    _, _, kv_heads, head_dim, _ = CASES[case]
    size = (NUM_PAGES, PAGE_SIZE, kv_heads, head_dim)
    k, v = (order(torch.full(size, number, device=device).to(dtype)) for number in (7.0, 9.0))
    return k, v


@devices
@orders
@pytest.mark.parametrize("has_tau", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_queries_keys_and_values_end_where_the_plain_version_puts_them(
    case: str, has_tau: bool, order: Order, device: str
) -> None:
    arguments, tau = given(case, device)
    got_caches, plain_caches = caches(case, device, order=order), caches(case, device, order=order)
    got = rotate_and_store(*arguments, *got_caches, tau=tau if has_tau else None)
    expected = plain(*arguments, *plain_caches, tau=tau if has_tau else None)
    assert got.is_contiguous()
    torch.testing.assert_close((got, *got_caches), (expected, *plain_caches), rtol=1e-6, atol=1e-6)


@orders
def test_the_plain_version_is_rotation_and_a_copy_by_slot(order: Order) -> None:
    (qkv, heads, kv_heads, cos, sin, positions, slots), _ = given("grouped, odd counts, odd head", "cpu")
    pages = caches("grouped, odd counts, odd head", "cpu", order=order)
    q = plain(qkv, heads, kv_heads, cos, sin, positions, slots, *pages)
    k_cache, v_cache = (cache.flatten(0, 1) for cache in pages)
    by_head = qkv.view(len(qkv), -1, 40)
    assert torch.equal(q, apply_rope(by_head[:, :6], cos[positions], sin[positions]))
    assert torch.equal(k_cache[slots], apply_rope(by_head[:, 6:9], cos[positions], sin[positions]))
    assert torch.equal(v_cache[slots], by_head[:, 9:])
    others = sorted(set(range(NUM_SLOTS)) - set(slots.tolist()))
    assert (k_cache[others] == 7.0).all()
    assert (v_cache[others] == 9.0).all()


@devices
def test_rows_may_be_columns_of_a_wider_projection(device: str) -> None:
    case = "grouped, odd counts, odd head"
    (qkv, *rest), tau = given(case, device)
    wide = torch.cat([qkv, torch.full_like(qkv, float("nan"))], dim=1)
    got_caches, expected_caches = caches(case, device), caches(case, device)
    tuning = RotateTuning(heads_per_program=4, num_warps=1)
    got = rotate_and_store(wide[:, : qkv.shape[1]], *rest, *got_caches, tau=tau, tuning=tuning)
    assert torch.equal(got, rotate_and_store(qkv, *rest, *expected_caches, tau=tau))
    assert torch.equal(got_caches[0], expected_caches[0])
    assert torch.equal(got_caches[1], expected_caches[1])


@devices
def test_half_precision_is_no_further_from_the_truth_than_the_plain_version(device: str) -> None:
    case = "Moondream's heads"
    dtype = HALF[device]
    arguments, tau = given(case, device, dtype)
    got_caches, plain_caches, exact_caches = (caches(case, device, d) for d in (dtype, dtype, torch.float64))
    got = (rotate_and_store(*arguments, *got_caches, tau=tau), *got_caches)
    rounded = (plain(*arguments, *plain_caches, tau=tau), *plain_caches)
    exact = (plain(arguments[0].double(), *arguments[1:], *exact_caches, tau=tau), *exact_caches)
    for mine, theirs, truth in zip(got, rounded, exact, strict=True):
        assert distance(mine, truth) <= 1.05 * distance(theirs, truth)


@devices
@pytest.mark.parametrize("rotates", [True, False])
def test_queries_and_keys_get_norms_of_their_own_before_they_are_rotated(rotates: bool, device: str) -> None:
    case, draw = "grouped, odd counts, odd head", Draw(device)
    (qkv, heads, kv_heads, *tables, positions, slots), _ = given(case, device)
    q_weight, k_weight = draw(40), draw(40)
    found, expected = [], []
    for store, seen in ((rotate_and_store, found), (plain, expected)):
        own = caches(case, device)
        given_tables = tables if rotates else (None, None)
        q = store(qkv, heads, kv_heads, *given_tables, positions, slots, *own, norms=(q_weight, k_weight, 1e-6))
        seen += [q, *own]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    by_head = qkv.view(len(qkv), -1, 40)
    q, k = rms_norm(by_head[:, :6], q_weight, 1e-6), rms_norm(by_head[:, 6:9], k_weight, 1e-6)
    if rotates:
        q, k = (apply_rope(x, *(table[positions] for table in tables)) for x in (q, k))
    assert torch.equal(expected[0], q)
    assert torch.equal(expected[1].flatten(0, 1)[slots], k)
    assert torch.equal(expected[2].flatten(0, 1)[slots], by_head[:, 9:])


@pytest.mark.gpu
def test_float8_caches_receive_scaled_and_limited_numbers() -> None:
    """Not in the interpreter, which does not round to the nearest float8."""
    case = "one token"
    (qkv, *rest), _ = given(case, "cuda")
    qkv[:, -1] = 1e6
    got_caches, plain_caches = (caches(case, "cuda", torch.float8_e4m3fn) for _ in range(2))
    rotate_and_store(qkv, *rest, *got_caches, k_scale=0.01, v_scale=0.02)
    plain(qkv, *rest, *plain_caches, k_scale=0.01, v_scale=0.02)
    for mine, theirs in zip(got_caches, plain_caches, strict=True):
        # A product by 1/scale may fall on the other side of a tie than a quotient does.
        steps = (mine.view(torch.uint8).int() - theirs.view(torch.uint8).int()).abs()
        assert steps.max() <= 1
        assert (steps > 0).float().mean() < 1e-2
        assert torch.isfinite(mine.float()).all()
