"""Arrays to tensors on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on the device, without waiting for work under way there; treat it as read-only."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
