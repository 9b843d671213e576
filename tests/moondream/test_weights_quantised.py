"""Quantised weights: float8 experts against the golden output, 4-bit groups against a plain dequantiser."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kestrel.errors import CheckpointError
from kestrel.layers.mlp import Moe
from kestrel.models.contract import KvScale
from kestrel.moondream.weights import read_kv_scales

from .weight_sets import assert_equals_golden, checkpoint_of, golden_file, load, pt_named

SCALE = "text_model.transformer.h.1.moe_quant.up_scale"
EXPERTS = "text_model.transformer.h.1.mlp.experts.weight"
PACKED = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


def fp8_tensors() -> dict[str, Tensor]:
    return pt_named("md3") | golden_file("md3", "moe_fp8_overlay")


def test_float8_experts_are_dequantised_by_expert_and_row(tmp_path: Path) -> None:
    model = load(fp8_tensors(), tmp_path, "md3")
    overlay = golden_file("md3", "moe_fp8_overlay")
    expected = overlay[EXPERTS].float() * overlay[SCALE][:, :, None]
    assert torch.equal(model.get_parameter("text.blocks.1.mlp.fc1.weight"), expected)
    units = golden_file("md3", "units")
    mlp = model.get_submodule("text.blocks.1.mlp")
    assert isinstance(mlp, Moe)
    out = mlp(units["moe_in"][0])
    torch.testing.assert_close(out, units["moe_out_fp8_dequant"][0], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(out, units["moe_out"][0], atol=1e-5, rtol=1e-4)


def test_float8_experts_under_hub_names_load_too(tmp_path: Path) -> None:
    tensors = golden_file("md3", "model")
    for layer in (1, 2):
        for matrix in ("fc1", "fc2"):
            del tensors[f"model.text.blocks.{layer}.mlp.{matrix}.weight"]
    model = load(tensors | golden_file("md3", "moe_fp8_overlay"), tmp_path, "md3")
    overlay = golden_file("md3", "moe_fp8_overlay")
    assert torch.equal(
        model.get_parameter("text.blocks.1.mlp.fc1.weight"), overlay[EXPERTS].float() * overlay[SCALE][:, :, None]
    )


def test_float8_without_or_with_misshapen_scales_is_refused(tmp_path: Path) -> None:
    tensors = fp8_tensors()
    scale = tensors.pop(SCALE)
    with pytest.raises(CheckpointError, match=r"h\.1\.mlp\.experts\.weight is float8 without its scales"):
        load(tensors, tmp_path, "md3")
    with pytest.raises(CheckpointError, match=r"up_scale is \[8, 32\], expected \[8, 64\]"):
        load(tensors | {SCALE: scale[:, :32].contiguous()}, tmp_path, "md3")


def test_scales_of_experts_that_are_not_float8_are_unexpected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"unexpected tensors \(1\): \S+h\.1\.moe_quant\.up_scale"):
        load(pt_named("md3") | {SCALE: torch.ones(8, 64)}, tmp_path, "md3")


def test_float8_elsewhere_is_refused(tmp_path: Path) -> None:
    tensors = golden_file("md3", "model")
    tensors["model.text.lm_head.weight"] = tensors["model.text.lm_head.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is stored as float8_e4m3fn without scales"):
        load(tensors, tmp_path, "md3")


def test_kv_scales_are_returned_and_change_no_weight(tmp_path: Path) -> None:
    overlay = golden_file("md3", "moe_fp8_overlay")
    scales = {name: tensor for name, tensor in overlay.items() if "kv_quantizer" in name}
    assert_equals_golden(load(pt_named("md3") | scales, tmp_path, "md3"), "md3")
    with checkpoint_of(scales, tmp_path) as checkpoint:
        found = read_kv_scales(checkpoint)
    base = "text_model.transformer.h.{}.kv_quantizer.{}_scale"
    assert found == {i: KvScale(*(float(scales[base.format(i, kind)]) for kind in "kv")) for i in (1, 2)}


def test_kv_scales_of_a_layer_that_does_not_exist_are_unexpected(tmp_path: Path) -> None:
    extra = {f"text_model.transformer.h.7.kv_quantizer.{kind}_scale": torch.ones(1) for kind in "kv"}
    with pytest.raises(CheckpointError, match=r"unexpected tensors \(2\): \S+h\.7\.kv_quantizer"):
        load(pt_named("md3") | extra, tmp_path, "md3")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"k": torch.ones(1)}, "only one of"),
        ({"k": torch.ones(2), "v": torch.ones(1)}, "single number"),
        ({"k": torch.zeros(1), "v": torch.ones(1)}, "positive"),
        ({"k": torch.ones(()), "v": torch.tensor(float("nan"))}, "positive"),
    ],
)
def test_wrong_kv_scales_are_refused(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    named = {f"text_model.transformer.h.0.kv_quantizer.{kind}_scale": value for kind, value in tensors.items()}
    with checkpoint_of(named, tmp_path) as checkpoint, pytest.raises(CheckpointError, match=message):
        read_kv_scales(checkpoint)


def pack_int4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Packed parts of a matrix, and what a plain group-by-group loop makes of them."""
    generator = torch.Generator().manual_seed(weight.numel())
    groups = weight.numel() // 128
    nibbles = torch.randint(0, 16, (groups, 128), dtype=torch.uint8, generator=generator)
    scale = torch.rand(groups, 1, generator=generator) + 0.1
    zero_point = torch.randint(0, 16, (groups, 1), generator=generator).float()
    half = groups // 2
    packed = torch.empty(half, 128, dtype=torch.uint8)
    flat = torch.empty(weight.numel())
    for row in range(half):
        packed[row] = nibbles[row] * 16 + nibbles[half + row]
    for group in range(groups):
        zero, factor = float(zero_point[group]), float(scale[group])
        values = [(nibble - zero) * factor for nibble in nibbles[group].tolist()]
        flat[group * 128 : (group + 1) * 128] = torch.tensor(values)
    return {"packed": packed, "scale": scale, "zero_point": zero_point}, flat.view(weight.shape)


