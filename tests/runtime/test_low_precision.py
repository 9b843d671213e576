"""Half precision stays close to the fp32 goldens, on the CPU and on a GPU.

Teacher-forced on the golden tokens, through the paged path. bf16 is held to 98 % equal greedy tokens and to a relative
RMS difference of the logits of 3 %; see docs/LOG.md for what was measured.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from tests.moondream.goldens import FAMILIES, golden
from tests.runtime.forced import compare_with_golden

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_are_the_golden_ones(family: str, device: str) -> None:
    g = golden(family)
    close = compare_with_golden(g, family, deepcopy(g.model).to(device))
    print(f"\n{family} fp32 {device}: {close}")
    assert close.agreement == 1.0
    assert close.largest < (1e-4 if device == "cpu" else 5e-4)  # another device sums in another order


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_stays_close(family: str, device: str) -> None:
    g = golden(family)
    close = compare_with_golden(g, family, deepcopy(g.model).to(device, torch.bfloat16))
    print(f"\n{family} bf16 {device}: {close}")
    assert close.agreement >= 0.98
    assert close.relative_rms < 0.03
