"""From the host to the device and back without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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
