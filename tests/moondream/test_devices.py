"""The same model on every device: a generation of each kind, step by step against the reference."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from kestrel.runtime.device import computing
from tests.exhaustive import sweep

from .goldens import FAMILIES, golden, pixels, tensors
from .naive import NaiveMoondream

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = 1e-3  # another device sums in another order


def moved(family: str, device: str, dtype: torch.dtype) -> NaiveMoondream:
    data = golden(family)
    return NaiveMoondream(deepcopy(data.model).to(device, dtype), data.config, data.tokenizer)


@pytest.mark.parametrize("device", DEVICES)
@sweep("family", FAMILIES, always=["md3"])
def test_fp32_takes_the_steps_of_the_reference(family: str, device: str) -> None:
    naive, cases = moved(family, device, torch.float32), golden(family).cases
    runs = {
        "query_small": naive.query(pixels("small"), "what is the cat?", max_tokens=16),
        "detect_small": naive.detect(
            pixels("small"), "dog", max_objects=cases["detect_small"]["settings"]["max_objects"]
        ),
    }
    assert runs["query_small"].token_ids == cases["query_small"]["generated_tokens"]
    assert runs["detect_small"].coord_bins == cases["detect_small"]["coord_bins"]
    assert runs["detect_small"].size_bins == cases["detect_small"]["size_bins"]
    for name, run in runs.items():
        logits = torch.stack([step.logits_V for step in run.steps]).cpu()
        torch.testing.assert_close(logits, tensors(family, "text")[f"{name}.logits"], rtol=0.0, atol=TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_points_at_something(family: str, device: str) -> None:
    with computing(torch.device(device), torch.bfloat16):
        run = moved(family, device, torch.bfloat16).point(pixels("small"), "dog", max_objects=1)
    assert run.last.logits_V.dtype == torch.bfloat16
    assert run.last.logits_V.isfinite().all()
    (point,) = run.output["points"]
    assert 0.0 <= point["x"] < 1.0
    assert 0.0 <= point["y"] < 1.0
