"""Adapters on the golden models: against the reference, merged into the weights, and several in one batch."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from kestrel.adapters import Adapter, AdapterTarget, LowRankPair
from kestrel.kernels.ops import PLAIN
from kestrel.layers.attention import Heads
from kestrel.models.adapting import merged_delta
from kestrel.moondream.decoder import adapter_shape
from kestrel.moondream.model import MoondreamModel, TextModel
from kestrel.runtime.adapter_slots import NO_SLOT, AdapterSlots, SlotAdapt
from kestrel.runtime.contract import AdapterLoad
from kestrel.tokens import Text

from .goldens import FAMILIES, golden, golden_adapter, pixels, single_adapter, tensors
from .naive import NaiveMoondream
from .naive_generator import NO_BLOCK, DenseAttention

CPU = torch.device("cpu")


def causal(num_positions: int) -> DenseAttention:
    attention = DenseAttention()
    attention.block_of = [NO_BLOCK] * num_positions
    return attention


def own_values(layer: int, heads: Heads) -> Tensor:
    """Attention of which each position sees its own value only."""
    values_TD = heads.rotated()[2].flatten(1)
    return values_TD


def random_adapter(family: str, rank: int, seed: int, alpha: float | None = None) -> Adapter:
    """Every matrix of every layer, with deltas as large as those of a real fine-tune."""
    shape = adapter_shape(golden(family).config.text)
    dice = torch.Generator().manual_seed(seed)

    def factor(target: AdapterTarget, side: str) -> Tensor:
        return torch.randn(shape.tensor_shape(target, side, rank), generator=dice) * 0.1  # type: ignore[arg-type]

    pairs = {target: LowRankPair(factor(target, "a"), factor(target, "b")) for target in shape.targets}
    return Adapter("kestrel-adapter", rank, pairs, alpha=alpha)


def matrix_of(model: MoondreamModel, target: AdapterTarget) -> Tensor:
    block = model.text.get_submodule(f"blocks.{target.layer}")
    part = "attn" if target.matrix in ("qkv", "proj") else "mlp"
    return block.get_submodule(f"{part}.{target.matrix}").get_parameter("weight")


def merged(family: str, adapter: Adapter) -> TextModel:
    model = deepcopy(golden(family).model)
    with torch.no_grad():
        for target in adapter.targets:
            matrix_of(model, target).add_(merged_delta(adapter, target))
    return model.text


@torch.inference_mode()
def test_a_dense_layer_with_a_hosted_adapter_equals_the_reference() -> None:
    mlp, expected = golden("md3").model.text.blocks[0].mlp, tensors("md3", "lora_expected")
    out = mlp.adapted(tensors("md3", "units")["moe_in"][0], 0, single_adapter("md3", golden_adapter("md3")))
    torch.testing.assert_close(out, expected["dense_layer0_out"][0], rtol=0.0, atol=2e-5)


@torch.inference_mode()
def test_a_layer_of_experts_with_a_hosted_adapter_equals_the_reference() -> None:
    mlp, expected = golden("md3").model.text.blocks[1].mlp, tensors("md3", "lora_expected")
    x_TD = tensors("md3", "units")["moe_in"][0]
    out = mlp.adapted(x_TD, 1, single_adapter("md3", golden_adapter("md3")))
    torch.testing.assert_close(out, expected["moe_layer1_out"][0], rtol=0.0, atol=2e-5)
    assert not torch.allclose(mlp(x_TD), out, atol=1e-3)


@torch.inference_mode()
def test_a_whole_prompt_with_a_hosted_adapter_equals_the_reference() -> None:
    data, expected = golden("md3"), tensors("md3", "lora_expected")
    adapt = single_adapter("md3", golden_adapter("md3"))
    naive = NaiveMoondream(data.model, data.config, data.tokenizer, data.naive.image_cache, adapt)
    items, images = naive.context(pixels(data.onepass["image"]), Text(data.onepass["prompt_tokens_after_image"]))
    run = naive.prefill(items, images)
    torch.testing.assert_close(run.last.logits_V, expected["onepass_lora.logits_last"], rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rank", "alpha"), [(6, None), (12, 24.0)])
@torch.inference_mode()
def test_a_merged_adapter_equals_one_that_is_applied(family: str, rank: int, alpha: float | None) -> None:
    adapter = random_adapter(family, rank, seed=rank, alpha=alpha)
    text = golden(family).model.text
    x_TD, positions = text.embed(torch.arange(20, 29)), torch.arange(9)
    applied = text(x_TD, positions, causal(9), single_adapter(family, adapter))
    built_in = merged(family, adapter)(x_TD, positions, causal(9))
    scale = built_in.abs().max()
    torch.testing.assert_close(applied / scale, built_in / scale, rtol=0.0, atol=1e-5)
    assert not torch.allclose(text(x_TD, positions, causal(9)), built_in, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_adapters_of_several_ranks_in_one_batch_equal_each_alone_and_leave_the_base_untouched(family: str) -> None:
    text, config = golden(family).model.text, golden(family).config.text
    adapters = [
        random_adapter(family, 6, seed=1),
        random_adapter(family, 24, seed=2, alpha=12.0),
        golden_adapter(family),
        replace(random_adapter(family, 48, seed=3), proj_input="block_norm"),
    ]
    slots = AdapterSlots(adapter_shape(config), num_slots=4, max_rank=48, device=CPU, dtype=torch.float32)
    for slot, adapter in enumerate(adapters):
        slots.load(AdapterLoad(slot, f"{slot}", adapter))
    owners: list[int | None] = [0, 1, 2, 3, None] * 5
    Random(0).shuffle(owners)
    x_TD = text.embed(torch.arange(20, 20 + len(owners)))
    positions = torch.arange(len(owners))
    together = text(
        x_TD,
        positions,
        own_values,
        SlotAdapt(slots, torch.tensor([NO_SLOT if owner is None else owner for owner in owners]), PLAIN),
    )
    base = text(x_TD, positions, own_values)
    for slot, adapter in enumerate(adapters):
        at = [t for t, owner in enumerate(owners) if owner == slot]
        alone = text(x_TD, positions, own_values, single_adapter(family, adapter))
        torch.testing.assert_close(together[at], alone[at], rtol=1e-5, atol=1e-4)
        assert not torch.allclose(together[at], base[at], atol=1e-3)
    none = [t for t, owner in enumerate(owners) if owner is None]
    assert torch.equal(together[none], base[none])


@torch.inference_mode()
def test_a_slot_taken_over_shows_nothing_of_the_adapter_before() -> None:
    text, shape = golden("md3").model.text, adapter_shape(golden("md3").config.text)
    slots = AdapterSlots(shape, num_slots=1, max_rank=48, device=CPU, dtype=torch.float32)
    slots.load(AdapterLoad(0, "wide", random_adapter("md3", 48, seed=1)))
    slots.load(AdapterLoad(0, "narrow", golden_adapter("md3")))
    x_TD, positions = text.embed(torch.arange(20, 27)), torch.arange(7)
    reused = text(x_TD, positions, causal(7), SlotAdapt(slots, torch.zeros(7, dtype=torch.int64), PLAIN))
    alone = text(x_TD, positions, causal(7), single_adapter("md3", golden_adapter("md3")))
    torch.testing.assert_close(reused, alone, rtol=1e-5, atol=1e-5)
