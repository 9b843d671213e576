"""A decoded picture -> the encoder's crops, and crops -> normalised patches."""

from __future__ import annotations

import numpy as np
import torch

from kestrel.images.picture import RgbImage, ShrunkImage, TilingPlan
from kestrel.images.resize import resize_by_taps, resize_lanczos
from kestrel.kernels.ops import Ops


def image_tensor(image: RgbImage, device: torch.device | str = "cpu") -> torch.Tensor:
    """[height, width, 3] uint8 with memory of its own. A GPU fetches it while the host goes on."""
    return _uploaded(image.pixels, device)


def shrunk_tensors(image: ShrunkImage, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the global crop and the local ones are cut from, likewise."""
    return _uploaded(image.whole, device), None if image.tiled is None else _uploaded(image.tiled, device)


def _uploaded(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    on_gpu = torch.device(device).type == "cuda"
    pixels = torch.empty(array.shape, dtype=torch.uint8, pin_memory=on_gpu)
    pixels.numpy()[...] = array
    return pixels.to(device, non_blocking=on_gpu)


def make_crops(image: RgbImage | torch.Tensor, plan: TilingPlan) -> torch.Tensor:
    """[num_crops, crop, crop, 3] uint8 on the image's device: the global crop, then the local ones row by row.

    With a 1x1 grid the local crop equals the global one and only one is returned; `plan.local_crop_indices` says
    where the local crops are in either case.
    """
    pixels = image_tensor(image) if isinstance(image, RgbImage) else image
    if pixels.shape != (plan.height, plan.width, 3):
        raise ValueError(f"the plan is for {plan.height}x{plan.width} pixels, the image is {tuple(pixels.shape)}")
    size = plan.params.crop_size
    tiled = resize_lanczos(pixels, plan.resized_height, plan.resized_width) if plan.has_distinct_locals else None
    return cut_crops(resize_lanczos(pixels, size, size), tiled, plan)


def cut_crops(whole_HWC: torch.Tensor, tiled_HWC: torch.Tensor | None, plan: TilingPlan) -> torch.Tensor:
    """`make_crops` of a picture that is resized already."""
    size = plan.params.crop_size
    crops = whole_HWC.new_empty(plan.num_crops, size, size, 3)
    crops[0] = whole_HWC
    if tiled_HWC is not None:
        windows = tiled_HWC.unfold(0, size, plan.params.window_px).unfold(1, size, plan.params.window_px)
        crops[1:].unflatten(0, (plan.rows, plan.cols)).copy_(windows.permute(0, 1, 3, 4, 2))
    return crops


def cut_patches(pixels_HWC: torch.Tensor, plan: TilingPlan, dtype: torch.dtype, ops: Ops) -> torch.Tensor:
    """`normalise_and_patchify` of `make_crops` in few operations, with zeros behind each patch (see `ops.patchify`)."""
    size = plan.params.crop_size
    whole = resize_by_taps(pixels_HWC, size, size, ops.resample)
    tiled = None
    if plan.has_distinct_locals:
        tiled = resize_by_taps(pixels_HWC, plan.resized_height, plan.resized_width, ops.resample)
    return cut_resized(whole, tiled, plan, dtype, ops)


def cut_resized(
    whole_HWC: torch.Tensor, tiled_HWC: torch.Tensor | None, plan: TilingPlan, dtype: torch.dtype, ops: Ops
) -> torch.Tensor:
    """`cut_patches` of a picture that is resized already."""
    params = plan.params
    size, patch = params.crop_size, params.patch_size
    patches_1PC = ops.patchify(whole_HWC, (1, 1), params.window_px, size, patch, dtype)
    if tiled_HWC is None:
        return patches_1PC
    locals_NPC = ops.patchify(tiled_HWC, (plan.rows, plan.cols), params.window_px, size, patch, dtype)
    return torch.cat((patches_1PC, locals_NPC))


def normalise_and_patchify(crops_NHWC: torch.Tensor, patch_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, crop, crop, 3] uint8 -> [N, grid * grid, 3 * patch * patch] in -1..1.

    Patches go row by row; inside a patch the order is channel, row, column. The arithmetic is float32 whatever
    `dtype` the result is cast to.
    """
    num_crops, height, width, channels = crops_NHWC.shape
    rows, cols = height // patch_size, width // patch_size
    assert crops_NHWC.dtype == torch.uint8
    assert (rows * patch_size, cols * patch_size) == (height, width)
    split = crops_NHWC.view(num_crops, rows, patch_size, cols, patch_size, channels)
    patches = split.permute(0, 1, 3, 5, 2, 4).reshape(num_crops, rows * cols, channels * patch_size**2)
    return patches.to(torch.float32).div_(255).sub_(0.5).div_(0.5).to(dtype)
