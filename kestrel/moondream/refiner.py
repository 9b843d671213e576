"""The second stage of segmentation: a coarse outline and the picture in, a sharper outline out.

The network takes image features and a rough mask, and gives better masks and their expected IoU. Parameter names are
those of the published weights file. Shapes: B pictures, E embed_dim, G grid side, N = G * G patches, M num_masks,
S mask side.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from kestrel.errors import CheckpointError, ConfigError, RequestError
from kestrel.images.crops import normalise_and_patchify
from kestrel.images.masks import Mask, box_values, clean_mask, rasterise_path, trace_mask
from kestrel.images.picture import Canvas, RgbImage, at_most
from kestrel.layers.linear import normal_parameter
from kestrel.moondream.config import VisionConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.vision import VisionModel
from kestrel.runtime.device import computing

PIXEL_ATTENTION_HEADS = 4
MAX_GROUPS = 32


@dataclass(frozen=True, kw_only=True)
class RefinerConfig:
    """Sizes of one refiner head; the defaults are the published ones."""

    enc_dim: int
    """Width of the vision tower whose features are read."""
    embed_dim: int = 256
    num_heads: int = 8
    num_layers: int = 2
    num_masks: int = 4
    grid: int = 27
    """Patches per side of the vision tower's crop."""
    mask_size: int = 378
    """Pixels per side of the crop and of every mask."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, f"must be a positive integer (got {value!r})")
        if self.embed_dim % 32 or self.embed_dim % self.num_heads:
            raise ConfigError(
                "embed_dim", f"must be a multiple of 32 and of num_heads={self.num_heads} (got {self.embed_dim})"
            )


class RefinerHead(nn.Module):
    """`head(final, early, mask)`: features [B, N, enc_dim] twice and a mask [B, S, S] with values 0..1."""

    def __init__(self, config: RefinerConfig) -> None:
        super().__init__()
        self.config = config
        width, pixel_width = config.embed_dim, config.embed_dim // 8
        self.image_proj = nn.Conv2d(config.enc_dim, width, 1)
        self.hq_fusion = EarlyFusion(config)
        self.mask_encoder = MaskEncoder(width, config.grid)
        self.mask_tokens = normal_parameter(config.num_masks, width, std=0.02)
        self.iou_token = normal_parameter(1, width, std=0.02)
        self.output_pe = normal_parameter(config.num_masks + 1, width, std=0.02)
        self.image_pe = normal_parameter(1, width, config.grid, config.grid, std=0.02)
        self.transformer_blocks = nn.ModuleList(TwoWayBlock(width, config.num_heads) for _ in range(config.num_layers))
        self.final_token_to_image = _attention(width, config.num_heads)
        self.final_norm = nn.LayerNorm(width)
        self.upsample = nn.Sequential(*_upsample_layers(width))
        self.final_q_proj = nn.Linear(width, pixel_width)
        self.final_norm_up = nn.LayerNorm(pixel_width)
        self.final_attn_up = _attention(pixel_width, PIXEL_ATTENTION_HEADS)
        self.mask_mlps = nn.ModuleList(_mlp(pixel_width, pixel_width) for _ in range(config.num_masks))
        self.iou_head = _mlp(width, config.num_masks)

    def forward(self, final_features: Tensor, early_features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Mask logits [B, M, S, S] and expected IoU [B, M]."""
        self._check_shapes(final_features, early_features, mask)
        batch, grid = final_features.shape[0], self.config.grid
        image = self.image_proj(_to_map(final_features, grid))
        image = self.hq_fusion(early_features, image) + self.mask_encoder(mask)
        image = image.flatten(2).transpose(1, 2)
        image_pe = self.image_pe.flatten(2).transpose(1, 2)
        tokens = torch.cat((self.mask_tokens, self.iou_token)).expand(batch, -1, -1)
        for block in self.transformer_blocks:
            tokens, image = block(tokens, image, self.output_pe, image_pe)
        read = _attend(self.final_token_to_image, tokens + self.output_pe, image + image_pe, image)
        tokens = self.final_norm(tokens + read)
        num_masks = self.config.num_masks
        logits = self._mask_logits(tokens[:, :num_masks], _to_map(image, grid))
        return logits, self.iou_head(tokens[:, num_masks])

    def _mask_logits(self, mask_tokens: Tensor, image: Tensor) -> Tensor:
        pixels = self.upsample(image)
        side = pixels.shape[-1]
        pixels = pixels.flatten(2).transpose(1, 2)
        tokens = self.final_q_proj(mask_tokens)
        tokens = tokens + _attend(self.final_attn_up, self.final_norm_up(tokens), pixels, pixels)
        weights = torch.stack([mlp(tokens[:, index]) for index, mlp in enumerate(self.mask_mlps)], dim=1)
        logits = (weights @ pixels.transpose(1, 2)).unflatten(2, (side, side))
        return _resize(logits, self.config.mask_size)

    def _check_shapes(self, final_features: Tensor, early_features: Tensor, mask: Tensor) -> None:
        config = self.config
        features_shape = (final_features.shape[0], config.grid**2, config.enc_dim)
        assert final_features.shape == features_shape, f"{list(final_features.shape)} != {list(features_shape)}"
        assert early_features.shape == features_shape, f"{list(early_features.shape)} != {list(features_shape)}"
        assert mask.shape == (features_shape[0], config.mask_size, config.mask_size), f"{list(mask.shape)}"


