"""Lanczos resizing with the exact 8-bit arithmetic of Pillow, as matrix products on any device.

An output pixel is a weighted sum of the input pixels within three (scaled) pixels of its centre. Weights are
rounded to multiples of 2**-22 and each of the two passes, along rows and along columns, is rounded to bytes. All
products and sums are multiples of 2**-22 below 2**31, so float64 holds them exactly in any order of summation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch

from kestrel.images.picture import columns_first

Resample: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The contract of `kestrel.kernels.vision`."""

_LOBES = 3.0
_WEIGHT_BITS = 22
_MAX_BAND_INPUTS = 1024
"""Inputs per band, apart from the taps at its ends: keeps the blocks of strong shrinking small."""


@dataclass(frozen=True)
class Band:
    """Neighbouring outputs and the input range that feeds them: a small dense block of the banded weight matrix."""

    out_start: int
    out_end: int
    in_start: int
    in_end: int
    weights_IO: torch.Tensor
    """[in_end - in_start, out_end - out_start] float64."""


@dataclass(frozen=True)
class _Scratch:
    band_outputs: int
    """Outputs per band: small bands skip zeros, large ones need fewer launches."""
    chunk_elements: int
    """Values held as float64 at a time."""


_CPU_SCRATCH = _Scratch(band_outputs=32, chunk_elements=2**19)
_GPU_SCRATCH = _Scratch(band_outputs=2048, chunk_elements=2**25)


def _scratch_for(device: torch.device) -> _Scratch:
    return _CPU_SCRATCH if device.type == "cpu" else _GPU_SCRATCH


def resize_lanczos(image: torch.Tensor, out_height: int, out_width: int) -> torch.Tensor:
    """[height, width, 3] uint8 -> [out_height, out_width, 3] uint8 on the same device."""
    assert image.ndim == 3
    assert image.dtype == torch.uint8
    height, width, channels = image.shape
    if height == out_height and width == out_width:
        return image.clone()
    if columns_first(height, width, out_height, out_width):
        resized_HR = _resize_columns(image.reshape(height, width * channels), out_height)
        resized_HCW = _resize_rows(resized_HR.view(out_height, width, channels), out_width)
    else:
        resized_HCW = _resize_rows(image, out_width)
        resized_HR = _resize_columns(resized_HCW.view(height, channels * out_width), out_height)
        resized_HCW = resized_HR.view(out_height, channels, out_width)
    return resized_HCW.permute(0, 2, 1).contiguous()


def resize_by_taps(image_HWC: torch.Tensor, out_height: int, out_width: int, resample: Resample) -> torch.Tensor:
    """`resize_lanczos` in two passes of a kernel."""
    height, width = image_HWC.shape[:2]
    if columns_first(height, width, out_height, out_width):
        image_HWC = _resample_columns(image_HWC, out_height, resample)
    if width != out_width:
        image_HWC = resample(image_HWC, *lanczos_taps(width, out_width, image_HWC.device))
    return _resample_columns(image_HWC, out_height, resample)


def _resample_columns(image_HWC: torch.Tensor, out_height: int, resample: Resample) -> torch.Tensor:
    height, width, channels = image_HWC.shape
    if height == out_height:
        return image_HWC
    rows_1HR = image_HWC.view(1, height, width * channels)
    return resample(rows_1HR, *lanczos_taps(height, out_height, image_HWC.device)).view(out_height, width, channels)


