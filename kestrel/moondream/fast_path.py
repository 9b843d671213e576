"""Which operations a model runs with on its device, and in which numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.kernels.ops import PLAIN, Ops

LEAST_FOR_TRITON = (8, 0)
LEAST_FOR_FP8 = (8, 9)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a device can do, as far as the choice depends on it."""

    name: str
    capability: tuple[int, int] | None
    """Compute capability of a GPU; None on a CPU."""
    triton_fault: str | None = None
    """Why Triton cannot be imported; None when it can."""

    @classmethod
    def of(cls, device: torch.device) -> Abilities:
        if device.type != "cuda":
            return cls("the CPU", None)
        capability = torch.cuda.get_device_capability(device)
        return cls(torch.cuda.get_device_name(device), capability, _triton_fault())

    @property
    def is_gpu(self) -> bool:
        return self.capability is not None

    def why_no_triton(self) -> str | None:
        """None when the Triton kernels run here."""
        if self.capability is None:
            return "they need an NVIDIA GPU, and the model runs on the CPU"
        if self.capability < LEAST_FOR_TRITON:
            return f"they need compute capability 8.0, and {self.name} has {_dotted(self.capability)}"
        return None if self.triton_fault is None else f"Triton cannot be imported ({self.triton_fault})"

    def why_no_fp8(self) -> str | None:
        """None when float8 can be computed with here."""
        if self.capability is None:
            return "float8 needs an NVIDIA GPU, and the model runs on the CPU"
        if self.capability < LEAST_FOR_FP8:
            return f"float8 needs compute capability 8.9, and {self.name} has {_dotted(self.capability)}"
        return None


@dataclass(frozen=True, slots=True)
class FastPath:
    is_fused: bool
    """In few, wide operations of Triton kernels; otherwise by the model's modules and torch's own attention."""
    quantization: str
    kv_dtype: torch.dtype
    note: str | None = None
    """Why a faster way was not taken; for the log."""

    def make_ops(self, abilities: Abilities) -> Ops:
        """For the device that the path was chosen for, with the block sizes measured on its kind."""
        if not self.is_fused or abilities.capability is None:
            return PLAIN
        return tuned_triton_ops(abilities.name, abilities.capability)


def choose_fast_path(config: RuntimeConfig, abilities: Abilities, dtype: torch.dtype) -> FastPath:
    """Refuses what was asked for and cannot be had; leaves out only what was left to it."""
    fault, backend = abilities.why_no_triton(), config.attention_backend
    if backend == "triton" and fault is not None:
        raise ConfigError("attention_backend", f"the Triton kernels cannot run: {fault}; use auto or sdpa")
    is_fused = backend != "sdpa" and fault is None
    note = None
    if backend == "auto" and fault is not None:
        note = f"attention runs without the Triton kernels (sdpa): {fault}"
    no_fp8 = abilities.why_no_fp8() or (None if is_fused else _why_not_fused(backend, fault))
    if config.quantization != "none":
        _check_quantization(config, no_fp8, dtype)
    if config.kv_cache_dtype_name == "fp8" and no_fp8 is not None:
        raise ConfigError("kv_cache_dtype", f"'fp8' cannot be used: {no_fp8}; use auto")
    return FastPath(is_fused, config.quantization, _kv_dtype(config, dtype), note)


def _check_quantization(config: RuntimeConfig, no_fp8: str | None, dtype: torch.dtype) -> None:
    wanted = repr(config.quantization)
    if no_fp8 is not None:
        raise ConfigError("quantization", f"{wanted} cannot be used: {no_fp8}; use none")
    if config.quantization == "fp8" and dtype != torch.bfloat16:
        raise ConfigError(
            "quantization", f"{wanted} needs dtype bfloat16 beside it (it is {str(dtype).removeprefix('torch.')})"
        )


def _why_not_fused(backend: str, fault: str | None) -> str:
    if backend == "sdpa":
        return "float8 needs the Triton kernels, which attention_backend='sdpa' forbids"
    return f"float8 needs the Triton kernels, which cannot run: {fault}"


def _kv_dtype(config: RuntimeConfig, dtype: torch.dtype) -> torch.dtype:
    return {"auto": dtype, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[config.kv_cache_dtype_name]


def triton_ops() -> Ops:
    # Here and not above: Triton comes with CUDA builds of torch only.
    from kestrel.kernels.triton.ops import TRITON  # noqa: PLC0415

    return TRITON


def tuned_triton_ops(gpu: str, capability: tuple[int, int]) -> Ops:
    from kestrel.kernels.triton import ops  # noqa: PLC0415 - as above
    from kestrel.kernels.triton.crop_attention_choice import fastest_attend_crops  # noqa: PLC0415
    from kestrel.kernels.tuning import load_table  # noqa: PLC0415

    return ops.triton_ops(load_table(gpu, capability), fastest_attend_crops(capability))


def _triton_fault() -> str | None:
    try:
        triton_ops()
    except ImportError as error:
        return str(error)
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
