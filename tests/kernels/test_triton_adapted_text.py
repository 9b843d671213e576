"""The adapted forward pass through Triton kernels, for steps of a few positions."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, devices, distance  # isort: skip - before any kernel

import pytest
import torch

from kestrel.kernels.ops import PLAIN
from kestrel.kernels.triton.ops import TRITON
from tests.moondream.goldens import golden
from tests.runtime.adapted import ValuesAlone, adapted_text, loaded_slots

NUM_ROWS = [7, 16] if torch.cuda.is_available() else [7]
"""Seven are enough for the base and every adapter."""


@devices
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@torch.inference_mode()
def test_positions_of_the_base_keep_their_bits_and_the_others_are_as_exact_as_the_plain_version(
    num_rows: int, device: str
) -> None:
    half = HALF[device]
    x_TD = golden("md2").model.text.embed(torch.arange(20, 20 + num_rows)).to(device)
    positions = torch.arange(num_rows, device=device)
    owners = positions * 5 % 7 % 6 - 1

    def run(ops: object, dtype: torch.dtype, slot_T: torch.Tensor | None) -> torch.Tensor:
        text, attention = adapted_text(ops, device, dtype), ValuesAlone(num_rows, device, dtype)  # type: ignore[arg-type]
        if slot_T is None:
            return text.forward(x_TD.to(dtype), positions, attention)
        deltas = loaded_slots(device, dtype).deltas(slot_T)
        return text.forward_adapted(x_TD.to(dtype), positions, attention, deltas)

    got, base, is_base = run(TRITON, half, owners), run(TRITON, half, None), owners < 0
    assert set(owners.tolist()) == {-1, 0, 1, 2, 3, 4}
    assert torch.equal(got[is_base], base[is_base])
    exact, rounded = run(PLAIN, torch.float64, owners), run(PLAIN, half, owners)
    assert distance(got, exact) <= 1.1 * distance(rounded, exact)
    assert not torch.equal(got[~is_base], base[~is_base])
