"""The refiner's network against its goldens, its weights files, and the stage around it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kestrel.errors import CheckpointError, ConfigError, RequestError
from kestrel.images.masks import rasterise_path
from kestrel.moondream.refiner import NUM_ITERATIONS, Pixels, RefinedMask, SegmentRefiner
from kestrel.moondream.refiner_head import RefinerConfig, RefinerHead, load_refiner

GOLDENS = Path(__file__).parents[1] / "goldens" / "segment"
WEIGHTS = GOLDENS / "refiner_head.safetensors"
TINY = RefinerConfig(enc_dim=8, embed_dim=32, num_layers=1, grid=4, mask_size=56)
SQUARE = "M 0 0 L 1 0 L 1 1 L 0 1 Z"


def box(x_min: float, y_min: float, x_max: float, y_max: float) -> dict[str, float]:
    return {"x_min": x_min, "y_min": y_min, "x_max": x_max, "y_max": y_max}


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
    # Norms over four near-equal channels amplify float32 rounding to 6e-4 at single pixels (seen against float64).
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


# The stage


class GreyEncoder:
    """Features that only tell how bright each patch is; keeps the crops it saw."""

    def __init__(self, config: RefinerConfig) -> None:
        self.config = config
        self.crops: list[Pixels] = []

    def __call__(self, crop_HWC: Pixels, /) -> tuple[Tensor, Tensor]:
        self.crops.append(crop_HWC)
        side = self.config.mask_size // self.config.grid
        grey = torch.from_numpy(crop_HWC.astype(np.float32)).mean(dim=2) / 255
        patches = grey.unfold(0, side, side).unfold(1, side, side).mean(dim=(2, 3)).reshape(1, -1, 1)
        features = patches.expand(-1, -1, self.config.enc_dim).contiguous()
        return features, features.flip(2)


class EchoHead(RefinerHead):
    """Gives its mask back, slightly grown more certain, as the third of four masks."""

    def forward(self, final_features: Tensor, early_features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.full((1, 4, *mask.shape[1:]), -9.0)
        logits[:, 2] = mask * 12 - 6
        return logits, torch.tensor([[0.1, 0.2, 0.9, 0.3]])


class SilentHead(RefinerHead):
    """Sees nothing anywhere."""

    def forward(self, final_features: Tensor, early_features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full((1, 4, *mask.shape[1:]), -9.0), torch.zeros(1, 4)


def gradient(height: int, width: int) -> Pixels:
    columns, rows = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([columns, rows, (columns + rows) / 2], axis=2).astype(np.uint8)


def assert_well_formed(result: RefinedMask, height: int, width: int) -> None:
    assert result.mask.shape == (height, width)
    assert result.mask.any()
    rows, columns = np.nonzero(result.mask)
    assert result.bbox == box(
        columns.min() / width, rows.min() / height, (columns.max() + 1) / width, (rows.max() + 1) / height
    )
    assert result.svg_path.startswith("M ")
    assert result.svg_path.endswith(" Z")
    assert np.isfinite(result.expected_iou)


def test_a_head_that_agrees_keeps_the_coarse_shape() -> None:
    image, bbox = gradient(240, 320), box(0.25, 0.25, 0.75, 0.75)
    coarse_path = "M 0 0.5 A 0.5 0.5 0 1 1 1 0.5 A 0.5 0.5 0 1 1 0 0.5 Z"
    config = RefinerConfig(enc_dim=8, embed_dim=32, num_layers=1)
    result = SegmentRefiner(EchoHead(config), GreyEncoder(config)).refine(image, coarse_path, bbox)
    assert result is not None
    assert_well_formed(result, 240, 320)
    coarse = rasterise_path(coarse_path, bbox, 240, 320)
    drawn = rasterise_path(result.svg_path, result.bbox, 240, 320)
    assert (result.mask & coarse).sum() / (result.mask | coarse).sum() > 0.97
    assert (result.mask & drawn).sum() / (result.mask | drawn).sum() > 0.98
    assert result.expected_iou == pytest.approx(0.9)


def test_the_encoder_sees_the_box_and_a_quarter_more_on_each_side() -> None:
    image = np.zeros((100, 200, 3), np.uint8)
    image[30:90, 70:190] = 255
    encoder = GreyEncoder(TINY)
    SegmentRefiner(EchoHead(TINY), encoder).refine(image, SQUARE, box(0.45, 0.4, 0.85, 0.8))
    (crop,) = encoder.crops
    assert crop.shape == (56, 56, 3)
    assert crop.min() == 255
    image[29], image[:, 69] = 128, 128
    SegmentRefiner(EchoHead(TINY), encoder).refine(image, SQUARE, box(0.445, 0.395, 0.85, 0.8))
    assert encoder.crops[1].min() < 255


@pytest.mark.parametrize("coarse_path", ["", "M 0 0 H V z", "M 5 5 L 6 5 L 6 6 Z", "nonsense"])
def test_an_empty_coarse_mask_is_given_up_before_the_encoder(coarse_path: str) -> None:
    encoder = GreyEncoder(TINY)
    assert SegmentRefiner(EchoHead(TINY), encoder).refine(gradient(50, 50), coarse_path, box(0, 0, 0.5, 0.5)) is None
    assert not encoder.crops


def test_an_empty_refined_mask_is_given_up() -> None:
    refiner = SegmentRefiner(SilentHead(TINY), GreyEncoder(TINY))
    assert refiner.refine(gradient(50, 50), SQUARE, box(0.2, 0.2, 0.8, 0.8)) is None


def test_islands_smaller_than_the_limit_are_given_up() -> None:
    refiner = SegmentRefiner(EchoHead(TINY), GreyEncoder(TINY))
    assert refiner.refine(gradient(400, 400), SQUARE, box(0.5, 0.5, 0.53, 0.53)) is None
    assert refiner.refine(gradient(400, 400), SQUARE, box(0.5, 0.5, 0.55, 0.55)) is not None


@pytest.mark.parametrize("shape", [(1, 1), (1, 60), (60, 1), (37, 53), (300, 200)])
@pytest.mark.parametrize(
    "bbox",
    [
        box(0, 0, 1, 1),
        box(0, 0, 0.01, 0.01),
        box(0.99, 0.99, 1, 1),
        box(0.5, 0, 0.5, 1),
        box(1, 1, 1, 1),
        box(0, 0.3, 1, 0.31),
        box(0.2, 0.1, 0.7, 1),
    ],
)
def test_an_untrained_head_gives_a_sound_result_or_none(shape: tuple[int, int], bbox: dict[str, float]) -> None:
    result = SegmentRefiner(RefinerHead(TINY).eval(), GreyEncoder(TINY)).refine(gradient(*shape), SQUARE, bbox)
    if result is not None:
        assert_well_formed(result, *shape)


def test_a_bfloat16_head_takes_features_of_another_type() -> None:
    encoder = GreyEncoder(TINY)
    refiner = SegmentRefiner(RefinerHead(TINY).to(torch.bfloat16).eval(), encoder)
    result = refiner.refine(gradient(60, 80), SQUARE, box(0.1, 0.1, 0.9, 0.9))
    assert len(encoder.crops) == 1
    if result is not None:
        assert_well_formed(result, 60, 80)


def test_a_picture_of_another_form_is_refused() -> None:
    refiner = SegmentRefiner(EchoHead(TINY), GreyEncoder(TINY))
    for image in (np.zeros((10, 10), np.uint8), np.zeros((10, 10, 4), np.uint8), np.zeros((10, 10, 3), np.float32)):
        with pytest.raises(RequestError, match="image"):
            refiner.refine(image, SQUARE, box(0, 0, 1, 1))  # pyright: ignore[reportArgumentType]
