"""The paged key/value tensors of all layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kestrel.models.contract import DecoderShape
from kestrel.runtime.contract import PageCopy
from kestrel.runtime.device import upload


class PagedKVCache:
    """Per layer [(num_pages + 1) · page_size, kv_heads, head_dim]; slot of a position = page · page_size + offset.

    The page after the last belongs to nobody: positions that only fill up a batch write there.
    """

    def __init__(
        self,
        shape: DecoderShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[tuple[float, float]] = (),
    ) -> None:
        """`scales` of keys and values by layer are for float8; without them numbers are kept as they are."""
        assert not scales or (dtype.itemsize == 1 and len(scales) == shape.num_layers)
        self.num_pages = num_pages
        self._scales = scales or [(1.0, 1.0)] * shape.num_layers
        self.page_size = page_size
        size = (shape.num_layers, (num_pages + 1) * page_size, shape.num_kv_heads, shape.head_dim)
        self._k = _zeros(size, dtype, device)
        self._v = _zeros(size, dtype, device)

    @property
    def spare_page(self) -> int:
        return self.num_pages

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._k[index], self._v[index]

    def scales(self, index: int) -> tuple[float, float]:
        """Stored keys and values times these are the keys and values of the layer."""
        return self._scales[index]

    def copy_pages(self, copies: list[PageCopy]) -> None:
        if not copies:
            return
        pages = upload([(copy.source, copy.target) for copy in copies], self._k.device)
        for numbers in (self._k, self._v):
            # float8 as bytes, which can be indexed on every device.
            cache = numbers.view(torch.uint8) if numbers.dtype.itemsize == 1 else numbers
            by_page = cache.view(cache.shape[0], self.num_pages + 1, self.page_size, *cache.shape[2:])
            by_page[:, pages[:, 1]] = by_page[:, pages[:, 0]]


def bytes_per_page(shape: DecoderShape, page_size: int, dtype: torch.dtype) -> int:
    return 2 * shape.num_layers * page_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: masked slots are multiplied by a zero weight, which garbage NaNs would survive.

    On a CPU the operating system hands zero pages out as they are first touched, so an unused cache costs nothing.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(size)
