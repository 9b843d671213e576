"""The float8 forward passes, on a CPU through the plain operations.

Truth is a plain model that computes with numbers rounded to float8 (`fake_float8`). Where rows are rounded too, the
last bit of fp32 decides now and then to which side, and a stack of random blocks makes much of it: blocks are compared
one by one, the whole model within a bound. How far float8 is from the exact model is stated beside.
"""

from __future__ import annotations

import copy
from statistics import median

import pytest
import torch
from torch import Tensor, nn

from kestrel.errors import ConfigError
from kestrel.kernels.fp8_linear import weights_to_fp8
from kestrel.kernels.ops import PLAIN
from kestrel.models.adapting import SingleAdapter
from kestrel.moondream.config import MOONDREAM2, MOONDREAM3, MOONDREAM_0_5B, MoeConfig
from kestrel.moondream.forward import QuantisedForward, check_quantisable
from kestrel.moondream.fp8_text import Fp8Text
from kestrel.moondream.fp8_vision import Fp8Vision
from kestrel.moondream.fp8_weights import Fp8Experts
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.moe import MoeMlp
from kestrel.moondream.quantised_weights import KvScale
from kestrel.moondream.runtime import MoondreamDecoder, cache_scales
from kestrel.runtime.contract import PageCopy
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.step_attention import ChunkAttention, StoredChunks
from tests.moondream.fake_float8 import fake_fp8, fake_fp8_experts, rounded
from tests.moondream.goldens import FAMILIES, golden, golden_adapter
from tests.runtime.forced import closeness, compare_engine, logits_of, text_cases
from tests.runtime.paged import Paged, paged

FP8 = torch.float8_e4m3fn
ONE_BLOCK = 5e-3
"""Of a block's own share; a scale or a half in the wrong place gives no less than a tenth."""


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


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
@pytest.mark.parametrize("index", [0, 1, 13, 26])
@torch.inference_mode()
def test_a_vision_block_computes_with_rounded_numbers(family: str, index: int) -> None:
    model = one_block(golden(family).model, index)
    vision = model.vision
    patches = drawn(2, vision.grid**2, vision.patch_emb.in_features)
    exact, expected = vision.encode_crops(patches), fake_fp8(model).vision.encode_crops(patches)
    found = Fp8Vision(vision, PLAIN).encode_crops(patches)
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
@pytest.mark.parametrize("num_positions", [1, 16, 17, 40])
@torch.inference_mode()
def test_a_text_block_computes_with_rounded_numbers(family: str, index: int, num_positions: int) -> None:
    model = one_block(golden(family).model, index)
    x_TD, positions_T = drawn(num_positions, model.config.text.dim), torch.arange(num_positions)
    exact = model.text(x_TD, positions_T, attention(model, num_positions)) - x_TD
    expected = fake_fp8(model).text(x_TD, positions_T, attention(model, num_positions)) - x_TD
    found = Fp8Text(model.text, PLAIN).forward(x_TD, positions_T, attention(model, num_positions)) - x_TD
    assert relative(found, expected) < (1e-5 if num_positions <= 16 else ONE_BLOCK)
    assert 5e-3 < relative(found, exact) < 0.15


def all_logits(engine: Paged, family: str, names: list[str]) -> Tensor:
    return torch.cat([logits_of(engine, golden(family), name) for name in names])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("in_fixed_sizes", [False, True])
def test_a_short_text_through_the_whole_model_is_that_of_rounded_weights(family: str, in_fixed_sizes: bool) -> None:
    g = golden(family)
    names = ["query_text_only"]
    found = all_logits(paged(g.model, quantization="fp8", in_fixed_sizes=in_fixed_sizes), family, names)
    expected = all_logits(paged(fake_fp8(g.model)), family, names)
    assert len(found) > 5
    assert relative(found, expected) < 1e-5
    assert relative(found, all_logits(paged(g.model), family, names)) > 1e-2


def test_with_experts_alone_in_float8_pictures_and_texts_are_those_of_rounded_experts() -> None:
    g = golden("md3")
    names = ["query_small", "query_text_only"]
    found = all_logits(paged(g.model, quantization="fp8-experts"), "md3", names)
    assert relative(found, all_logits(paged(fake_fp8_experts(g.model)), "md3", names)) < 1e-5
    assert 1e-2 < relative(found, all_logits(paged(g.model), "md3", names)) < 0.08


