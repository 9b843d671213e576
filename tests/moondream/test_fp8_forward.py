"""The float8 forward passes, on a CPU through the plain operations.

Truth is a plain model that computes with numbers rounded to float8 (`fake_float8`). Where rows are rounded too, the
last bit of fp32 decides now and then to which side, and a stack of random blocks makes much of it: blocks are compared
one by one, the whole model within a bound. How far float8 is from the exact model is stated beside.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from statistics import median

import pytest
import torch
from torch import Tensor, nn

from kestrel.errors import ConfigError
from kestrel.kernels.fp8 import weights_to_fp8
from kestrel.kernels.ops import PLAIN
from kestrel.layers.mlp import Moe
from kestrel.models.contract import KvScale
from kestrel.moondream.config import MOONDREAM2, MOONDREAM3, MOONDREAM_0_5B
from kestrel.moondream.decoder import MoondreamDecoder, adapter_shape
from kestrel.moondream.model import MoondreamModel, check_quantisable
from kestrel.runtime.adapter_slots import AdapterSlots, SlotAdapt
from kestrel.runtime.attention import ChunkAttention, PagedKVCache, StoredChunks
from kestrel.runtime.bring_up import cache_scales
from kestrel.runtime.contract import AdapterLoad, PageCopy
from tests.exhaustive import sweep
from tests.kernels.page_orders import Order, orders
from tests.moondream.fake_float8 import RoundsManyRows, fake_fp8, fake_fp8_experts, fake_fp8_weights, rounded
from tests.moondream.goldens import FAMILIES, golden, golden_adapter, single_adapter
from tests.moondream.test_lora import own_values, random_adapter
from tests.runtime.forced import closeness, compare_engine, logits_of, text_cases
from tests.runtime.paged import Paged, paged

FP8 = torch.float8_e4m3fn
ONE_BLOCK = 5e-3
"""Of a block's own share; a scale or a half in the wrong place gives no less than a tenth."""


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def quantised(model: MoondreamModel, quantization: str = "fp8") -> None:
    model.fuse(PLAIN)
    model.quantise(quantization)


def one_block(model: MoondreamModel, index: int) -> MoondreamModel:
    """The same with a single block in vision and in text, the latter as the first layer."""
    layer = index % len(model.text.blocks)
    kept = (model.vision.blocks[index], model.text.blocks[layer])
    others = [block for block in (*model.vision.blocks, *model.text.blocks) if block not in kept]
    small = copy.deepcopy(model, {id(block): block for block in others})
    small.vision.blocks = nn.ModuleList([small.vision.blocks[index]])
    small.text.blocks = nn.ModuleList([small.text.blocks[layer]])
    small.text.blocks[0].layer = 0
    return small


@pytest.mark.parametrize("family", FAMILIES)
@sweep("index", [0, 1, 13, 26], always=[0, 26])
@torch.inference_mode()
def test_a_vision_block_computes_with_rounded_numbers(family: str, index: int) -> None:
    model = one_block(golden(family).model, index)
    vision = model.vision
    patches = drawn(2, vision.grid**2, vision.patch_emb.in_features)
    exact, expected = vision.encode_crops(patches), fake_fp8(model).vision.encode_crops(patches)
    quantised(model)
    found = vision.encode_crops(patches)
    assert relative(found, expected) < ONE_BLOCK
    assert 5e-3 < relative(found, exact) < 0.06


def attention(model: MoondreamModel, num_positions: int) -> ChunkAttention:
    """One causal chunk at the beginning of its row."""
    shape = MoondreamDecoder(model).shape
    kv = PagedKVCache(shape, 1, num_positions, torch.float32, torch.device("cpu"))
    zero_C = torch.zeros(1, dtype=torch.int64)
    chunks = StoredChunks(zero_C[:, None], zero_C, zero_C + num_positions, zero_C, zero_C, num_positions)
    return ChunkAttention(kv, PLAIN, torch.arange(num_positions), [chunks])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("index", [0, 1, 2])