@lru_cache(maxsize=256)
def lanczos_taps(in_size: int, out_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """First input of each output, and the weights of the inputs from there on."""
    first_O, weights_OK = _lanczos_weights(in_size, out_size)
    return torch.from_numpy(first_O).to(device), torch.from_numpy(np.ascontiguousarray(weights_OK)).to(device)


def _resize_rows(image_HWC: torch.Tensor, out_width: int) -> torch.Tensor:
    """[H, W, C] -> [H, C, out_width] uint8."""
    height, width, channels = image_HWC.shape
    if width == out_width:
        return image_HWC.permute(0, 2, 1).contiguous()
    scratch = _scratch_for(image_HWC.device)
    bands = lanczos_bands(width, out_width, scratch.band_outputs, image_HWC.device)
    resized_HCO = image_HWC.new_empty(height, channels, out_width)
    step = max(1, scratch.chunk_elements // (max(width, out_width) * channels))
    for start in range(0, height, step):
        chunk_HCW = image_HWC[start : start + step].permute(0, 2, 1)
        chunk_RW = chunk_HCW.to(torch.float64, memory_format=torch.contiguous_format).view(-1, width)
        sums_RO = chunk_RW.new_empty(chunk_RW.shape[0], out_width)
        for band in bands:
            inputs_RI = chunk_RW[:, band.in_start : band.in_end]
            torch.mm(inputs_RI, band.weights_IO, out=sums_RO[:, band.out_start : band.out_end])
        _round_to_bytes(sums_RO.view(-1, channels, out_width), resized_HCO[start : start + step])
    return resized_HCO


def _resize_columns(image_HR: torch.Tensor, out_height: int) -> torch.Tensor:
    """[H, R] -> [out_height, R] uint8."""
    height, row_size = image_HR.shape
    if height == out_height:
        return image_HR
    scratch = _scratch_for(image_HR.device)
    resized_OR = image_HR.new_empty(out_height, row_size)
    for band in lanczos_bands(height, out_height, scratch.band_outputs, image_HR.device):
        inputs_IR = image_HR[band.in_start : band.in_end]
        outputs_OR = resized_OR[band.out_start : band.out_end]
        step = max(1, scratch.chunk_elements // max(inputs_IR.shape[0], outputs_OR.shape[0]))
        for start in range(0, row_size, step):
            chunk_IR = inputs_IR[:, start : start + step].to(torch.float64)
            _round_to_bytes(band.weights_IO.T @ chunk_IR, outputs_OR[:, start : start + step])
    return resized_OR


def _round_to_bytes(sums: torch.Tensor, out: torch.Tensor) -> None:
    """Round half up and clip, in place; conversion to bytes drops the fraction."""
    out.copy_(sums.add_(0.5).clamp_(0, 255))


@lru_cache(maxsize=64)
def lanczos_bands(in_size: int, out_size: int, band_outputs: int, device: torch.device) -> tuple[Band, ...]:
    """The weight matrix of one axis, cut into blocks of at most `band_outputs` outputs."""
    first_O, weights_OK = _lanczos_weights(in_size, out_size)
    num_taps = weights_OK.shape[1]
    step = max(1, min(band_outputs, _MAX_BAND_INPUTS * out_size // in_size))
    bands = []
    for start in range(0, out_size, step):
        first = first_O[start : start + step]
        in_start, in_end = int(first[0]), int(first[-1]) + num_taps
        block_IO = np.zeros((in_end - in_start, len(first)))
        rows_OK = (first - in_start)[:, None] + np.arange(num_taps)
        block_IO[rows_OK, np.arange(len(first))[:, None]] = weights_OK[start : start + step]
        # Taps past the last input have weight 0.
        in_end = min(in_size, in_end)
        weights_IO = torch.from_numpy(block_IO[: in_end - in_start]).to(device)
        bands.append(Band(start, start + len(first), in_start, in_end, weights_IO))
    return tuple(bands)


def _lanczos_weights(in_size: int, out_size: int) -> tuple[np.ndarray, np.ndarray]:
    """First input of each output [out], and its weights [out, taps] in multiples of 2**-22."""
    scale = in_size / out_size
    stretch = max(scale, 1.0)
    support = _LOBES * stretch
    centre = (np.arange(out_size) + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + support + 0.5).astype(np.int64), in_size)
    index_OK = first[:, None] + np.arange(int((end - first).max()))
    weights_OK = _lanczos((index_OK - centre[:, None] + 0.5) * (1.0 / stretch))
    weights_OK[index_OK >= end[:, None]] = 0.0
    # Summed tap by tap: another order could differ in the last bit and tip a rounding.
    total = np.zeros(out_size)
    for tap in range(weights_OK.shape[1]):
        total += weights_OK[:, tap]
    steps = weights_OK / total[:, None] * 2.0**_WEIGHT_BITS
    return first, np.trunc(steps + np.where(steps < 0, -0.5, 0.5)) / 2.0**_WEIGHT_BITS


def _lanczos(x: np.ndarray) -> np.ndarray:
    """sinc(x) * sinc(x / 3) for -3 <= x < 3, else 0."""
    return np.where((x >= -_LOBES) & (x < _LOBES), _sinc(x) * _sinc(x / _LOBES), 0.0)


def _sinc(x: np.ndarray) -> np.ndarray:
    angle = x * math.pi
    safe = np.where(angle == 0.0, 1.0, angle)
    return np.where(angle == 0.0, 1.0, np.sin(safe) / safe)
