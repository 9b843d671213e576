"""Which device and number format to run on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError


def choose_device(config: RuntimeConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(config.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "device", f"{config.device!r} was asked for but torch sees no NVIDIA GPU; use cpu or auto"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError("device", f"{config.device!r}: this machine has {torch.cuda.device_count()} GPU(s)")
    return device


def choose_dtype(config: RuntimeConfig, device: torch.device) -> torch.dtype:
    if config.dtype_name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype_name]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels and events inside belong to this GPU: what a thread uses otherwise is the first one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
