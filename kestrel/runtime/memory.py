"""How many KV pages fit: measured once at start-up, passed on as a plain number."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.models.contract import DecoderShape
from kestrel.runtime.kv_cache import bytes_per_page

MIN_TEXT_POSITIONS = 64
DEFAULT_FRACTION = {"cuda": 0.8, "cpu": 0.25}
CACHED_CONTEXTS_PER_ROW = 4
"""Planned pages beyond what running sequences can use, kept for the prefix cache: this many contexts per row."""


def plan_pages(config: RuntimeConfig, shape: DecoderShape, device: torch.device, kv_dtype: torch.dtype) -> int:
    """Pages to allocate: as configured, or as many as are useful and fit the allowed share of the free memory."""
    least = -(-(shape.num_image_positions + MIN_TEXT_POSITIONS) // config.page_size)
    page_bytes = bytes_per_page(shape, config.page_size, kv_dtype)
    if config.kv_cache_pages is not None:
        if config.kv_cache_pages < least:
            raise ConfigError(
                "kv_cache_pages",
                f"{config.kv_cache_pages} pages of {config.page_size} cannot hold one picture and a question; "
                f"use at least {least}",
            )
        needed, free = config.kv_cache_pages * page_bytes, free_memory_bytes(device)
        if needed > free:
            raise ConfigError(
                "kv_cache_pages",
                f"{config.kv_cache_pages} pages need {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free on "
                f"{device}; use at most {free // page_bytes}",
            )
        return config.kv_cache_pages
    context = config.max_seq_length or shape.max_context
    useful = config.max_batch_size * (1 + CACHED_CONTEXTS_PER_ROW) * -(-context // config.page_size)
    free = free_memory_bytes(device)
    fraction = config.kv_cache_memory_fraction or DEFAULT_FRACTION[device.type]
    affordable = int(free * fraction) // page_bytes
    if affordable < least:
        raise ConfigError(
            "kv_cache_memory_fraction",
            f"{fraction} of {free / 2**30:.1f} GiB free on {device} cannot hold one picture "
            f"({least * page_bytes / 2**30:.2f} GiB needed); free memory, raise it, or use a smaller model",
        )
    return min(useful, affordable)


@contextmanager
def naming_memory_knobs() -> Iterator[None]:
    """A device that runs out of memory while a model is set up: what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "device",
            f"its memory does not hold the model and its buffers ({str(error).splitlines()[0]}); lower "
            "kv_cache_memory_fraction, max_batch_size, max_prefill_tokens, vision_batch_crops or max_adapters, set "
            "quantization or kv_cache_dtype to fp8, or free memory",
        ) from error


def memory_report(
    shape: DecoderShape, num_pages: int, page_size: int, kv_dtype: torch.dtype, device: torch.device
) -> str:
    """What was planned, in words."""
    kv_gib = num_pages * bytes_per_page(shape, page_size, kv_dtype) / 2**30
    dtype = str(kv_dtype).removeprefix("torch.")
    kv = f"KV cache {kv_gib:.2f} GiB ({num_pages} pages of {page_size} positions, {dtype})"
    if device.type != "cuda":
        return f"memory: {kv}, taken as it is used"
    taken, free = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
    return (
        f"memory of {device}: {kv}, weights and buffers {taken / 2**30 - kv_gib:.2f} GiB, {free / 2**30:.2f} GiB free "
        "for graphs and activations"
    )


def free_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
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
