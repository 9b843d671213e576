"""What a configuration leaves open, by device: budgets of a step, sizes of batches, pages of the cache."""

from __future__ import annotations

import torch

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.models.contract import DecoderShape
from kestrel.runtime.contract import RuntimeLimits
from kestrel.runtime.memory import free_memory_bytes, plan_pages
from kestrel.runtime.working_memory import WorkingMemory

CROPS_ON_GPU, CROPS_ON_CPU = 72, 16
CROPS_OF_A_PICTURE = 13
"""The most that a picture of usual shape comes in; narrow ones come in more."""
SHARE_OF_STEPS = 0.2
"""Of the free memory, for as many crops as that holds."""


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then every eighth up to 64, then doubling; the largest is one of them."""
    usual = [1, 2, 4, 8, *range(16, 65, 8), *(2**power for power in range(7, 13))]
    return [*(size for size in usual if size < largest), largest]


def prefill_budget(config: RuntimeConfig, shape: DecoderShape, device: torch.device) -> int:
    """Whoever asks for many rows wants throughput: more prompts in a step share the reading of the weights.

    No more than all rows can hold.
    """
    budget = config.max_prefill_tokens
    if budget is None:
        budget = 4096 if device.type == "cuda" and config.max_batch_size >= 16 else 2048
    return min(budget, config.max_batch_size * (config.max_seq_length or shape.max_context))


def streaming_budget(config: RuntimeConfig, device: torch.device) -> int:
    """On a GPU a picture's positions, which have to be computed together, with a question."""
    if config.streaming_prefill_tokens is not None:
        return config.streaming_prefill_tokens
    return 768 if device.type == "cuda" else 256


def batch_crops(config: RuntimeConfig, device: torch.device, working: WorkingMemory | None) -> int:
    """Crops encoded together: a GPU is the faster the more there are, a CPU only needs more memory."""
    if config.vision_batch_crops is not None:
        return config.vision_batch_crops
    if working is None:
        return CROPS_ON_CPU
    affordable = working.affordable_crops(int(SHARE_OF_STEPS * free_memory_bytes(device)))
    return min(CROPS_ON_GPU, max(CROPS_OF_A_PICTURE, affordable))


def runtime_limits(
    shape: DecoderShape,
    device: torch.device,
    config: RuntimeConfig,
    kv_dtype: torch.dtype,
    num_adapter_slots: int = 0,
    working_bytes: int = 0,
) -> RuntimeLimits:
    max_seq_length = config.max_seq_length or shape.max_context
    if max_seq_length > shape.max_context:
        raise ConfigError(
            "max_seq_length", f"{max_seq_length} exceeds the model's context of {shape.max_context}; lower it"
        )
    return RuntimeLimits(
        max_batch_size=config.max_batch_size,
        max_seq_length=max_seq_length,
        num_pages=plan_pages(config, shape, device, kv_dtype, working_bytes),
        page_size=config.page_size,
        max_prefill_tokens=prefill_budget(config, shape, device),
        steps_in_flight=1 if device.type == "cuda" else 0,
        num_adapter_slots=num_adapter_slots,
        streaming_prefill_tokens=streaming_budget(config, device),
        paces_pictures=device.type != "cuda",
    )
