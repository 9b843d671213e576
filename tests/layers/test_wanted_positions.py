"""Where only some positions are wanted, the last block leaves the others out; the rest is as if it had not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from kestrel.kernels.ops import PLAIN
from kestrel.layers.adapt import Adapt
from kestrel.layers.attention import Attend
from kestrel.layers.decoder import TextDecoder
from kestrel.runtime.adapter_slots import SlotAdapt
from tests.layers.test_text_families import causal, from_layers, reference
from tests.moondream.coarse import coarse
from tests.runtime.adapted import ValuesAlone, loaded_slots

FEW, MANY = 9, 40
"""Positions of a step: as many as go through joined matrices, and more."""


def text_model(family: str, is_fused: bool) -> TextDecoder:
    if family == "llama":
        text = from_layers("llama", reference("llama").state_dict())
    else:
        text = copy.deepcopy(coarse(family).model.text)
    if is_fused:
        text.fuse(PLAIN)
    return text


def attention(family: str, num_positions: int) -> Attend:
    return causal if family == "llama" else ValuesAlone(num_positions, family=family)


def all_and_wanted(
    text: TextDecoder, family: str, num_positions: int, wanted: list[int], adapt: Adapt | None = None
) -> tuple[Tensor, Tensor]:
    ids_T, positions_T, wanted_N = (
        torch.arange(num_positions) * 5 % 97,
        torch.arange(num_positions),
        torch.tensor(wanted),
    )
    given = text.embed(ids_T), positions_T, attention(family, num_positions), adapt
    return text(*given)[wanted_N], text(*given, wanted_N)


@pytest.mark.parametrize("wanted", [[0], [6, 2, 8]])
@pytest.mark.parametrize("num_positions", [FEW, MANY])
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("family", ["llama", "md2", "md3"])
@torch.inference_mode()
def test_wanted_positions_are_what_they_are_among_all(
    family: str, is_fused: bool, num_positions: int, wanted: list[int]
) -> None:
    expected, found = all_and_wanted(text_model(family, is_fused), family, num_positions, wanted)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_wanted", [1, 20])
@pytest.mark.parametrize("family", ["llama", "md2", "md3"])
@torch.inference_mode()
def test_wanted_positions_of_float8_models(family: str, num_wanted: int) -> None:
    text = text_model(family, is_fused=True)
    text.to_fp8()
    expected, found = all_and_wanted(text, family, MANY, list(range(7, 7 + num_wanted)))
    # A handful of rows is multiplied as it is, many are rounded to float8 first.
    atol = 1e-5 if num_wanted > PLAIN.max_small_rows else 0.05 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("num_positions", [FEW, MANY])
@pytest.mark.parametrize("family", ["md2", "md3"])
@torch.inference_mode()
def test_wanted_positions_of_adapted_rows(family: str, num_positions: int) -> None:
    slots_T = torch.arange(num_positions) % 4
    adapt = SlotAdapt(loaded_slots(family=family), slots_T, PLAIN)
    expected, found = all_and_wanted(text_model(family, is_fused=True), family, num_positions, [3, 5], adapt)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Counted(torch.overrides.TorchFunctionMode):
    """How many rows linear layers were given in all."""

    num_rows = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            self.num_rows += len(args[0])
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_the_last_block_computes_the_wanted_positions_alone() -> None:
    text, counts = text_model("llama", is_fused=False), []
    for wanted_N in (None, torch.tensor([4, 7])):
        with Counted() as counted:
            text(text.embed(torch.arange(MANY)), torch.arange(MANY), causal, None, wanted_N)
        counts.append(counted.num_rows)
    matrices_behind_attention = 3
    assert counts[0] - counts[1] == matrices_behind_attention * (MANY - 2)
