"""The second stage of segmentation: a coarse outline and the picture in, a sharper outline out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from kestrel.errors import CheckpointError, RequestError
from kestrel.images.crops import normalise_and_patchify
from kestrel.images.masks import Mask, box_values, clean_mask, rasterise_path, trace_mask
from kestrel.images.rgb import Canvas, RgbImage
from kestrel.images.shrink import at_most
from kestrel.moondream.config import VisionConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.refiner_head import RefinerConfig, RefinerHead, load_refiner
from kestrel.moondream.vision import VisionModel
from kestrel.runtime.wide_products import computing

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