@pytest.mark.parametrize(("family", "to_rounded", "to_exact", "agreement"), [
    ("md2", 0.04, 0.15, 0.90),
    ("md3", 0.08, 0.30, 0.70),
])  # fmt: skip
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
    experts = MoeMlp(32, MoeConfig(num_experts=3, start_layer=0, experts_per_token=2, expert_inner_dim=16))
    fc1, fc2 = experts.fc1.weight.detach().clone(), experts.fc2.weight.detach().clone()
    made = Fp8Experts.of(experts)
    assert (made.fc1_EFD.dtype, made.fc1_scale_EF.shape, made.fc2_scale_ED.shape) == (FP8, (3, 32), (3, 32))
    assert torch.equal(made.fc1_scale_EF, fc1.abs().amax(2) / 448)
    assert torch.equal(made.fc1_EFD.float() * made.fc1_scale_EF[:, :, None], rounded(fc1))
    assert torch.equal(made.fc2_EDI.float() * made.fc2_scale_ED[:, :, None], rounded(fc2))


def test_experts_that_a_checkpoint_kept_in_float8_come_through_bfloat16_unchanged() -> None:
    numbers, scale = weights_to_fp8(drawn(64, 128))
    again, scale_again = weights_to_fp8((numbers.float() * scale[:, None]).to(torch.bfloat16))
    assert torch.equal(again.float(), numbers.float())
    torch.testing.assert_close(scale_again, scale, rtol=2.0**-8, atol=0.0)


@pytest.mark.parametrize(("family", "quantization"), [("md2", "fp8"), ("md3", "fp8"), ("md3", "fp8-experts")])
def test_the_originals_are_given_up_and_cannot_be_quantised_again(family: str, quantization: str) -> None:
    model = copy.deepcopy(golden(family).model)
    forward = QuantisedForward.of(quantization, model, PLAIN)
    left = {name for name, p in model.named_parameters() if ".blocks." in name and p.ndim > 1 and p.numel()}
    kept = (".attn.tau.", "router.")
    if quantization == "fp8":
        kept += (".blocks.1.attn.", ".blocks.2.attn.") if family == "md3" else ()
        assert not [name for name in left if name.startswith("vision.") or not any(part in name for part in kept)]
    else:
        assert not [name for name in left if ".mlp.fc" in name and name.startswith(("text.blocks.1", "text.blocks.2"))]
    with pytest.raises(ConfigError, match=r"quantization: .* load the model again"):
        QuantisedForward.of(quantization, model, PLAIN)
    with pytest.raises(AssertionError, match="no adapter slots"):
        forward.text(torch.zeros(1, 128), torch.zeros(1), attention(model, 1), SingleAdapter(golden_adapter(family)))


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
@pytest.mark.parametrize("choices", [{"is_fused": True, "in_fixed_sizes": True}, {}])
def test_keys_and_values_in_float8_cost_little(family: str, largest: float, choices: dict[str, bool]) -> None:
    g = golden(family)
    names = [name for name in text_cases(g) if not choices or g.cases[name]["image"] != "multi"]
    close = compare_engine(g, family, paged(g.model, kv_dtype=FP8, **choices), names)
    print(f"\n{family} {choices}: {close}")
    assert 1e-3 < close.relative_rms < largest
    assert close.agreement >= 0.9


@pytest.mark.parametrize("choices", [{"is_fused": True}, {"is_fused": True, "in_fixed_sizes": True}, {}])
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


def test_weights_and_cache_in_float8_go_together() -> None:
    g = golden("md2")
    engine = paged(g.model, quantization="fp8", kv_dtype=FP8, in_fixed_sizes=True)
    assert compare_engine(g, "md2", engine, ["query_small", "query_text_only"]).relative_rms < 0.16


def test_pages_of_float8_are_copied() -> None:
    shape = MoondreamDecoder(golden("md2").model).shape
    kv = PagedKVCache(shape, 3, 4, FP8, torch.device("cpu"))
    k, v = kv.layer(2)
    k[:4], v[:4] = drawn(4, *k.shape[1:]).to(FP8), drawn(4, *v.shape[1:]).to(FP8)
    kv.copy_pages([PageCopy(source=0, target=2)])
    assert torch.equal(k[8:12].float(), k[:4].float())
    assert torch.equal(v[8:12].float(), v[:4].float())
    assert v[:4].float().any()
    assert not k[4:8].float().any()
