"""The fused forward pass gives what the plain model gives, on a CPU through the plain operations."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kestrel.kernels.ops import PLAIN, Ops
from tests.exhaustive import sweep
from tests.moondream.coarse import coarse
from tests.moondream.goldens import FAMILIES, golden
from tests.runtime.adapted import ValuesAlone
from tests.runtime.paged import paged
from tests.runtime.test_paged_equality import all_skills, dense


@sweep(("family", "in_fixed_sizes"), [("md2", True), ("md3", False), ("md3", True)], always=[("md3", True)])
def test_every_skill_in_one_batch_equals_the_dense_loop(family: str, in_fixed_sizes: bool) -> None:
    g = coarse(family)
    cases = all_skills(g, "a", "small") + all_skills(g, "b", "multi")
    assert paged(g.model, is_fused=True, in_fixed_sizes=in_fixed_sizes).run(*cases) == dense(g, cases)


@sweep("family", FAMILIES, always=["md3"])
def test_chunks_and_odd_pages_change_nothing(family: str) -> None:
    g = coarse(family)
    cases = all_skills(g, "a", "small")
    assert paged(g.model, is_fused=True, page_size=7, max_prefill_tokens=40).run(*cases) == dense(g, cases)


@sweep("family", FAMILIES, always=["md3"])
def test_crops_are_encoded_as_by_the_plain_model(family: str) -> None:
    vision, fused = golden(family).model.vision, copy.deepcopy(golden(family).model.vision)
    fused.fuse(PLAIN)
    patches = torch.randn(3, vision.grid**2, vision.patch_emb.in_features, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        plain, found = vision.encode_crops(patches), fused.encode_crops(patches)
    assert (found - plain).norm() <= 1e-5 * plain.norm()


@sweep("family", FAMILIES, always=["md3"])
def test_early_features_of_a_fused_tower_have_the_biases_that_its_stream_lacks(family: str) -> None:
    vision, fused = golden(family).model.vision, copy.deepcopy(golden(family).model.vision)
    fused.fuse(PLAIN)
    patches = torch.randn(1, vision.grid**2, vision.patch_emb.in_features, generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        plain, found = vision.encode_crops_with_early(patches, 8), fused.encode_crops_with_early(patches, 8)
    assert (found.early - plain.early).norm() <= 1e-5 * plain.early.norm()
    assert (found.final - plain.final).norm() <= 1e-5 * plain.final.norm()


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("num_positions", [1, 20])
@pytest.mark.parametrize("family", FAMILIES)
def test_halves_at_the_same_time_give_what_one_after_the_other_gives(
    family: str, num_positions: int, is_fp8: bool
) -> None:
    positions_T, given = torch.arange(num_positions), ValuesAlone(num_positions, family=family)

    def hidden(ops: Ops) -> Tensor:
        text = copy.deepcopy(coarse(family).model.text)
        text.fuse(ops)
        if is_fp8:
            text.to_fp8()
        with torch.inference_mode():
            return text(text.embed(positions_T * 5), positions_T, given)

    forks: list[int] = []

    def counted(first, second) -> tuple[Tensor, Tensor]:
        forks.append(1)
        return PLAIN.side_by_side(first, second)

    found = hidden(replace(PLAIN, max_forked_rows=32, side_by_side=counted))
    assert len(forks) == len(coarse(family).model.text.blocks)
    expected = hidden(PLAIN)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_model_still_works_and_nothing_is_held_twice(family: str) -> None:
    plain = golden(family).model.text
    text = copy.deepcopy(plain)
    before = sum(parameter.untyped_storage().nbytes() for parameter in text.parameters())
    text.fuse(PLAIN)
    stores = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage() for parameter in text.parameters()}
    assert sum(store.nbytes() for store in stores.values()) == before
    for (name, parameter), (_, expected) in zip(text.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(parameter, expected), name
