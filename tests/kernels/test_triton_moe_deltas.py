"""Low-rank deltas of experts as Triton kernels against the plain ones, and those against one token after the other."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, distance  # isort: skip - before any kernel

import torch
from torch import Tensor

from kestrel.adapters import AdaptedMatrix, AdapterShape, ExpertShape
from kestrel.kernels.moe_mlp import ExpertDeltas, ExpertFactors, expert_mlp, moe_mlp_adapted, route_top_k
from kestrel.kernels.ops import PLAIN
from kestrel.kernels.triton.moe_grouped import moe_grouped
from kestrel.kernels.triton.ops import TRITON
from kestrel.layers.linear import use_ops
from kestrel.layers.mlp import Moe
from kestrel.runtime.adapter_slots import AdapterSlots, SlotAdapt
from kestrel.runtime.contract import AdapterLoad
from tests.exhaustive import sweep
from tests.llama.tiny_folders import random_adapter

DIM, INNER, EXPERTS, TOP_K, SLOTS = 40, 24, 5, 2, 3
RANKS = [4, 0, 1]
"""By slot. The second adapter changes no expert."""
WIDE_RANKS = [20, 3, 33]
"""More than kernels add at a time."""


def drawn(
    num_tokens: int, device: str, dtype: torch.dtype, ranks: list[int] = RANKS
) -> tuple[tuple[Tensor, ...], ExpertDeltas]:
    draw = Draw(device, dtype)

    def factors(num_out: int, num_in: int) -> ExpertFactors:
        a = draw(SLOTS, EXPERTS, max(ranks), num_in, scale=0.2)
        b = draw(SLOTS, EXPERTS, num_out, max(ranks), scale=0.4)
        return ExpertFactors(a, b, torch.tensor([*ranks, 0], dtype=torch.int32, device=device))

    x, fc1, fc2 = draw(num_tokens, DIM), draw(EXPERTS, 2 * INNER, DIM, scale=0.2), draw(EXPERTS, DIM, INNER, scale=0.3)
    weights, ids = route_top_k(draw(num_tokens, EXPERTS), TOP_K)
    slots = torch.arange(num_tokens, device=device) % (SLOTS + 1) - 1
    return (x, weights, ids, fc1, fc2), ExpertDeltas(slots, factors(2 * INNER, DIM), factors(DIM, INNER))


def to(dtype: torch.dtype, inputs: tuple[Tensor, ...], deltas: ExpertDeltas) -> tuple[tuple[Tensor, ...], ExpertDeltas]:
    x, weights, ids, fc1, fc2 = inputs
    both = (ExpertFactors(f.a_SERD.to(dtype), f.b_SEFR.to(dtype), f.rank_S) for f in (deltas.fc1, deltas.fc2))
    return (x.to(dtype), weights, ids, fc1.to(dtype), fc2.to(dtype)), ExpertDeltas(deltas.slot_T, *both)


def test_the_plain_version_equals_experts_with_the_adapter_built_in() -> None:
    (x, weights, ids, fc1, fc2), deltas = to(torch.float64, *drawn(9, "cpu", torch.float32))
    found = moe_mlp_adapted(x, weights, ids, fc1, fc2, None, None, deltas)
    for token, slot in enumerate(deltas.slot_T.tolist()):
        expected = torch.zeros(DIM, dtype=torch.float64)
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            merged = []
            for matrix, factors in ((fc1[expert], deltas.fc1), (fc2[expert], deltas.fc2)):
                rank = RANKS[slot] if slot >= 0 else 0
                a, b = factors.a_SERD[slot, expert, :rank], factors.b_SEFR[slot, expert, :, :rank]
                merged.append(matrix + b @ a)
            expected += weight * expert_mlp(x[token][None], *merged)[0]
        torch.testing.assert_close(found[token], expected, rtol=1e-9, atol=1e-9)


@devices
@sweep("num_tokens", [1, 6, 37], always=[1, 6])
def test_tokens_get_the_deltas_of_their_adapters(num_tokens: int, device: str) -> None:
    inputs, deltas = drawn(num_tokens, device, torch.float32)
    found = moe_grouped(*inputs, deltas=deltas)
    torch.testing.assert_close(found, moe_mlp_adapted(*inputs, None, None, deltas), rtol=1e-4, atol=1e-4)
    is_changed = torch.tensor([slot >= 0 and RANKS[slot] > 0 for slot in deltas.slot_T.tolist()], device=device)
    base = moe_grouped(*inputs)
    assert torch.equal(found[~is_changed], base[~is_changed])
    assert num_tokens == 1 or not torch.isclose(found[is_changed], base[is_changed], atol=1e-3).all(dim=1).any()


@devices
def test_the_gate_of_silu_comes_after_the_deltas(device: str) -> None:
    inputs, deltas = drawn(6, device, torch.float32)
    expected = moe_mlp_adapted(*inputs, None, None, deltas, gate="silu")
    torch.testing.assert_close(moe_grouped(*inputs, deltas=deltas, gate="silu"), expected, rtol=1e-4, atol=1e-4)


@devices
def test_ranks_may_be_larger_than_what_is_added_at_a_time(device: str) -> None:
    inputs, deltas = drawn(9, device, torch.float32, WIDE_RANKS)
    expected = moe_mlp_adapted(*inputs, None, None, deltas)
    torch.testing.assert_close(moe_grouped(*inputs, deltas=deltas), expected, rtol=1e-4, atol=1e-4)


@devices
def test_in_half_precision_they_are_as_exact_as_the_plain_version(device: str) -> None:
    half = HALF[device]
    inputs, deltas = drawn(12, device, half)
    wide, wide_deltas = to(torch.float64, inputs, deltas)
    exact = moe_mlp_adapted(*wide, None, None, wide_deltas)
    rounded = moe_mlp_adapted(*inputs, None, None, deltas)
    assert distance(moe_grouped(*inputs, deltas=deltas), exact) <= 1.1 * distance(rounded, exact)


@devices
@torch.inference_mode()
def test_router_and_gated_experts_get_the_deltas_of_the_plain_version(device: str) -> None:
    draw = Draw(device)
    matrices = {
        "router": AdaptedMatrix(EXPERTS, DIM, "router"),
        "gate_up": AdaptedMatrix(2 * INNER, DIM, "fc1", experts=ExpertShape(EXPERTS, joined=2)),
        "down": AdaptedMatrix(DIM, INNER, "fc2", experts=ExpertShape(EXPERTS)),
    }
    shape, layer = AdapterShape((matrices,)), Moe(DIM, INNER, EXPERTS, TOP_K, gate="silu", router_bias=False).to(device)
    for parameter in layer.parameters():
        parameter.copy_(draw(*parameter.shape, scale=0.3))
    slots = AdapterSlots(shape, 2, 24, torch.device(device), torch.float32)
    for slot, rank in enumerate((5, 20)):
        slots.load(AdapterLoad(slot, str(slot), random_adapter(shape, rank, seed=slot)))
    x, owners = draw(7, DIM), torch.arange(7, device=device) % 3 - 1
    expected = layer.adapted(x, 0, SlotAdapt(slots, owners, PLAIN))
    use_ops(layer, TRITON)
    torch.testing.assert_close(layer.adapted(x, 0, SlotAdapt(slots, owners, TRITON)), expected, rtol=1e-4, atol=1e-4)
    is_base, base = owners < 0, layer(x)
    assert torch.equal(layer.adapted(x, 0, SlotAdapt(slots, owners, TRITON))[is_base], base[is_base])
    assert not torch.isclose(expected[~is_base], base[~is_base], atol=1e-3).all(dim=1).any()
