"""What steps need beside weights and cache: measured on a GPU before the cache is planned, which gets of the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kestrel.images.rgb import RgbImage
from kestrel.layers.attention import Heads
from kestrel.models.contract import DecoderModel
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.step_attention import stored_and_attended

ROOM = 2**29
"""For pictures on their way to the encoder, adapters, sampling, and buffers of steps."""
SCATTER = 1.5
"""An allocator holds more than is in use at any time: what is freed does not lie side by side."""
PeakBytes = Callable[[torch.device, Callable[[], object]], int]


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """Most bytes in use at once while a step runs."""

    per_crop: int
    """Of encoding pictures."""
    prefill: int
    """Of the layers, for as many positions as a step may have."""
    is_captured: bool
    """Steps run in ordinary memory when they first come up, and in that of their graphs later."""

    def planned(self, num_crops: int) -> int:
        """For pictures of so many crops together, beside a step."""
        return ROOM + int(self._held_per_byte * (num_crops * self.per_crop + self.prefill))

    def affordable_crops(self, num_bytes: int) -> int:
        """The most that `planned` keeps below this; not positive when even the rest takes more."""
        if self.per_crop == 0:
            return 0
        return int((num_bytes - self.planned(0)) // (self._held_per_byte * self.per_crop))

    @property
    def _held_per_byte(self) -> float:
        return SCATTER * (2 if self.is_captured else 1)


@dataclass(frozen=True, slots=True)
class NothingSeen:
    """Attention that keeps nothing and sees nothing: layers run with it without a cache."""

    kv: PagedKVCache
    slots_T: Tensor
    by_kernels: bool

    def __call__(self, layer: int, heads: Heads, out_TD: Tensor | None = None) -> Tensor:
        if self.by_kernels:
            return stored_and_attended(self, layer, heads, out_TD)
        return torch.zeros_like(heads.rotated()[0]).flatten(1)

    def attend_stored(self, layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
        out_THD.zero_()


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """The most that a GPU's allocator has given out at once for this work, libraries' own memory aside, which they take
    the first time."""
    work()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


@torch.inference_mode()
def measure_working_memory(
    model: DecoderModel,
    max_positions: int,
    kv_dtype: torch.dtype,
    is_captured: bool,
    by_kernels: bool,
    picture_side: int = 2000,
    peak: PeakBytes = peak_bytes,
) -> WorkingMemory:
    """By running the model on a large picture, and on as many positions as a step may have."""
    per_crop = 0
    if model.shape.num_image_positions:
        picture = RgbImage.from_pixels(np.zeros((picture_side, picture_side, 3), np.uint8), copy=False)
        prepared = model.prepare_image(picture)
        per_crop = -(-peak(model.device, lambda: model.embed_images([prepared])) // prepared.num_crops)
    positions_T = torch.zeros(max_positions, dtype=torch.int64, device=model.device)
    x_TD = torch.zeros(max_positions, model.shape.hidden_dim, dtype=model.dtype, device=model.device)
    nothing = NothingSeen(PagedKVCache(model.shape, 1, 1, kv_dtype, model.device), positions_T, by_kernels)
    prefill = peak(model.device, lambda: model.forward(x_TD, positions_T, nothing))
    return WorkingMemory(per_crop, prefill, is_captured)
