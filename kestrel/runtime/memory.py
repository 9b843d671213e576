"""What a device's memory is for: planned once at the start, passed on as plain numbers.

The peak activation memory of a step is measured on a GPU before the KV cache is sized from the rest.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.images.picture import RgbImage
from kestrel.layers.attention import Heads
from kestrel.models.contract import DecoderModel, DecoderShape
from kestrel.runtime.attention import PagedKVCache, bytes_per_page, stored_and_attended
from kestrel.runtime.contract import RuntimeLimits
from kestrel.runtime.pictures import MAX_NUMBERS
from kestrel.runtime.process.pictures import MAX_BYTES

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
    sampling: int = 0
    """Of scores and what they are made from; made once."""
    kept_pictures: int = 0
    """Of embeddings of pictures whose requests have no row yet."""

    def planned(self, num_crops: int) -> int:
        """For pictures of so many crops together, beside a step."""
        return (
            ROOM
            + self.sampling
            + self.kept_pictures
            + int(self._held_per_byte * (num_crops * self.per_crop + self.prefill))
        )

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

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        if self.by_kernels:
            return stored_and_attended(self, layer, heads)
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
    vision = model.vision
    if vision is not None:
        picture = RgbImage.from_pixels(np.zeros((picture_side, picture_side, 3), np.uint8), copy=False)
        prepared = vision.prepare_image(picture)
        per_crop = -(-peak(model.device, lambda: vision.embed_images([prepared])) // prepared.num_crops)
    positions_T = torch.zeros(max_positions, dtype=torch.int64, device=model.device)
    x_TD = torch.zeros(max_positions, model.shape.hidden_dim, dtype=model.dtype, device=model.device)
    nothing = NothingSeen(PagedKVCache(model.shape, 1, 1, kv_dtype, model.device), positions_T, by_kernels)
    prefill = peak(model.device, lambda: model.forward(x_TD, positions_T, nothing))
    return WorkingMemory(per_crop, prefill, is_captured)


# ---------------------------------------------------------------------- the plan


MIN_TEXT_POSITIONS = 64
DEFAULT_FRACTION = {"cuda": 0.8, "cpu": 0.25}
GIB = 2**30
logger = logging.getLogger("kestrel.runtime")
CACHED_CONTEXTS_PER_ROW = 4
"""Planned pages beyond what running sequences can use, kept for the prefix cache: this many contexts per row."""


def plan_pages(
    config: RuntimeConfig, shape: DecoderShape, device: torch.device, kv_dtype: torch.dtype, working_bytes: int = 0
) -> int:
    """Pages to allocate: as configured, or as many as are useful and fit the allowed share of the free memory.

    `working_bytes` are free still, but kept for the steps.
    """
    free = _free_beside_steps(device, working_bytes)
    if device.type == "cpu":
        free //= config.tensor_parallel_size  # all ranks take theirs from the same
    least = -(-(shape.num_image_positions + MIN_TEXT_POSITIONS) // config.page_size)
    page_bytes = bytes_per_page(shape, config.page_size, kv_dtype)
    if config.kv_cache_pages is not None:
        if config.kv_cache_pages < least:
            raise ConfigError(
                "kv_cache_pages",
                f"{config.kv_cache_pages} pages of {config.page_size} cannot hold {_one_request(shape)}; "
                f"use at least {least}",
            )
        needed = config.kv_cache_pages * page_bytes
        if needed > free:
            raise ConfigError(
                "kv_cache_pages",
                f"{config.kv_cache_pages} pages need {needed / GIB:.1f} GiB, but {_left(free, working_bytes, device)}; "
                f"use {_at_most(free // page_bytes, least)}{_smaller_steps(working_bytes)}",
            )
        return config.kv_cache_pages
    context = config.max_seq_length or shape.max_context
    useful = config.max_batch_size * (1 + CACHED_CONTEXTS_PER_ROW) * -(-context // config.page_size)
    fraction = config.kv_cache_memory_fraction or DEFAULT_FRACTION[device.type]
    affordable = int(free * fraction) // page_bytes
    if affordable < least:
        raise ConfigError(
            "kv_cache_memory_fraction",
            f"{_left(free, working_bytes, device)}, and {fraction} of that cannot hold {_one_request(shape)} "
            f"({least * page_bytes / GIB:.2f} GiB needed); free memory, raise it, or use a smaller model"
            f"{_smaller_steps(working_bytes)}",
        )
    return min(useful, affordable)


def _one_request(shape: DecoderShape) -> str:
    return "one picture and a question" if shape.num_image_positions else f"a prompt of {MIN_TEXT_POSITIONS} tokens"


def _free_beside_steps(device: torch.device, working_bytes: int) -> int:
    free = free_memory_bytes(device)
    if working_bytes > free:
        raise ConfigError(
            "device",
            f"beside the weights {free / GIB:.1f} GiB are free on {device}, and steps need {working_bytes / GIB:.1f} "
            "GiB for graphs and activations; lower max_prefill_tokens or vision_batch_crops, set enable_cuda_graphs to "
            "false, or free memory",
        )
    return free - working_bytes


def _at_most(num_pages: int, least: int) -> str:
    return f"at most {num_pages}" if num_pages >= least else "a smaller model"


def _left(free: int, working_bytes: int, device: torch.device) -> str:
    kept = f" beside {working_bytes / GIB:.1f} GiB for graphs and activations" if working_bytes else ""
    return f"{free / GIB:.1f} GiB are free on {device}{kept}"


def _smaller_steps(working_bytes: int) -> str:
    if not working_bytes:
        return ""
    return ", or lower max_prefill_tokens or vision_batch_crops, or set enable_cuda_graphs to false"


@contextmanager
def naming_memory_knobs() -> Iterator[None]:
    """A device that runs out of memory while a model is set up: what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "device",
            f"its memory does not hold the model and its buffers ({str(error).splitlines()[0]}); lower "
            "kv_cache_memory_fraction, max_batch_size, max_prefill_tokens, vision_batch_crops, max_adapters or "
            "max_adapter_rank, set quantization or kv_cache_dtype to fp8 or enable_cuda_graphs to false, or free "
            "memory",
        ) from error


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the memory of a device is for."""

    device: torch.device
    kv_bytes: int
    kv_words: str
    other_bytes: int = 0
    """Of weights and buffers; known of a GPU."""
    working_bytes: int = 0
    """The most for graphs and activations; known of a GPU."""
    picture_bytes: int = 0
    """The most of the host's memory that pictures take, from their decoding to the answer; 0: the model reads none."""

    @classmethod
    def of(
        cls,
        shape: DecoderShape,
        limits: RuntimeLimits,
        kv_dtype: torch.dtype,
        device: torch.device,
        working_bytes: int,
        picture_bytes: int = 0,
    ) -> MemoryPlan:
        """Once everything that stays is in place."""
        kv_bytes = limits.num_pages * bytes_per_page(shape, limits.page_size, kv_dtype)
        dtype = str(kv_dtype).removeprefix("torch.")
        words = f"{limits.num_pages} pages of {limits.page_size} positions, {dtype}"
        if device.type != "cuda":
            return cls(device, kv_bytes, words, picture_bytes=picture_bytes)
        other_bytes = torch.cuda.memory_allocated(device) - kv_bytes
        return cls(device, kv_bytes, words, other_bytes, working_bytes, picture_bytes)

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.other_bytes + self.working_bytes

    def warn_if_short(self) -> None:
        """Memory of the host is taken as it is used, so too little of it shows late."""
        needed = self.picture_bytes + (self.kv_bytes if self.device.type == "cpu" else 0)
        free = free_host_bytes()
        if needed > free:
            takers, knobs = "the KV cache", "kv_cache_pages"
            if self.picture_bytes:
                takers, knobs = "pictures and KV cache", f"max_pending_image_bytes, image_work_bytes or {knobs}"
            logger.warning(
                "%.1f GiB of memory are free, and %s may take %.1f GiB; lower %s",
                *(free / GIB, takers, needed / GIB, knobs),
            )

    def __str__(self) -> str:
        kv = f"KV cache {self.kv_bytes / GIB:.2f} GiB ({self.kv_words})"
        pictures = f"pictures up to {self.picture_bytes / GIB:.2f} GiB" if self.picture_bytes else ""
        if self.device.type != "cuda":
            return f"memory: {kv}, " + (f"{pictures}, taken as they are used" if pictures else "taken as it is used")
        return (
            f"memory of {self.device}: {kv}, weights and buffers {self.other_bytes / GIB:.2f} GiB, graphs and "
            f"activations up to {self.working_bytes / GIB:.2f} GiB: {self.total_bytes / GIB:.2f} GiB in all"
            + (f"; {pictures} of the host's" if pictures else "")
        )


def picture_bytes(config: RuntimeConfig, device: torch.device, dtype: torch.dtype) -> int:
    """What pictures take of the host's memory at most; `WorkingMemory` has what they take of a GPU's."""
    waiting = config.max_pending_image_bytes + config.image_work_bytes + config.recent_image_bytes
    return waiting + (MAX_BYTES + MAX_NUMBERS * dtype.itemsize if device.type == "cpu" else 0)


def free_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()


def free_host_bytes() -> int:
    return int(min(_free_on_host(), _free_in_cgroup()))


def _free_in_cgroup() -> float:
    """What a container may still take; infinite without a limit."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return max(0, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no cgroup v2 here, or "max"
        return math.inf


def _free_on_host() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
