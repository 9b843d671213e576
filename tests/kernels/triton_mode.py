"""Where Triton kernels are tested: on the GPU of this machine, or without one in Triton's interpreter.

Import this before any kernel: the interpreter is chosen when a kernel is defined.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# The default of Triton so far; from 3.9 on it warns that this will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def prepare_once() -> None:
    """The interpreter takes its language apart at every call inside a kernel, not only at its launch, and makes a table
    of all number types whenever it asks for one: a third of the time of these tests."""
    from triton.runtime import interpreter  # noqa: PLC0415 - after the choice above

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # an older Triton, which does it in other ways

    patch, np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    launch: dict[int, Any] = {}  # its scopes by the globals that they were made for, that of the kernel first
    np_dtypes: dict[str, Any] = {}

    def patch_once_a_launch(function: Any) -> Any:
        names = id(function.__globals__)
        if names not in launch:
            scope = patch(function)
            if not launch:
                restore = scope.restore
                scope.restore = lambda: (launch.clear(), restore())
            launch[names] = scope
        return launch[names]

    def np_dtype_once(tl_type: Any) -> Any:
        name = tl_type.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(tl_type.scalar)
        return np_dtypes[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once_a_launch, np_dtype_once
    describe_once()


def describe_once() -> None:
    """Every result has a type and a shape, each made of many small objects: a third of what is left. Those of one
    element type and shape are alike, and nobody changes them."""
    from triton.language import core, semantic  # noqa: PLC0415 - after the choice above

    # Whether a sum of integers fits is worked out for each, and told only to who debugs a kernel.
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(side.value if isinstance(side, core.constexpr) else side for side in shape)
        key = (element_ty.name, *sizes)
        if (known := blocks.get(key)) is None:
            make_block(self, element_ty, shape)
            known = blocks[key] = dict(self.__dict__, sizes=sizes)
        self.__dict__.update(known)

    def tensor_once(self: Any, handle: Any, type: Any) -> None:
        sizes = type.sizes if type.is_block() else ()
        if (known := shapes.get(sizes)) is None:
            make_tensor(self, handle, type)
            known = shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype, (self.shape, self.numel) = handle, type, type.scalar, known

    core.block_type.__init__, core.tensor.__init__ = block_once, tensor_once


if not torch.cuda.is_available():
    prepare_once()

DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]
devices = pytest.mark.parametrize("device", [pytest.param(d, marks=[pytest.mark.gpu] * (d == "cuda")) for d in DEVICES])

HALF = {"cuda": torch.bfloat16, "cpu": torch.float16}
"""The interpreter multiplies bfloat16 as if it were integers."""


class Draw:
    """Normal random numbers, the same in every run."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        self._device, self._dtype = device, dtype
        self._dice = torch.Generator().manual_seed(0)

    def __call__(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=self._dice) * scale).to(self._device, self._dtype)

    def integers(self, high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=self._dice).to(self._device)


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Of two tensors as vectors."""
    return float((got.double() - exact.double()).norm())


def fp8_steps(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How many float8 numbers lie between, for numbers of equal sign."""
    return (got.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()


def is_nearest_fp8(narrow: torch.Tensor, scale_T1: torch.Tensor, exact: torch.Tensor, device: str) -> bool:
    """Whether numbers were rounded to the nearest float8 (e4m3) or, where two are about equally near, to either.

    Without those that the interpreter misrounds: it cuts off below 2^-6, and forgets to carry into the exponent.
    """
    quotient = exact.double() / scale_T1.double()
    # Three bits after the leading one: half a step is 1/16. Below 2^-6 steps stop shrinking.
    half_step = torch.maximum(quotient.abs() / 16, torch.full_like(quotient, 2.0**-10))
    is_near = (narrow.double() - quotient).abs() <= 1.001 * half_step + 1e-3
    if device == "cpu":
        is_near |= (torch.frexp(quotient).mantissa.abs() > 0.968) | (quotient.abs() < 2.0**-6)
    return bool(is_near.all())