class EarlyFusion(nn.Module):
    """Mixes the fine detail of an early vision block into the projected final features."""

    def __init__(self, config: RefinerConfig) -> None:
        super().__init__()
        width = config.embed_dim
        self.grid = config.grid
        self.early_proj = nn.Sequential(nn.Linear(config.enc_dim, width), nn.LayerNorm(width), nn.GELU())
        self.fusion = nn.Sequential(
            nn.Conv2d(2 * width, width, 1),
            nn.GroupNorm(MAX_GROUPS, width),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(MAX_GROUPS, width),
            nn.GELU(),
        )

    def forward(self, early_features: Tensor, image: Tensor) -> Tensor:
        early = _to_map(self.early_proj(early_features), self.grid)
        return self.fusion(torch.cat((early, image), dim=1))


class MaskEncoder(nn.Module):
    """Brings a mask down to the patch grid."""

    def __init__(self, width: int, grid: int) -> None:
        super().__init__()
        self.grid = grid
        self.conv1 = _mask_stage(1, width // 16, groups=1)
        self.conv2 = _mask_stage(width // 16, width // 8, groups=8)
        self.conv3 = _mask_stage(width // 8, width // 4, groups=16)
        self.conv4 = _mask_stage(width // 4, width, groups=MAX_GROUPS)

    def forward(self, mask: Tensor) -> Tensor:
        encoded = self.conv4(self.conv3(self.conv2(self.conv1(mask.unsqueeze(1)))))
        return _resize(encoded, self.grid)


class TwoWayBlock(nn.Module):
    """Tokens look at each other and at the image, then the image looks at the tokens. Norms follow the additions."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.output_self_attn = _attention(width, num_heads)
        self.norm1 = nn.LayerNorm(width)
        self.cross_attn_token_to_image = _attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width))
        self.norm3 = nn.LayerNorm(width)
        self.cross_attn_image_to_token = _attention(width, num_heads)
        self.norm4 = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, image: Tensor, token_pe: Tensor, image_pe: Tensor) -> tuple[Tensor, Tensor]:
        placed = tokens + token_pe
        tokens = self.norm1(tokens + _attend(self.output_self_attn, placed, placed, tokens))
        read = _attend(self.cross_attn_token_to_image, tokens + token_pe, image + image_pe, image)
        tokens = self.norm2(tokens + read)
        tokens = self.norm3(tokens + self.mlp(tokens))
        written = _attend(self.cross_attn_image_to_token, image + image_pe, tokens + token_pe, tokens)
        return tokens, self.norm4(image + written)


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of a [B, C, H, W] map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, image: Tensor) -> Tensor:
        return self.norm(image.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _attention(width: int, num_heads: int) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(width, num_heads, batch_first=True)


def _attend(attention: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, key, value, need_weights=False)[0]


def _mlp(width: int, out_width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, out_width)
    )


def _mask_stage(in_width: int, out_width: int, groups: int) -> nn.Sequential:
    convolution = nn.Conv2d(in_width, out_width, 3, stride=2, padding=1)
    return nn.Sequential(convolution, nn.GroupNorm(min(groups, out_width), out_width), nn.GELU())


def _upsample_layers(width: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for out_width in (width // 2, width // 4, width // 8):
        layers += [nn.ConvTranspose2d(width, out_width, 2, stride=2), ChannelNorm(out_width), nn.GELU()]
        layers += [nn.Conv2d(out_width, out_width, 3, padding=1), ChannelNorm(out_width), nn.GELU()]
        width = out_width
    return layers


def _to_map(tokens: Tensor, grid: int) -> Tensor:
    return tokens.transpose(1, 2).unflatten(2, (grid, grid))


def _resize(image: Tensor, side: int) -> Tensor:
    return functional.interpolate(image, size=(side, side), mode="bilinear", align_corners=False)


def load_refiner(
    path: str | Path, device: str | torch.device, dtype: torch.dtype, config: RefinerConfig | None = None
) -> RefinerHead:
    """Read `model.pt` (a dict with the entry "head") or a safetensors file; sizes come from the file unless given."""
    path = Path(path)
    tensors = {name.replace("._orig_mod", ""): tensor for name, tensor in _read_tensors(path).items()}
    try:
        config = config or _config_of(tensors)
    except ConfigError as error:
        raise CheckpointError(f"{path}: the tensor sizes make no refiner: {error}; download the file again") from error
    with torch.device("meta"):
        head = RefinerHead(config)
    _check_tensors(path, head.state_dict(), tensors)
    placed = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
    head.load_state_dict(placed, strict=True, assign=True)
    return head.eval().requires_grad_(False)


def _read_tensors(path: Path) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the refiner needs model.pt or a safetensors file")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a readable safetensors file ({error}); download it again") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # A damaged pickle can fail in any way.
        raise CheckpointError(f"{path} is not a torch weights file, or is damaged; download it again") from error
    head = content.get("head") if isinstance(content, dict) else None
    if not isinstance(head, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in head.items()
    ):
        raise CheckpointError(
            f'{path}: expected a dict whose entry "head" maps names to tensors; is it a refiner file?'
        )
    return head


def _config_of(tensors: Mapping[str, Tensor]) -> RefinerConfig:
    """Sizes read off the tensors. Missing ones get the published size, so that the check afterwards can name them."""

    def size(name: str, axis: int, otherwise: int) -> int:
        return tensors[name].shape[axis] if name in tensors and tensors[name].ndim > axis else otherwise

    layers = [int(match[1]) for name in tensors if (match := re.match(r"transformer_blocks\.(\d+)\.", name))]
    return RefinerConfig(
        enc_dim=size("image_proj.weight", 1, 1152),
        embed_dim=size("image_proj.weight", 0, 256),
        num_layers=max(layers, default=1) + 1,
        num_masks=size("mask_tokens", 0, 4),
        grid=size("image_pe", 2, 27),
        mask_size=14 * size("image_pe", 2, 27),
    )


def _check_tensors(path: Path, expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    problems = [f"{name}: missing" for name in sorted(expected.keys() - given.keys())]
    problems += [f"{name}: not part of a refiner" for name in sorted(given.keys() - expected.keys())]
    for name in sorted(expected.keys() & given.keys()):
        wanted, found = expected[name], given[name]
        if wanted.shape != found.shape:
            problems.append(f"{name}: shape {list(found.shape)} instead of {list(wanted.shape)}")
        elif not found.is_floating_point():
            problems.append(f"{name}: holds {found.dtype} instead of floating point numbers")
        elif not bool(torch.isfinite(found.float()).all()):
            problems.append(f"{name}: holds infinite or undefined numbers")
    if problems:
        listing = "\n  ".join(problems)
        raise CheckpointError(f"{path}: {len(problems)} tensors do not fit the refiner:\n  {listing}")


# ---------------------------------------------------------------------- from an outline to an outline


EARLY_BLOCK = 8
"""Index of the vision block whose residual stream is the head's early features."""
NUM_ITERATIONS = 5
MARGIN = 0.25
"""Share of the box's width and height added on each side before cropping."""
THRESHOLD = 0.5
OUTLINE_SIDE_PX = 1024
"""Masks are drawn, cleaned and traced at this size at most: the head itself sees 378 pixels."""

Pixels = NDArray[np.uint8]


class CropEncoder(Protocol):
    def __call__(self, crop_HWC: Pixels, /) -> tuple[Tensor, Tensor]:
        """A square uint8 RGB crop to (final features, stream after block EARLY_BLOCK), each [1, grid**2, enc_dim]."""
        ...


@dataclass(frozen=True, eq=False)
class RefinedMask:
    """A refined segment."""

    svg_path: str
    """Relative to `bbox`."""
    bbox: dict[str, float]
    """Of the mask's pixels, relative to the picture: x_min, y_min, x_max, y_max."""
    mask: Mask
    """[height, width] of the whole picture."""
    expected_iou: float
    """The head's own estimate in the last iteration."""


@dataclass(frozen=True)
class _Window:
    """Whole pixels of the picture that the head looks at."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def slices(self) -> tuple[slice, slice]:
        return slice(self.top, self.bottom), slice(self.left, self.right)


class MoondreamOutlineRefiner:
    """A refiner head on the vision tower of a loaded Moondream."""

    def __init__(self, head: RefinerHead, model: MoondreamModel) -> None:
        vision = model.config.vision
        _check_fit(head.config, vision)
        self._refiner = SegmentRefiner(head, VisionCropEncoder(model.vision, vision.enc_patch_size))

    @torch.inference_mode()
    def refine_outline(
        self, image: RgbImage, svg_path: str, bbox: Mapping[str, float]
    ) -> tuple[str, dict[str, float]] | None:
        """(path, box) of the refined segment; None where the coarse one is to be kept, as for a box that is none."""
        try:
            box_values(bbox)
        except RequestError:
            return None
        shrunk = at_most(Canvas(image.pixels), OUTLINE_SIDE_PX, image.digest)
        refined = self._refiner.refine(shrunk.pixels, svg_path, bbox)
        return None if refined is None else (refined.svg_path, refined.bbox)


def load_outline_refiner(path: str | Path, model: MoondreamModel) -> MoondreamOutlineRefiner:
    """Reads a refiner's weights onto the device and into the precision of the model's vision tower."""
    place = model.vision.pos_emb
    return MoondreamOutlineRefiner(load_refiner(path, place.device, place.dtype), model)


class VisionCropEncoder:
    """The vision tower as `CropEncoder`, on its own device and in its own precision."""

    def __init__(self, vision: VisionModel, patch_size: int) -> None:
        self._vision = vision
        self._patch_size = patch_size

    def __call__(self, crop_HWC: Pixels, /) -> tuple[Tensor, Tensor]:
        place = self._vision.pos_emb
        crops_NHWC = torch.tensor(crop_HWC, device=place.device).unsqueeze(0)
        patches_NPC = normalise_and_patchify(crops_NHWC, self._patch_size, place.dtype)
        features = self._vision.encode_crops_with_early(patches_NPC, EARLY_BLOCK)
        return features.final, features.early


class SegmentRefiner:
    def __init__(self, head: RefinerHead, encode_crop: CropEncoder) -> None:
        self._head = head
        self._encode_crop = encode_crop

    def refine(self, image: Pixels, coarse_path: str, bbox: Mapping[str, float]) -> RefinedMask | None:
        """The refined segment, or None: keep the coarse one.

        That is when the coarse one is empty, or the refined mask is empty or too intricate for an outline.
        """
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or image.size == 0:
            raise RequestError("image", f"must be [height, width, 3] uint8 (got {image.shape} {image.dtype})")
        height, width = image.shape[:2]
        coarse = rasterise_path(coarse_path, bbox, height, width)
        window = _window_around(bbox, height, width)
        if not coarse[window.slices].any():
            return None
        probability, expected_iou = self._run_head(image[window.slices], coarse[window.slices])
        refined = np.zeros((height, width), np.bool_)
        refined[window.slices] = probability > THRESHOLD
        refined = clean_mask(refined, keep_largest=True)
        traced = trace_mask(refined)
        if traced is None:
            return None
        svg_path, refined_bbox = traced
        return RefinedMask(svg_path=svg_path, bbox=refined_bbox, mask=refined, expected_iou=expected_iou)

    @torch.inference_mode()
    def _run_head(self, crop: Pixels, coarse: Mask) -> tuple[NDArray[np.float32], float]:
        """Probability of every crop pixel to belong to the object, and the expected IoU."""
        side, place = self._head.config.mask_size, self._head.image_pe
        square = Image.fromarray(np.ascontiguousarray(crop)).resize((side, side), Image.Resampling.BILINEAR)
        square_mask = Image.fromarray(coarse.astype(np.uint8)).resize((side, side), Image.Resampling.NEAREST)
        mask = torch.from_numpy(np.array(square_mask)).to(place).unsqueeze(0)
        expected_iou = torch.zeros((), device=mask.device)
        with computing(place.device, place.dtype):
            final, early = (features.to(place) for features in self._encode_crop(np.array(square)))
            for _ in range(NUM_ITERATIONS):
                logits, ious = self._head(final, early, mask)
                best = ious[0].argmax()
                mask, expected_iou = logits[:, best].sigmoid(), ious[0, best]
        probability = Image.fromarray(mask[0].float().cpu().numpy())
        height, width = crop.shape[:2]
        resized = probability.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(resized, np.float32), float(expected_iou)


def _check_fit(head: RefinerConfig, vision: VisionConfig) -> None:
    for name, in_head, in_tower in (
        ("enc_dim", head.enc_dim, vision.enc_dim),
        ("patches per side", head.grid, vision.grid),
        ("pixels per side of a crop", head.mask_size, vision.crop_size),
    ):
        if in_head != in_tower:
            raise CheckpointError(
                f"the refiner does not fit the vision tower: {name} {in_head} in the refiner, {in_tower} in the model; "
                "use the refiner made for this model"
            )
    if vision.enc_n_layers <= EARLY_BLOCK:
        raise CheckpointError(
            f"the refiner reads vision block {EARLY_BLOCK}, counted from 0, and the model has {vision.enc_n_layers} "
            "blocks; use a model with more, or none of the refiner"
        )


def _window_around(bbox: Mapping[str, float], height: int, width: int) -> _Window:
    x_min, y_min, x_max, y_max = box_values(bbox)
    x_margin, y_margin = MARGIN * (x_max - x_min), MARGIN * (y_max - y_min)
    return _Window(
        left=max(0, math.floor((x_min - x_margin) * width)),
        top=max(0, math.floor((y_min - y_margin) * height)),
        right=min(width, math.ceil((x_max + x_margin) * width)),
        bottom=min(height, math.ceil((y_max + y_margin) * height)),
    )
