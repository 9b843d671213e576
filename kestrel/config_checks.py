"""What single fields of a configuration may hold."""

from __future__ import annotations

import re
import string
from dataclasses import fields
from typing import Any

from kestrel.errors import ConfigError, shown

ADAPTER_PLACEHOLDERS = ("id", "finetune_id", "step")


def check_url_template(template: Any) -> None:
    if template is None:
        return
    form = "write it as https://example.org/adapters/{id}.safetensors, or with {finetune_id} and {step}"
    if not isinstance(template, str) or not template.startswith(("https://", "http://")):
        raise ConfigError("adapter_url_template", f"must be a URL (got {shown(template)}); {form}")
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError("adapter_url_template", f"has unbalanced braces ({error}); {form}") from None
    names = [name for _, name, _, _ in parts if name is not None]
    plain = all(not spec and conversion is None for _, name, spec, conversion in parts if name is not None)
    if not plain or not set(names) <= set(ADAPTER_PLACEHOLDERS) or not {"id", "finetune_id"} & set(names):
        raise ConfigError("adapter_url_template", f"has the placeholders {names}; {form}")
    if "{" in template.split("/", 3)[2]:
        raise ConfigError("adapter_url_template", f"must not have placeholders in its host; {form}")


def check_revision(revision: Any) -> None:
    if revision is None:
        return
    is_sound = isinstance(revision, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}", revision) is not None
    if not is_sound or ".." in revision:
        raise ConfigError(
            "revision", f"must be a commit, tag or branch (got {shown(revision)}), as the page of the model lists them"
        )


RANGES: dict[str, tuple[float, float]] = {
    "max_batch_size": (1, 4096),
    "page_size": (1, 1024),
    "max_adapters": (1, 1024),
    "max_adapter_rank": (1, 4096),
    "adapter_memory_bytes": (1, 2**50),
    "adapter_cache_bytes": (1, 2**50),
    "max_prefill_tokens": (1, 2**20),
    "streaming_prefill_tokens": (0, 2**20),
    "max_queue_size": (1, 10**7),
    "vision_batch_crops": (1, 4096),
    "max_queue_tokens": (1, 2**40),
    "max_image_pixels": (1, 2**31),
    "max_image_bytes": (1, 2**40),
    "max_pending_image_bytes": (1, 2**50),
    "image_work_bytes": (2**20, 2**50),
    "recent_image_bytes": (0, 2**50),
    "image_threads": (1, 256),
    "max_seq_length": (2, 2**20),
    "kv_cache_pages": (2, 2**31 - 1),
}


def check_numbers(config: Any) -> None:
    for name, (low, high) in RANGES.items():
        value = getattr(config, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(name, f"must be an integer from {low} to {high} (got {shown(value)})")
    for name, low, high in (("kv_cache_memory_fraction", 0.01, 0.98), ("priority_ageing_s", 0.001, 1e6)):
        value = getattr(config, name)
        if value is None and name == "kv_cache_memory_fraction":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ConfigError(name, f"must be a number from {low} to {high} (got {shown(value)})")
    for f in fields(config):
        if f.type == "bool" and not isinstance(getattr(config, f.name), bool):
            raise ConfigError(f.name, f"must be True or False (got {shown(getattr(config, f.name))})")


def check_device(device: Any) -> None:
    valid = isinstance(device, str) and (
        device in ("auto", "cpu", "cuda") or re.fullmatch(r"cuda:[0-9]{1,3}", device) is not None
    )
    if not valid:
        raise ConfigError("device", f"{shown(device)} is not supported; use auto, cpu, cuda or cuda:N")
