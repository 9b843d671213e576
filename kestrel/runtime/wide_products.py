"""Products of bfloat16 on processors without instructions for them.

There torch computes them with a routine some hundred times slower than the one for float32. Every bfloat16 is a float32
too, so a product in float32 that is rounded once, at its end, is the same product but for the order of its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kestrel.runtime.device import on_device

PRODUCTS = frozenset(
    {
        functional.linear,
        functional.scaled_dot_product_attention,
        functional.multi_head_attention_forward,
        functional.conv2d,
        functional.conv_transpose2d,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        Tensor.matmul,
        Tensor.__matmul__,
    }
)


def computing(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """What the passes of a model run in: its GPU, or a processor that computes its numbers as fast as it can."""
    return on_device(device) if fast_dtype(device, dtype) == dtype else WideProducts()


def fast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The precision to compute numbers of `dtype` in: their own, unless the processor has no fast way to do that."""
    is_slow = device.type == "cpu" and dtype == torch.bfloat16 and not has_fast_bfloat16()
    return torch.float32 if is_slow else dtype


@lru_cache(maxsize=1)
def has_fast_bfloat16() -> bool:
    """Whether torch has a routine for products of bfloat16 on this processor that deserves the name."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class WideProducts(TorchFunctionMode):
    """Products of bfloat16 inside are computed in float32; all else is left as it is."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS or _first_tensor(args).dtype != torch.bfloat16:
            return func(*args, **kwargs)
        return _rounded(func(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()}))


def _first_tensor(args: tuple[Any, ...]) -> Tensor:
    return next(one for one in args if isinstance(one, Tensor))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _rounded(result: Tensor | tuple[Tensor | None, ...] | None) -> Any:
    """Attention of several heads gives its weights, or None, beside its result."""
    if isinstance(result, tuple):
        return tuple(map(_rounded, result))
    return None if result is None else result.to(torch.bfloat16)
