"""Matrix products by cuBLASLt with an algorithm that was measured for their size.

torch takes the algorithm that the library guesses to be the best. Among all that the library has, another one is often
faster: by 15 to 20 % for the matrices of a vision tower on an H200. A tuning table names it by the library's own
numbers; without an entry, with another version of the library, or where a tensor does not suit, torch's product runs.
Both give the same result up to the order of sums.

The library is the one that torch has loaded, and is called through ctypes. It counts in columns, so that our rows x and
weight are its columns: it is asked for  y [F, T] = weightᵀ · x  with both as they lie.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from kestrel.kernels import fp8
from kestrel.kernels import linear as plain
from kestrel.kernels.triton.launch import NO_TABLE, TuningTable, fine_rows_range

# ---------------------------------------------------------------------- the products


def linear(
    x: Tensor,
    weight_FD: Tensor,
    bias_F: Tensor | None = None,
    *,
    table: TuningTable = NO_TABLE,
    tuning: Algorithm | None = None,
) -> Tensor:
    """x · weightᵀ + bias."""
    plan = _plan_for("linear", x, weight_FD, bias_F, table, tuning)
    return functional.linear(x, weight_FD, bias_F) if plan is None else plan.run(x, weight_FD, bias_F)


def gelu_linear(
    x_TD: Tensor,
    weight_FD: Tensor,
    bias_F: Tensor,
    *,
    table: TuningTable = NO_TABLE,
    tuning: Algorithm | None = None,
) -> Tensor:
    """GELU_tanh(x · weightᵀ + bias)."""
    plan = _plan_for("gelu_linear", x_TD, weight_FD, bias_F, table, tuning)
    if plan is None:
        return (plain.gelu_linear_epilogue if x_TD.is_cuda else plain.gelu_linear)(x_TD, weight_FD, bias_F)
    return plan.run(x_TD, weight_FD, bias_F)


def add_linear(
    sum_TF: Tensor,
    x_TD: Tensor,
    weight_FD: Tensor,
    *,
    table: TuningTable = NO_TABLE,
    tuning: Algorithm | None = None,
) -> Tensor:
    """sum += x · weightᵀ, in place."""
    plan = _plan_for("add_linear", x_TD, weight_FD, None, table, tuning) if sum_TF.is_contiguous() else None
    return sum_TF.addmm_(x_TD, weight_FD.T) if plan is None else plan.run(x_TD, weight_FD, into_TF=sum_TF)


def fp8_linear(
    x_fp8_TD: Tensor,
    x_scale_T1: Tensor,
    weight_fp8_FD: Tensor,
    weight_scale_F: Tensor,
    bias_F: Tensor | None,
    out_dtype: torch.dtype,
    *,
    table: TuningTable = NO_TABLE,
    tuning: Algorithm | None = None,
) -> Tensor:
    """(x_scale · x_fp8) · (weight_scale · weight_fp8)ᵀ + bias."""
    plan = _plan_for("fp8_linear", x_fp8_TD, weight_fp8_FD, bias_F, table, tuning)
    if plan is None or out_dtype is not torch.bfloat16:
        run = fp8.scaled_mm_linear if x_fp8_TD.is_cuda else fp8.fp8_linear
        return run(x_fp8_TD, x_scale_T1, weight_fp8_FD, weight_scale_F, bias_F, out_dtype)
    return plan.run(x_fp8_TD, weight_fp8_FD, bias_F, scales=(x_scale_T1, weight_scale_F))


def add_fp8_linear(
    sum_TF: Tensor,
    x_fp8_TD: Tensor,
    x_scale_T1: Tensor,
    weight_fp8_FD: Tensor,
    weight_scale_F: Tensor,
    *,
    table: TuningTable = NO_TABLE,
    tuning: Algorithm | None = None,
) -> Tensor:
    """sum += (x_scale · x_fp8) · (weight_scale · weight_fp8)ᵀ, in place. torch has no such product: where the table
    names no algorithm, the library's guess is taken."""
    plan = _plan_for("add_fp8_linear", x_fp8_TD, weight_fp8_FD, None, table, tuning) if sum_TF.is_contiguous() else None
    if plan is None or sum_TF.dtype is not torch.bfloat16:
        return fp8.add_fp8_linear(sum_TF, x_fp8_TD, x_scale_T1, weight_fp8_FD, weight_scale_F)
    return plan.run(x_fp8_TD, weight_fp8_FD, scales=(x_scale_T1, weight_scale_F), into_TF=sum_TF)


