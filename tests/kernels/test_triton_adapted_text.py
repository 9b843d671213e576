"""The adapted forward pass through Triton kernels, for steps of a few positions."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, devices, distance  # isort: skip - before any kernel

import pytest
import torch

from kestrel.kernels.ops import PLAIN, Ops
from kestrel.kernels.triton.ops import TRITON
from kestrel.runtime.adapter_slots import SlotAdapt
from tests.moondream.goldens import FAMILIES, golden
from tests.runtime.adapted import ValuesAlone, fused_text, loaded_slots

NUM_ROWS = [7, 16] if torch.cuda.is_available() else [7]
"""Seven are enough for the base and every adapter."""
ON_DEVICE = FAMILIES if torch.cuda.is_available() else ["md2"]
"""Experts take minutes in the interpreter; tests of their kernel alone are in test_triton_moe_deltas.py."""


@pytest.mark.exhaustive
@devices
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("family", ON_DEVICE)
@torch.inference_mode()
def test_positions_of_the_base_keep_their_bits_and_the_others_are_as_exact_as_the_plain_version(
    family: str, num_rows: int, device: str
) -> None:
    half = HALF[device]
    x_TD = golden(family).model.text.embed(torch.arange(20, 20 + num_rows)).to(device)
    positions = torch.arange(num_rows, device=device)
    owners = positions * 5 % 7 % 6 - 1

    def run(ops: Ops, dtype: torch.dtype, slot_T: torch.Tensor | None) -> torch.Tensor:
        text, attention = fused_text(ops, device, dtype, family), ValuesAlone(num_rows, device, family)
        adapt = None if slot_T is None else SlotAdapt(loaded_slots(device, dtype, family), slot_T, ops)
        return text(x_TD.to(dtype), positions, attention, adapt)

    got, base, is_base = run(TRITON, half, owners), run(TRITON, half, None), owners < 0
    assert set(owners.tolist()) == {-1, 0, 1, 2, 3, 4}
    if family == "md2":  # an expert's sums depend on the other tokens that it gets
        assert torch.equal(got[is_base], base[is_base])
    exact, rounded = run(PLAIN, torch.float64, owners), run(PLAIN, half, owners)
    assert distance(got, exact) <= 1.1 * distance(rounded, exact)
    assert not torch.equal(got[~is_base], base[~is_base])