@sweep("num_positions", [1, 16, 17, 40], always=[16, 17])
@torch.inference_mode()
def test_a_text_block_computes_with_rounded_numbers(family: str, index: int, num_positions: int) -> None:
    model = one_block(golden(family).model, index)
    x_TD, positions_T = drawn(num_positions, model.config.text.dim), torch.arange(num_positions)
    exact = model.text(x_TD, positions_T, attention(model, num_positions)) - x_TD
    expected = fake_fp8(model).text(x_TD, positions_T, attention(model, num_positions)) - x_TD
    quantised(model)
    found = model.text(x_TD, positions_T, attention(model, num_positions)) - x_TD
    assert relative(found, expected) < (1e-5 if num_positions <= 16 else ONE_BLOCK)
    assert 5e-3 < relative(found, exact) < 0.15


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_positions", [1, 2, 16])
@torch.inference_mode()
def test_few_rows_are_rounded_where_they_are_multiplied_in_float8(
    family: str, num_positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundsManyRows, "most_exact_rows", 1)
    model = one_block(golden(family).model, 0)
    x_TD, positions_T = drawn(num_positions, model.config.text.dim), torch.arange(num_positions)
    expected = fake_fp8(model).text(x_TD, positions_T, attention(model, num_positions)) - x_TD
    model.fuse(replace(PLAIN, max_small_fp8_rows=16))
    model.quantise("fp8")
    found = model.text(x_TD, positions_T, attention(model, num_positions)) - x_TD
    assert relative(found, expected) < (1e-5 if num_positions == 1 else ONE_BLOCK)


def test_steps_of_dense_models_are_filled_up_where_few_rows_are_slow() -> None:
    def filled_up(family: str, most: int, quantization: str = "fp8") -> list[int]:
        model = copy.deepcopy(golden(family).model)
        model.fuse(replace(PLAIN, max_small_fp8_rows=most))
        model.quantise(quantization)
        return [model.text.filled_up(rows) for rows in (1, 2, 16, 17, 64, 70)]

    assert filled_up("md2", 0) == [1, 64, 64, 64, 64, 70]
    assert filled_up("md2", 16) == [1, 2, 16, 64, 64, 70]
    assert filled_up("md3", 0) == filled_up("md2", 0, "none") == [1, 2, 16, 17, 64, 70]


def all_logits(engine: Paged, family: str, names: list[str]) -> Tensor:
    return torch.cat([logits_of(engine, golden(family), name) for name in names])


@sweep(
    ("family", "in_fixed_sizes"),
    [("md2", False), ("md2", True), ("md3", False), ("md3", True)],
    always=[("md2", False), ("md3", True)],
)
def test_a_short_text_through_the_whole_model_is_that_of_rounded_weights(family: str, in_fixed_sizes: bool) -> None:
    g = golden(family)
    names = ["query_text_only"]
    found = all_logits(paged(g.model, quantization="fp8", in_fixed_sizes=in_fixed_sizes), family, names)
    expected = all_logits(paged(fake_fp8(g.model)), family, names)
    assert len(found) > 5
    assert relative(found, expected) < 1e-5
    assert relative(found, all_logits(paged(g.model), family, names)) > 1e-2


@pytest.mark.exhaustive
def test_with_experts_alone_in_float8_pictures_and_texts_are_those_of_rounded_experts() -> None:
    g = golden("md3")
    names = ["query_small", "query_text_only"]
    found = all_logits(paged(g.model, quantization="fp8-experts"), "md3", names)
    assert relative(found, all_logits(paged(fake_fp8_experts(g.model)), "md3", names)) < 1e-5
    assert 1e-2 < relative(found, all_logits(paged(g.model), "md3", names)) < 0.08


@sweep(
    ("family", "to_rounded", "to_exact", "agreement"),
    [("md2", 0.04, 0.15, 0.90), ("md3", 0.08, 0.30, 0.70)],
    always=[("md2", 0.04, 0.15, 0.90)],
)
def test_pictures_and_texts_in_float8_stay_near(
    family: str, to_rounded: float, to_exact: float, agreement: float
) -> None:
    g = golden(family)
    # A picture of many crops for one of the families: what sees them is the same in both.
    names = [name for name in text_cases(g) if family == "md3" or g.cases[name]["image"] != "multi"]
    ours, rounded_weights = paged(g.model, quantization="fp8"), paged(fake_fp8(g.model))
    logits = {name: logits_of(ours, g, name) for name in names}
    errors = [relative(found, logits_of(rounded_weights, g, name)) for name, found in logits.items()]
    assert median(errors) < to_rounded
    assert max(errors) < 2 * to_rounded, "a case whose positions go to other experts"
    close = closeness(family, logits)
    print(f"\n{family} fp8: {close}")
    assert close.relative_rms < to_exact
    assert close.agreement >= agreement


