"""The refiner's network against its goldens, and its weights files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kestrel.errors import CheckpointError, ConfigError
from kestrel.moondream.refiner import NUM_ITERATIONS, RefinerConfig, RefinerHead, load_refiner
from kestrel.runtime.device import computing

from .refiner_parts import TINY

GOLDENS = Path(__file__).parents[1] / "goldens" / "segment"
WEIGHTS = GOLDENS / "refiner_head.safetensors"

# The network


@torch.inference_mode()
def run_golden(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits at every 27th pixel [5, 4, 14, 14], IoU [5, 4] and the last mask at every 27th pixel."""
    head = load_refiner(WEIGHTS, "cpu", dtype)
    inputs = load_file(GOLDENS / "refiner_io.safetensors")
    final, early = inputs["final_features"].to(dtype), inputs["early_features"].to(dtype)
    mask = torch.zeros(1, 378, 378, dtype=dtype)
    mask[0, 100:260, 60:300] = 1
    all_logits, all_ious = [], []
    for _ in range(NUM_ITERATIONS):
        with computing(torch.device("cpu"), dtype):
            logits, ious = head(final, early, mask)
        assert logits.shape == (1, 4, 378, 378)
        all_logits.append(logits[0, :, ::27, ::27])
        all_ious.append(ious[0])
        mask = logits[:, ious[0].argmax()].sigmoid()
    return torch.stack(all_logits), torch.stack(all_ious), mask[0, ::27, ::27]


def test_five_iterations_equal_the_goldens() -> None:
    logits, ious, mask = run_golden(torch.float32)
    expected = load_file(GOLDENS / "refiner_io.safetensors")
    assert ious.argmax(dim=1).tolist() == json.loads((GOLDENS / "refiner.json").read_text())["best_index_per_iteration"]
    torch.testing.assert_close(ious, expected["iou_per_iteration"], rtol=0, atol=2e-6)
    torch.testing.assert_close(mask, expected["final_mask_strided27"], rtol=0, atol=1e-4)
    errors = (logits - expected["mask_logits_per_iteration_strided27"]).abs()
    # Norms over four near-equal channels amplify float32 rounding to 6e-4 at single pixels (docs/decisions/0007).
    assert errors[0].max() < 1e-4
    assert errors.flatten().quantile(0.995) < 1e-4
    assert errors.max() < 1e-3


def test_bfloat16_agrees_on_the_expected_iou() -> None:
    logits, ious, _ = run_golden(torch.bfloat16)
    expected = load_file(GOLDENS / "refiner_io.safetensors")["iou_per_iteration"]
    assert bool(torch.isfinite(logits).all())
    torch.testing.assert_close(ious.float(), expected, rtol=0, atol=0.02)


def test_parameter_names_are_those_of_the_published_file() -> None:
    config = RefinerConfig(enc_dim=32, embed_dim=32)
    expected = {name: tensor.shape for name, tensor in load_file(WEIGHTS).items()}
    assert {name: tensor.shape for name, tensor in RefinerHead(config).state_dict().items()} == expected


def test_pictures_in_a_batch_do_not_touch_each_other() -> None:
    head = RefinerHead(TINY).eval()
    final, early = torch.randn(2, 3, 16, 8)
    mask = torch.rand(3, 56, 56)
    with torch.inference_mode():
        logits, ious = head(final, early, mask)
        alone_logits, alone_ious = head(final[1:2], early[1:2], mask[1:2])
    torch.testing.assert_close(logits[1:2], alone_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ious[1:2], alone_ious, rtol=1e-4, atol=1e-4)


def test_every_input_matters() -> None:
    head = RefinerHead(TINY).eval()
    inputs = [torch.randn(1, 16, 8), torch.randn(1, 16, 8), torch.rand(1, 56, 56)]
    with torch.inference_mode():
        logits, _ = head(*inputs)
        for index in range(3):
            changed = [value.flip(1) if place == index else value for place, value in enumerate(inputs)]
            assert (head(*changed)[0] - logits).abs().max() > 1e-4


def test_wrong_shapes_are_refused() -> None:
    head = RefinerHead(TINY)
    with pytest.raises(AssertionError, match=r"\[1, 9, 8\]"):
        head(torch.zeros(1, 9, 8), torch.zeros(1, 16, 8), torch.zeros(1, 56, 56))
    with pytest.raises(AssertionError, match=r"\[1, 55, 56\]"):
        head(torch.zeros(1, 16, 8), torch.zeros(1, 16, 8), torch.zeros(1, 55, 56))


@pytest.mark.parametrize(("field", "value"), [("embed_dim", 48), ("num_layers", 0), ("num_heads", 12), ("grid", 2.0)])
def test_impossible_sizes_are_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=field):
        RefinerConfig(**{"enc_dim": 8, field: value})


# Weights files


def test_a_torch_file_and_a_safetensors_file_load_alike(tmp_path: Path) -> None:
    tensors = load_file(WEIGHTS)
    compiled = {name.replace("upsample.", "upsample._orig_mod."): value for name, value in tensors.items()}
    torch.save({"head": compiled, "step": 7}, tmp_path / "model.pt")
    head = load_refiner(tmp_path / "model.pt", "cpu", torch.float32)
    assert head.config == RefinerConfig(enc_dim=32, embed_dim=32)
    assert not head.training
    for name, value in head.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, tensors[name].float())


def test_all_unfitting_tensors_are_listed(tmp_path: Path) -> None:
    tensors = load_file(WEIGHTS)
    del tensors["mask_tokens"]
    del tensors["iou_head.0.bias"]
    tensors["extra.weight"] = torch.zeros(3)
    tensors["final_norm.bias"] = torch.zeros(5)
    tensors["output_pe"] = torch.full_like(tensors["output_pe"], float("nan"))
    tensors["image_proj.bias"] = tensors["image_proj.bias"].to(torch.int32)
    save_file(tensors, tmp_path / "broken.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_refiner(tmp_path / "broken.safetensors", "cpu", torch.float32)
    message = str(caught.value)
    assert "6 tensors" in message
    for name in ("mask_tokens", "iou_head.0.bias", "extra.weight", "final_norm.bias", "output_pe", "image_proj.bias"):
        assert name in message


def test_a_file_that_does_not_fit_the_asked_sizes_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"image_proj\.weight: shape \[32, 32, 1, 1\] instead of \[32, 64, 1, 1\]"
    ):
        load_refiner(WEIGHTS, "cpu", torch.float32, RefinerConfig(enc_dim=64, embed_dim=32))


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not weights at all", bytes(range(256)) * 40])
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_refiner(tmp_path / name, "cpu", torch.float32)


def test_truncated_files_are_named(tmp_path: Path) -> None:
    torch.save({"head": load_file(WEIGHTS)}, tmp_path / "model.pt")
    (tmp_path / "short.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:100_000])
    (tmp_path / "short.safetensors").write_bytes(WEIGHTS.read_bytes()[:100_000])
    for name in ("short.pt", "short.safetensors", "absent.pt"):
        with pytest.raises(CheckpointError, match=name):
            load_refiner(tmp_path / name, "cpu", torch.float32)


@pytest.mark.parametrize("content", [{}, [], {"head": 3}, {"head": {"image_pe": 3}}, {"head": {}}])
def test_torch_files_without_a_head_are_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt"):
        load_refiner(tmp_path / "model.pt", "cpu", torch.float32)
