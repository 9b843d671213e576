"""Checkpoints of every naming load tensor for tensor; what does not fit is refused with all reasons at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kestrel.errors import CheckpointError
from kestrel.models.checkpoint_files import Checkpoint, open_checkpoint
from kestrel.moondream.config import MOONDREAM2
from kestrel.moondream.weights import load_moondream, to_hub_name, to_pt_name

from .weight_sets import ROOT, assert_equals_golden, checkpoint_of, golden_config, golden_file, key_map, load, pt_named

FAMILIES = ["md2", "md3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_key_map_holds_both_ways(family: str) -> None:
    for entry in key_map(family):
        hub = entry["hf"].removeprefix("model.")
        assert to_hub_name(entry["hf"]) == to_hub_name(entry["pt"]) == hub
        assert to_pt_name(hub, len(entry["shape_tiny"])) == entry["pt"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.text._orig_mod.blocks.3._orig_mod.ln.weight", "text.blocks.3.ln.weight"),
        ("_orig_mod.text_model.transformer.h.0.tau_alpha", "text.blocks.0.attn.tau.alpha"),
        ("text.blocks.0.mlp.fc1.weight.packed", "text.blocks.0.mlp.fc1.weight.packed"),
        ("text_model.transformer.h.2.mlp.fc1.weight.scale", "text.blocks.2.mlp.fc1.weight.scale"),
        ("region_model.nobody.weight", "region_model.nobody.weight"),
        ("something.else", "something.else"),
    ],
)
def test_names_lose_their_wrappings(name: str, expected: str) -> None:
    assert to_hub_name(name) == expected


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("naming", ["hub", "pt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_either_naming_in_either_format_equals_the_golden(
    tmp_path: Path, family: str, naming: str, suffix: str
) -> None:
    tensors = golden_file(family, "model") if naming == "hub" else pt_named(family)
    assert_equals_golden(load(tensors, tmp_path, family, suffix), family)


def test_compiled_names_load(tmp_path: Path) -> None:
    golden = golden_file("md3", "model")
    tensors = {name.replace(".blocks.", "._orig_mod.blocks."): tensor for name, tensor in golden.items()}
    assert tensors.keys() != golden.keys()
    assert_equals_golden(load(tensors, tmp_path, "md3"), "md3")


def test_fused_tau_loads(tmp_path: Path) -> None:
    tensors = pt_named("md3")
    for layer in range(3):
        base = f"text_model.transformer.h.{layer}.tau_"
        tensors[f"{base}wqwv"] = torch.cat([tensors.pop(f"{base}wq"), tensors.pop(f"{base}wv")])
    assert_equals_golden(load(tensors, tmp_path, "md3"), "md3")


def test_fused_and_separate_tau_together_are_refused(tmp_path: Path) -> None:
    tensors = pt_named("md3")
    base = "text_model.transformer.h.1.tau_"
    tensors[f"{base}wqwv"] = torch.cat([tensors[f"{base}wq"], tensors[f"{base}wv"]])
    with pytest.raises(CheckpointError, match=r"h\.1\.tau_wq and \S+tau_wqwv both give text\.blocks\.1\.attn\.tau\.wq"):
        load(tensors, tmp_path, "md3")


@pytest.mark.parametrize("naming", ["hub", "pt"])
def test_region_ln_is_used_when_the_checkpoint_has_one(tmp_path: Path, naming: str) -> None:
    norm = golden_file("md3", "region_ln")
    tensors = golden_file("md3", "model") if naming == "hub" else pt_named("md3")
    prefix = "model.region.ln" if naming == "hub" else "region_model.ln"
    model = load(
        tensors | {f"{prefix}.{leaf}": norm[f"model.region.ln.{leaf}"] for leaf in ("weight", "bias")}, tmp_path, "md3"
    )
    assert model.config.region.has_ln
    assert model.region.ln is not None
    units = golden_file("md3", "units")
    logits = model.region.decode_coord(units["region_hidden_in"])
    torch.testing.assert_close(logits, units["coord_logits_ln"], atol=1e-4, rtol=0)


def test_a_checkpoint_without_region_ln_decides_against_the_config(tmp_path: Path) -> None:
    with checkpoint_of(golden_file("md3", "model"), tmp_path) as checkpoint:
        model = load_moondream(checkpoint, golden_config("md3").with_region_ln(True), "cpu", torch.float32)
    assert not model.config.region.has_ln


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fourier_tables_stay_fp32_and_the_rest_takes_the_type(dtype: torch.dtype) -> None:
    with open_checkpoint(ROOT / "md2") as checkpoint:
        model = load_moondream(checkpoint, golden_config("md2"), "cpu", dtype)
    fp32 = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert fp32 == {"region.coord_features", "region.size_features"}
    assert {p.dtype for p in model.parameters()} == {torch.float32, dtype}


def test_nothing_is_left_on_the_meta_device_and_nothing_learns() -> None:
    with open_checkpoint(ROOT / "md3") as checkpoint:
        model = load_moondream(checkpoint, golden_config("md3"), "cpu", torch.float32)
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cpu"}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


def test_missing_unexpected_and_misshapen_come_together_before_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = golden_file("md2", "model")
    del tensors["model.text.blocks.1.ln.bias"]
    tensors["model.text.wte"] = torch.zeros(4, 128)
    tensors["model.text.blocks.3.ln.bias"] = torch.zeros(128)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("data was read"))
    with pytest.raises(CheckpointError) as caught:
        load(tensors, tmp_path, "md2")
    lines = str(caught.value).split("\n  ")
    assert lines[0] == f"{tmp_path} does not fit the model:"
    assert lines[1:] == [
        "missing tensors (1): text.blocks.1.ln.bias",
        "unexpected tensors (1): model.text.blocks.3.ln.bias",
        "wrong shapes (1): text.wte is [4, 128], expected [320, 128]",
    ]


def test_two_names_for_one_parameter_are_refused(tmp_path: Path) -> None:
    tensors = golden_file("md2", "model")
    tensors["text_model.lm_head.ln.bias"] = tensors["model.text.post_ln.bias"].clone()
    with pytest.raises(CheckpointError, match=r"both give text\.post_ln\.bias; keep one"):
        load(tensors, tmp_path, "md2")


def test_an_untransposed_fourier_table_under_its_pt_name_is_misshapen(tmp_path: Path) -> None:
    tensors = pt_named("md2")
    tensors["region_model.coordinate_features.weight"] = tensors["region_model.coordinate_features.weight"].T
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"region\.coord_features is \[32, 1\], expected \[1, 32\]"):
        load(tensors, tmp_path, "md2")


def test_weights_of_another_size_list_every_reason_with_a_cap(tmp_path: Path) -> None:
    with (
        checkpoint_of(golden_file("md3", "model"), tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=r"(?s)missing tensors \(\d+\): .*, and \d+ more\n.*wrong shapes \(\d+\)"),
    ):
        load_moondream(checkpoint, MOONDREAM2, "cpu", torch.float32)


def test_progress_ends_at_the_loaded_bytes() -> None:
    calls: list[tuple[int, int]] = []
    with open_checkpoint(ROOT / "md2") as checkpoint:
        model = load_moondream(
            checkpoint,
            golden_config("md2"),
            "cpu",
            torch.bfloat16,
            lambda label, done_bytes, total_bytes: calls.append((done_bytes, total_bytes)),
        )
    total = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)


def test_golden_adapter_files_have_the_documented_tensors() -> None:
    dense = golden_file("md2", "lora_variant")
    matrices = {"mixer.Wqkv": (384, 128), "mixer.out_proj": (128, 128), "mlp.fc1": (256, 128), "mlp.fc2": (128, 256)}
    assert {name: tuple(t.shape) for name, t in dense.items()} == {
        f"text_model.transformer.h.{i}.{matrix}.parametrizations.weight.0.{side}": shape
        for i in range(3)
        for matrix, (rows, columns) in matrices.items()
        for side, shape in (("A", (4, columns)), ("B", (rows, 4)))
    }
    hosted = golden_file("md3", "lora_adapter")
    dense_shapes = {"up_a": (6, 128), "up_b": (256, 6), "down_a": (6, 256), "down_b": (128, 6)}
    moe_shapes = {"up_a": (8, 2, 128), "up_b": (8, 64, 2), "down_a": (8, 2, 32), "down_b": (8, 128, 2)}
    assert {name: tuple(t.shape) for name, t in hosted.items()} == {
        **{f"text_lora.dense.0.{leaf}": shape for leaf, shape in dense_shapes.items()},
        **{f"text_lora.moe.{i}.{leaf}": shape for i in range(2) for leaf, shape in moe_shapes.items()},
    }