def _plan_for(
    op: str, x: Tensor, weight_FD: Tensor, bias_F: Tensor | None, table: TuningTable, tuning: Algorithm | None
) -> _Plan | None:
    """None: torch's product is to run."""
    if x.ndim != 2 or not x.shape[0]:
        return None
    if tuning is None:
        tuning = table.find_in(op, fine_rows_range(x.shape[0]), tuple(weight_FD.shape), x.dtype)
    if tuning is None and op == "add_fp8_linear" and _suits(x) and _suits(weight_FD):
        tuning = _first_guess(op, x.device.index, _sizes(x, weight_FD))
    if tuning is None or tuning.library != loaded_version() or not (_suits(x) and _suits(weight_FD)):
        return None
    if x.dtype is not weight_FD.dtype or not _is_bias(bias_F):
        return None
    return _plan(op, x.device.index, bias_F is not None, _sizes(x, weight_FD), tuning)


def _sizes(x_TD: Tensor, weight_FD: Tensor) -> Sizes:
    (num_rows, num_in), num_out = x_TD.shape, weight_FD.shape[0]
    return num_rows, num_in, num_out, x_TD.stride(0), weight_FD.stride(0)


def _suits(x_TD: Tensor) -> bool:
    """Rows of bfloat16 or float8 that lie as the library's kernels read them: in steps of 16 bytes."""
    return (
        x_TD.is_cuda
        and x_TD.dtype in DATA_TYPES
        and x_TD.stride(1) == 1
        and x_TD.data_ptr() % 16 == 0
        and x_TD.stride(0) * x_TD.element_size() % 16 == 0
    )


def _is_bias(bias_F: Tensor | None) -> bool:
    return bias_F is None or (bias_F.dtype is torch.bfloat16 and bias_F.data_ptr() % 16 == 0)


# ---------------------------------------------------------------------- algorithms

DATA_TYPES = {torch.bfloat16: 14, torch.float8_e4m3fn: 28}
Sizes: TypeAlias = tuple[int, int, int, int, int]
"""Rows, inputs, outputs; numbers from one row to the next, of x and of the weight."""
FP32, COMPUTE_FP32 = 0, 68
TRANSPOSE_A, EPILOGUE, BIAS_POINTER, A_SCALE, B_SCALE, FAST_SUMS, BIAS_TYPE, A_SCALE_MODE, B_SCALE_MODE = (
    3, 7, 8, 17, 18, 25, 26, 31, 32,
)  # fmt: skip
NO_EPILOGUE, WITH_BIAS, WITH_GELU_AND_BIAS = 1, 4, 36
SCALE_PER_ROW = 3
SOME_ADDRESS = 256
MAX_WORKSPACE = 32 << 20


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One of the library's kernels and how it is launched, in numbers that this version of it alone understands."""

    library: int
    """Its version."""
    number: int
    tile: int
    stages: int
    split_k: int
    reduction: int
    swizzle: int
    option: int
    inner_shape: int
    cluster: int


ATTRIBUTES = {
    "tile": (1, c_int32),
    "split_k": (2, c_int32),
    "reduction": (3, c_int32),
    "swizzle": (4, c_int32),
    "option": (5, c_int32),
    "stages": (6, c_int32),
    "inner_shape": (7, c_uint16),
    "cluster": (8, c_uint16),
}


