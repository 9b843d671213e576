"""The device: which one and in which numbers, tensors on their way to it, the GIL and garbage beside it, a second
stream, and matrix products on processors whose library is slow at some of them.
"""

from __future__ import annotations

import gc
import platform
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.backends import mkldnn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

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
    return staged(values, device, dtype).to(device, non_blocking=True)


def staged(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of nested lists on the host, from which a copy to the device does not wait."""
    is_cuda = device.type == "cuda"
    if values and type(values[0]) is int and dtype in (None, torch.int64):
        # torch.tensor takes five times as long, and all threads wait for it: 2 ms for the ids of a full step.
        on_host = torch.frombuffer(array("q", values), dtype=torch.int64)
        return on_host.pin_memory() if is_cuda else on_host
    return torch.tensor(values, dtype=dtype, pin_memory=is_cuda)


def upload_tensor(on_host: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return on_host
    return on_host.pin_memory().to(device, non_blocking=True)


def end_of_work(device: torch.device) -> torch.cuda.Event | None:
    """Behind all that the current stream has been given; None on a CPU, where that is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def start_download(on_device: Tensor) -> Tensor:
    """Pinned host memory that holds a CUDA tensor's values once the stream has come this far."""
    target = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
    return target.copy_(on_device, non_blocking=True)


# ---------------------------------------------------------------------- the GIL
# Every operation that is launched releases the GIL and asks for it again, and whoever has it then may keep it for 5 ms
# by default: while many requests came in, a step of fifty launches took 150 ms, with the GPU idle.


PYTHONS_CHOICE_S = 0.005
SHORT_S = 0.0002


def shorten_turns() -> bool:
    """For the whole process. False where the program has chosen another time already."""
    if abs(sys.getswitchinterval() - PYTHONS_CHOICE_S) > PYTHONS_CHOICE_S / 100:
        return False
    sys.setswitchinterval(SHORT_S)
    return True


# ---------------------------------------------------------------------- garbage
# Python looks through its youngest objects whenever there are 700 more of them, and through every entry of a list among
# them. A flood of long prompts is read across that: 4 ms in which no thread goes on, just before the first step.


MANY_YOUNG = 10_000


def look_for_garbage_less() -> bool:
    """For the whole process. False where the program looks as rarely already, or never."""
    young, *older = gc.get_threshold()
    if not 0 < young < MANY_YOUNG:
        return False
    gc.set_threshold(MANY_YOUNG, *older)
    return True


# ---------------------------------------------------------------------- a second stream
# Pictures are encoded while rows decode: decoding waits for memory and encoding for arithmetic, so a GPU does both in
# little more than the time of the longer one.


@dataclass(frozen=True, slots=True)
class MadeBeside:
    """A tensor of the side stream, and the event behind it; None on a CPU."""

    tensor: Tensor
    event: torch.cuda.Event | None

    @property
    def is_ready(self) -> bool:
        return self.event is None or self.event.query()


class SideStream:
    """A second stream of a GPU; on a CPU everything runs in order, and this does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is launched inside does not wait for the main stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """What is launched inside comes after what the main stream has been given, and before what it gets later."""
        if self._stream is None:
            yield
            return
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            yield
        main.wait_stream(self._stream)

    def made(self, tensors: Iterable[Tensor]) -> list[MadeBeside]:
        """What has just been launched beside."""
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
        return [MadeBeside(tensor, event) for tensor in tensors]

    def join(self, results: Iterable[MadeBeside]) -> None:
        """From here on the main stream may use the results. For what was launched beside later it does not wait."""
        if self._stream is None:
            return
        main = torch.cuda.current_stream(self._device)
        for result in results:
            assert result.event is not None
            main.wait_event(result.event)
            result.tensor.record_stream(main)


# ---------------------------------------------------------------------- products on a CPU
# - bfloat16 without instructions for it: torch has only a plain loop, hundreds of times slower than products of
#   float32. Every bfloat16 is a float32 too, so both sides are made wide and the result is rounded once, at the end
#   (attention then keeps what is in between in float32 as well). Weights are made wide at every call: nothing beside
#   many rows, and more than the product itself beside one.
# - Few rows on ARM: oneDNN takes up to most of a millisecond to begin a product, whatever its size. torch's other
#   routines have multiplied a few rows by then. Whole pictures and prompts are better off with it, and so is bfloat16
#   where it multiplies that.


PRODUCTS = frozenset(
    {
        functional.linear,
        functional.scaled_dot_product_attention,
        functional.multi_head_attention_forward,
        functional.conv2d,
        functional.conv_transpose2d,
        torch.einsum,
        *(getattr(place, name) for place in (torch, Tensor) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm")),
    }
)


def computing(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """What the passes of a model run in: its GPU, or a processor that computes its numbers as fast as it can."""
    return on_device(device) if fast_dtype(device, dtype) == dtype else WideProducts()


def fast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The precision to compute numbers of `dtype` in: their own, but for bfloat16 where that is slow."""
    is_slow = device.type == "cpu" and dtype == torch.bfloat16 and not has_fast_bfloat16()
    return torch.float32 if is_slow else dtype


@lru_cache(maxsize=1)
def has_fast_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor."""
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
        if func not in PRODUCTS or not any(map(_is_narrow, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        return _rounded(func(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()}))


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16


def _widened(value: Any) -> Any:
    return value.float() if _is_narrow(value) else value


def _rounded(result: Tensor | tuple[Tensor | None, ...] | None) -> Any:
    """Attention of several heads gives its weights, or None, beside its result."""
    if isinstance(result, tuple):
        return tuple(map(_rounded, result))
    return None if result is None else result.to(torch.bfloat16)


# ---------------------------------------------------------------------- few rows on ARM


MOST_ROWS = 128
ARM = ("aarch64", "arm64")

_lock = threading.Lock()
_num_inside = 0
_was_enabled = True


@contextmanager
def few_rows(device: torch.device, dtype: torch.dtype, num_rows: int) -> Iterator[None]:
    """What a step of `num_rows` positions is computed in. The switch is one for the process: the last one out turns it
    back."""
    if num_rows > MOST_ROWS or device.type != "cpu" or not begins_slowly(dtype):
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def begins_slowly(dtype: torch.dtype) -> bool:
    """Only oneDNN multiplies bfloat16 at all well, where it does."""
    is_its_own = dtype == torch.bfloat16 and has_fast_bfloat16()
    return platform.machine() in ARM and mkldnn.is_available() and not is_its_own


def _enter() -> None:
    global _num_inside, _was_enabled
    with _lock:
        if _num_inside == 0:
            _was_enabled, mkldnn.enabled = mkldnn.enabled, False
        _num_inside += 1


def _leave() -> None:
    global _num_inside
    with _lock:
        _num_inside -= 1
        if _num_inside == 0:
            mkldnn.enabled = _was_enabled