def test_experts_have_a_scale_per_expert_and_output() -> None:
    experts = Moe(32, inner_dim=16, num_experts=3, experts_per_token=2)
    fc1, fc2 = experts.fc1.weight.detach().clone(), experts.fc2.weight.detach().clone()
    experts.to_fp8()
    fc1_scale_EF, fc2_scale_ED = experts.fc1.scale_EF, experts.fc2.scale_EF
    assert fc1_scale_EF is not None
    assert fc2_scale_ED is not None
    assert (experts.fc1.weight.dtype, fc1_scale_EF.shape, fc2_scale_ED.shape) == (FP8, (3, 32), (3, 32))
    assert torch.equal(fc1_scale_EF, fc1.abs().amax(2) / 448)
    assert torch.equal(experts.fc1.weight.float() * fc1_scale_EF[:, :, None], rounded(fc1))
    assert torch.equal(experts.fc2.weight.float() * fc2_scale_ED[:, :, None], rounded(fc2))
    assert torch.equal(experts.fc1.matrix(2, torch.float32), rounded(fc1)[2])


def test_experts_that_a_checkpoint_kept_in_float8_come_through_bfloat16_unchanged() -> None:
    numbers, scale = weights_to_fp8(drawn(64, 128))
    again, scale_again = weights_to_fp8((numbers.float() * scale[:, None]).to(torch.bfloat16))
    assert torch.equal(again.float(), numbers.float())
    torch.testing.assert_close(scale_again, scale, rtol=2.0**-8, atol=0.0)


@pytest.mark.parametrize(("family", "quantization"), [("md2", "fp8"), ("md3", "fp8"), ("md3", "fp8-experts")])
def test_the_originals_are_given_up_and_cannot_be_quantised_otherwise(family: str, quantization: str) -> None:
    model = copy.deepcopy(golden(family).model)
    quantised(model, quantization)
    left = {name for name, p in model.named_parameters() if ".blocks." in name and p.ndim > 1 and p.dtype != FP8}
    kept = (".attn.tau.", "router.")
    if quantization == "fp8":
        kept += (".blocks.1.attn.", ".blocks.2.attn.") if family == "md3" else ()
        assert not [name for name in left if name.startswith("vision.") or not any(part in name for part in kept)]
    else:
        assert not [name for name in left if ".mlp.fc" in name and name.startswith(("text.blocks.1", "text.blocks.2"))]
    model.quantise(quantization)
    with pytest.raises(ConfigError, match=r"quantization: .* load it again for 'none'"):
        model.quantise("none")


@pytest.mark.parametrize("family", FAMILIES)
@sweep("num_positions", [5, 40, 80], always=[5, 40])
@torch.inference_mode()
def test_adapters_are_added_to_a_float8_base(family: str, num_positions: int) -> None:
    """Their deltas are not rounded; the base rows that they are added to are, as without them."""
    model, owners = copy.deepcopy(golden(family).model), torch.arange(num_positions) % 3 - 1
    slots = AdapterSlots(adapter_shape(model.config.text), 2, 48, torch.device("cpu"), torch.float32)
    chosen = [golden_adapter(family), random_adapter(family, 24, seed=2, alpha=12.0)]
    for slot, adapter in enumerate(chosen):
        slots.load(AdapterLoad(slot, str(slot), adapter))
    x_TD, positions_T = drawn(num_positions, model.config.text.dim), torch.arange(num_positions)
    rounded_weights = fake_fp8_weights(model).text
    alone = [rounded_weights(x_TD, positions_T, own_values, single_adapter(family, adapter)) for adapter in chosen]
    exact = rounded_weights(x_TD, positions_T, own_values)
    quantised(model)
    found = model.text(x_TD, positions_T, own_values, SlotAdapt(slots, owners, PLAIN))
    base = model.text(x_TD, positions_T, own_values)
    for slot, expected in ((-1, exact), (0, alone[0]), (1, alone[1])):
        at = owners == slot
        assert relative(found[at], expected[at]) < (1e-5 if num_positions <= 16 else 0.12)
        assert slot < 0 or relative(base[at], expected[at]) > 0.1


