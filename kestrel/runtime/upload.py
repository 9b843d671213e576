"""Small host lists to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of nested lists. Through pinned memory, since a pageable copy would wait for the whole stream."""
    on_host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return on_host
    return on_host.pin_memory().to(device, non_blocking=True)
