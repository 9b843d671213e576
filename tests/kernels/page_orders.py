"""The orders in which a page of a cache may lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
from torch import Tensor

Order: TypeAlias = Callable[[Tensor], Tensor]


def position_major(cache: Tensor) -> Tensor:
    """[.., num_pages, page_size, kv_heads, head_dim], as on a CPU."""
    return cache.contiguous()


def head_major(cache: Tensor) -> Tensor:
    """The same numbers, as on a GPU."""
    return cache.transpose(-3, -2).contiguous().transpose(-3, -2)


orders = pytest.mark.parametrize("order", [position_major, head_major])