def test_models_that_cannot_be_quantised_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"quantization: 'fp8-experts' needs a model with experts.* use fp8"):
        check_quantisable("fp8-experts", MOONDREAM2)
    with pytest.raises(ConfigError, match=r"multiples of 16, and this model has sides of \[2690\]; use none"):
        check_quantisable("fp8", MOONDREAM_0_5B)
    check_quantisable("fp8", MOONDREAM2)
    check_quantisable("fp8", MOONDREAM3)
    check_quantisable("fp8-experts", MOONDREAM3)


# That a fused pass in any size reads and writes float8 as well is told by the scales below.
@pytest.mark.parametrize(("family", "largest"), [("md2", 0.05), ("md3", 0.15)])
@sweep("choices", [{"is_fused": True, "in_fixed_sizes": True}, {}], always=[{"is_fused": True, "in_fixed_sizes": True}])
def test_keys_and_values_in_float8_cost_little(family: str, largest: float, choices: dict[str, bool]) -> None:
    g = golden(family)
    names = [name for name in text_cases(g) if not choices or g.cases[name]["image"] != "multi"]
    close = compare_engine(g, family, paged(g.model, kv_dtype=FP8, **choices), names)
    print(f"\n{family} {choices}: {close}")
    assert 1e-3 < close.relative_rms < largest
    assert close.agreement >= 0.9


@sweep("choices", [{"is_fused": True}, {"is_fused": True, "in_fixed_sizes": True}, {}], always=[{"is_fused": True}])
def test_scales_of_the_cache_are_divided_by_and_multiplied_with(choices: dict[str, bool]) -> None:
    g = golden("md2")
    names = text_cases(g)[:1]
    plain = all_logits(paged(g.model, kv_dtype=FP8, **choices), "md2", names)
    # A power of two moves no number from one float8 to another, unless it is too small or too large for the type.
    doubled = [(2.0, 0.5)] * 3
    same = all_logits(paged(g.model, kv_dtype=FP8, kv_scales=doubled, **choices), "md2", names)
    assert relative(same, plain) < 5e-3
    # What does not fit is cut off.
    tiny = [(2.0**-12, 1.0)] * 3
    assert relative(all_logits(paged(g.model, kv_dtype=FP8, kv_scales=tiny, **choices), "md2", names), plain) > 0.05


def test_a_checkpoint_has_scales_for_every_layer_or_for_none() -> None:
    scales = {0: KvScale(0.5, 0.25), 1: KvScale(1.0, 2.0)}
    assert cache_scales(scales, FP8, 2) == [(0.5, 0.25), (1.0, 2.0)]
    assert cache_scales(scales, torch.bfloat16, 3) == cache_scales({}, FP8, 3) == []
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: .* lacks those of \[2\]; use auto"):
        cache_scales(scales, FP8, 3)


@pytest.mark.exhaustive
def test_weights_and_cache_in_float8_go_together() -> None:
    g = golden("md2")
    engine = paged(g.model, quantization="fp8", kv_dtype=FP8, in_fixed_sizes=True)
    assert compare_engine(g, "md2", engine, ["query_small", "query_text_only"]).relative_rms < 0.16


@orders
def test_pages_of_float8_are_copied(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrel.runtime.attention.as_pages", order)
    shape = MoondreamDecoder(golden("md2").model).shape
    kv = PagedKVCache(shape, 3, 4, FP8, torch.device("cpu"))
    k, v = kv.layer(2)
    k[0], v[0] = drawn(*k.shape[1:]).to(FP8), drawn(*v.shape[1:]).to(FP8)
    kv.copy_pages([PageCopy(source=0, target=2)])
    assert torch.equal(k[2].float(), k[0].float())
    assert torch.equal(v[2].float(), v[0].float())
    assert v[0].float().any()
    assert not k[1].float().any()