class _Opaque(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Found(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Opaque),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Refused(Exception):
    """The library does not offer this."""


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    assert library is not None
    status = getattr(library, name)(*arguments)
    if status:
        raise Refused(f"{name} gave status {status}")


@lru_cache(maxsize=1)
def _library() -> ctypes.PyDLL | None:
    """Calls are short, so they keep the interpreter's lock: giving it back could cost milliseconds each time."""
    if not torch.cuda.is_available():
        return None
    try:
        torch.cuda.current_blas_handle()  # which loads it
        with open("/proc/self/maps") as maps:
            path = next((line.split()[-1] for line in maps if "libcublasLt.so" in line), None)
        if path is None:
            return None
        library = ctypes.PyDLL(path)
        library.cublasLtGetVersion.restype = c_size_t
    except (OSError, RuntimeError):
        return None
    return library


@lru_cache(maxsize=1)
def loaded_version() -> int:
    """0: there is no such library here."""
    library = _library()
    return 0 if library is None else library.cublasLtGetVersion()


def _handle() -> c_void_p:
    return c_void_p(torch.cuda.current_blas_handle())


def _opaque(algorithm: Algorithm, data_type: int) -> _Opaque:
    made = _Opaque()
    types = data_type, data_type, DATA_TYPES[torch.bfloat16], DATA_TYPES[torch.bfloat16]
    _call("cublasLtMatmulAlgoInit", _handle(), COMPUTE_FP32, FP32, *types, algorithm.number, byref(made))
    for name, (attribute, kind) in ATTRIBUTES.items():
        value = kind(getattr(algorithm, name))
        _call(
            "cublasLtMatmulAlgoConfigSetAttribute", byref(made), attribute, byref(value), c_size_t(ctypes.sizeof(value))
        )
    return made


# ---------------------------------------------------------------------- one product


class _Problem:
    """What is multiplied, as the library describes it; made once and never given back."""

    def __init__(self, op: str, has_bias: bool, sizes: Sizes) -> None:
        num_rows, num_in, num_out, x_step, weight_step = sizes
        self.op, self.num_out = op, num_out
        is_fp8 = op in ("fp8_linear", "add_fp8_linear")
        self.data_type = DATA_TYPES[torch.float8_e4m3fn if is_fp8 else torch.bfloat16]
        bf16 = DATA_TYPES[torch.bfloat16]
        self.description = c_void_p()
        _call("cublasLtMatmulDescCreate", byref(self.description), COMPUTE_FP32, FP32)
        self.put(TRANSPOSE_A, c_int32(1))
        if has_bias:
            self.put(EPILOGUE, c_uint32(WITH_GELU_AND_BIAS if op == "gelu_linear" else WITH_BIAS))
            self.put(BIAS_TYPE, c_int32(bf16))
        else:
            self.put(EPILOGUE, c_uint32(NO_EPILOGUE))
        if is_fp8:
            self.put(A_SCALE_MODE, c_int32(SCALE_PER_ROW))
            self.put(B_SCALE_MODE, c_int32(SCALE_PER_ROW))
            self.put(FAST_SUMS, c_int8(1))
            # Before it offers anything, the library asks whether there are scales; it reads them in a product alone.
            self.put(A_SCALE, c_uint64(SOME_ADDRESS))
            self.put(B_SCALE, c_uint64(SOME_ADDRESS))
        self.weight = _layout(self.data_type, num_in, num_out, weight_step)
        self.x = _layout(self.data_type, num_in, num_rows, x_step)
        self.y = _layout(bf16, num_out, num_rows, num_out)

    def put(self, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulDescSetAttribute", self.description, attribute, byref(value), size)

    def check(self, opaque: _Opaque) -> int:
        """Bytes of scratch memory that the algorithm needs."""
        found = _Found()
        layouts = self.weight, self.x, self.y, self.y
        _call("cublasLtMatmulAlgoCheck", _handle(), self.description, *layouts, byref(opaque), byref(found))
        if found.workspace > MAX_WORKSPACE:
            raise Refused("it needs too much memory")
        return found.workspace


def _layout(data_type: int, rows: int, columns: int, step: int) -> c_void_p:
    made = c_void_p()
    sizes = c_uint64(rows), c_uint64(columns), c_int64(step)
    _call("cublasLtMatrixLayoutCreate", byref(made), data_type, *sizes)
    return made


class _Plan:
    """A product with its algorithm, ready to be launched."""

    def __init__(self, problem: _Problem, algorithm: Algorithm) -> None:
        self._problem = problem
        self._opaque = _opaque(algorithm, problem.data_type)
        self._workspace = problem.check(self._opaque)
        self._one, self._beta = c_float(1.0), c_float(1.0 if problem.op in ("add_linear", "add_fp8_linear") else 0.0)
        self._lock = Lock()

    def run(
        self,
        x_TD: Tensor,
        weight_FD: Tensor,
        bias_F: Tensor | None = None,
        *,
        scales: tuple[Tensor, Tensor] | None = None,
        into_TF: Tensor | None = None,
    ) -> Tensor:
        y_TF = into_TF
        if y_TF is None:
            y_TF = torch.empty(x_TD.shape[0], self._problem.num_out, dtype=torch.bfloat16, device=x_TD.device)
        # From torch, so that it belongs to the graph that is being captured.
        scratch = torch.empty(self._workspace, dtype=torch.uint8, device=x_TD.device) if self._workspace else None
        problem, y = self._problem, c_void_p(y_TF.data_ptr())
        with self._lock:
            if bias_F is not None:
                problem.put(BIAS_POINTER, c_uint64(bias_F.data_ptr()))
            if scales is not None:
                problem.put(B_SCALE, c_uint64(scales[0].data_ptr()))
                problem.put(A_SCALE, c_uint64(scales[1].data_ptr()))
            _call(
                "cublasLtMatmul", _handle(), problem.description, byref(self._one),
                c_void_p(weight_FD.data_ptr()), problem.weight, c_void_p(x_TD.data_ptr()), problem.x,
                byref(self._beta), y, problem.y, y, problem.y, byref(self._opaque),
                c_void_p(None if scratch is None else scratch.data_ptr()), c_size_t(self._workspace),
                c_void_p(torch.cuda.current_stream(x_TD.device).cuda_stream),
            )  # fmt: skip
        return y_TF


@lru_cache(maxsize=4096)
def _plan(op: str, device_index: int, has_bias: bool, sizes: Sizes, algorithm: Algorithm) -> _Plan | None:
    """None: the library does not do this product in that way."""
    try:
        with torch.cuda.device(device_index):
            return _Plan(_Problem(op, has_bias, sizes), algorithm)
    except Refused:
        return None


@lru_cache(maxsize=4096)
def _first_guess(op: str, device_index: int, sizes: Sizes) -> Algorithm | None:
    if not loaded_version():
        return None
    with torch.cuda.device(device_index):
        return next(iter(Offer(op, False, sizes).guessed()), None)


# ---------------------------------------------------------------------- all that the library has

MAX_GUESSES = 16
TILE_IDS, LAST_OPTION = 6, 7
PREFERENCE_WORKSPACE = 1
SCHEME_OF_SPLITS = 2
"""Sums of a split product are added up in fp32."""


class Offer:
    """The algorithms that the library has for one product."""

    def __init__(self, op: str, has_bias: bool, sizes: Sizes) -> None:
        self._problem = _Problem(op, has_bias, sizes)

    @classmethod
    def of(cls, op: str, x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Offer:
        return cls(op, bias_F is not None, _sizes(x_TD, weight_FD))

    def guessed(self) -> list[Algorithm]:
        """The best ones as the library guesses, none where it has no guess; torch takes the first."""
        preference, size = c_void_p(), c_uint64(MAX_WORKSPACE)
        _call("cublasLtMatmulPreferenceCreate", byref(preference))
        _call(
            "cublasLtMatmulPreferenceSetAttribute", preference, PREFERENCE_WORKSPACE, byref(size),
            c_size_t(ctypes.sizeof(size)),
        )  # fmt: skip
        found, count, problem = (_Found * MAX_GUESSES)(), c_int(), self._problem
        try:
            _call(
                "cublasLtMatmulAlgoGetHeuristic", _handle(), problem.description, problem.weight, problem.x, problem.y,
                problem.y, preference, MAX_GUESSES, found, byref(count),
            )  # fmt: skip
        except Refused:
            return []
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        return [_described(one.algorithm) for one in found[: count.value] if one.state == 0]

    def with_every_tile(self, like: Algorithm) -> list[Algorithm]:
        """As this one, without splits, with each tile and option that the product can have."""
        opaque = _opaque(like, self._problem.data_type)
        written, last = c_size_t(), c_int32()
        _call("cublasLtMatmulAlgoCapGetAttribute", byref(opaque), TILE_IDS, None, c_size_t(0), byref(written))
        tiles = (c_uint32 * (written.value // ctypes.sizeof(c_uint32)))()
        _call("cublasLtMatmulAlgoCapGetAttribute", byref(opaque), TILE_IDS, tiles, written, byref(written))
        _call(
            "cublasLtMatmulAlgoCapGetAttribute", byref(opaque), LAST_OPTION, byref(last), c_size_t(ctypes.sizeof(last)),
            byref(written),
        )  # fmt: skip
        whole = replace(like, split_k=1, reduction=0, swizzle=0)
        tried = (replace(whole, tile=tile, option=option) for tile in tiles for option in range(last.value + 1))
        return [algorithm for algorithm in tried if self.has(algorithm)]

    def has(self, algorithm: Algorithm) -> bool:
        try:
            self._problem.check(_opaque(algorithm, self._problem.data_type))
        except Refused:
            return False
        return True


def split(algorithm: Algorithm, count: int) -> Algorithm:
    """The same with the sums over the inputs in so many parts."""
    return replace(algorithm, split_k=count, reduction=SCHEME_OF_SPLITS if count > 1 else 0)


def _described(opaque: _Opaque) -> Algorithm:
    def number(attribute: int, kind: Any) -> int:
        value, written = kind(), c_size_t()
        size = c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulAlgoConfigGetAttribute", byref(opaque), attribute, byref(value), size, byref(written))
        return value.value

    named = {name: number(attribute, kind) for name, (attribute, kind) in ATTRIBUTES.items()}
    return Algorithm(library=loaded_version(), number=number(0, c_int32), **named)