def int4_tensors(names: list[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    tensors, expected = golden_file("md2", "model"), {}
    for name in names:
        parts, expected[name] = pack_int4(tensors.pop(f"model.{name}"))
        tensors |= {f"model.{name}.{part}": value for part, value in parts.items()}
    return tensors, expected


def test_int4_groups_equal_a_plain_dequantiser(tmp_path: Path) -> None:
    names = [f"text.blocks.0.{module}.weight" for module in PACKED] + ["region.coord_encoder.weight"]
    tensors, expected = int4_tensors(names)
    model = load(tensors, tmp_path, "md2")
    golden = golden_file("md2", "model")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected.get(name, golden[f"model.{name}"].float()), atol=1e-5, rtol=1e-5)


def test_incomplete_or_misshapen_int4_groups_are_refused(tmp_path: Path) -> None:
    name = "text.blocks.0.attn.proj.weight"
    tensors, _ = int4_tensors([name])
    scale = tensors.pop(f"model.{name}.scale")
    with pytest.raises(CheckpointError, match=r"proj\.weight\.packed .*not 4-bit groups of a \[128, 128\] matrix"):
        load(tensors, tmp_path, "md2")
    with pytest.raises(CheckpointError, match="not 4-bit groups"):
        load(tensors | {f"model.{name}.scale": scale[:-1].clone()}, tmp_path, "md2")
    wide = {f"model.{name}.scale": scale, f"model.{name}.packed": tensors[f"model.{name}.packed"].int()}
    with pytest.raises(CheckpointError, match="must be uint8"):
        load(tensors | wide, tmp_path, "md2")


@pytest.mark.parametrize("name", ["text.blocks.4.mlp.fc1_q", "text.blocks.4.mlp.fc2_scales", "vision.proj_fc1.weight"])
def test_mlx_int4_is_refused_by_name(tmp_path: Path, name: str) -> None:
    tensors = golden_file("md3", "model") | {name: torch.zeros(2, dtype=torch.uint32)}
    with pytest.raises(CheckpointError, match=r"MLX 4-bit weights .*not supported; use the bfloat16"):
        load(tensors, tmp_path, "md3")
