"""The device: which one and in which numbers, tensors on their way to it, and the GIL beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

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


# ---------------------------------------------------------------------- from the host to the device without waiting


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of nested lists. Through pinned memory, since a pageable copy would wait for the whole stream."""
    return upload_tensor(torch.tensor(values, dtype=dtype), device)


def upload_tensor(on_host: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return on_host
    return on_host.pin_memory().to(device, non_blocking=True)


def start_download(on_device: Tensor) -> Tensor:
    """Pinned host memory that holds a CUDA tensor's values once the stream has come this far."""
    target = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
    return target.copy_(on_device, non_blocking=True)


# ---------------------------------------------------------------------- the GIL
# Every operation that is launched releases the GIL and asks for it again, and whoever has it then may keep it for 5 ms
# by default: while many requests came in, a step of fifty launches took 150 ms, with the GPU idle.


PYTHONS_CHOICE_S = 0.005
SHORT_S = 0.0005


def shorten_turns() -> bool:
    """For the whole process. False where the program has chosen another time already."""
    if abs(sys.getswitchinterval() - PYTHONS_CHOICE_S) > PYTHONS_CHOICE_S / 100:
        return False
    sys.setswitchinterval(SHORT_S)
    return True
