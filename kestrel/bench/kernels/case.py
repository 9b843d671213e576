"""One operation at one size: both versions, their inputs, what the work amounts to; and the sizes of the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kestrel.kernels.ops import PLAIN
from kestrel.kernels.triton.ops import TRITON
from kestrel.known_models import find_model

Result = Tensor | tuple[Tensor, ...]


class Maker:
    """Random inputs on one device in one dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._dice = torch.Generator(device).manual_seed(seed)

    def numbers(self, *size: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(size, generator=self._dice, device=self.device, dtype=torch.float32)
        return (drawn * scale).to(dtype or self.dtype)

    def integers(self, high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=self._dice, device=self.device)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._dice, device=self.device)


@dataclass(frozen=True, slots=True)
class Case:
    op: str
    size: str
    plain: Callable[..., Result]
    triton: Callable[..., Result]
    make: Callable[[Maker], tuple[Any, ...]]
    """Arguments for either version."""
    bytes_moved: int
    """What must be read and written once."""
    flop: int
    tunings: tuple[Any, ...] | Callable[..., tuple[Any, ...]]
    """Block sizes worth trying, as `tuning` of the Triton version; or what finds them, given that version and sets of
    arguments on the GPU."""
    is_plain_capturable: bool = True
    """Whether the plain version runs without reading on the host, as a CUDA graph needs."""
    gives_fp8: bool = False


def op_case(op: str, size: str, make: Callable[[Maker], tuple[Any, ...]], **more: Any) -> Case:
    """Of an operation of the bundle."""
    return Case(op, size, getattr(PLAIN, op), getattr(TRITON, op), make, **more)


def distance(got: Result, expected: Result) -> float:
    """The largest relative distance of two results, tensor by tensor as vectors."""
    pairs = zip(_tensors(got), _tensors(expected), strict=True)
    return max(float((g.double() - e.double()).norm() / e.double().norm().clamp(min=1e-30)) for g, e in pairs)


def _tensors(result: Result) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


# ---------------------------------------------------------------------- sizes


LLAMA_1B, LLAMA_8B = (2048, 3072, 8192), (4096, 6144, 14_336)
PAGE_SIZE = 16
HALF_BYTES, FP8_BYTES = 2, 1
MODEL = "moondream3-preview"
"""Whose sizes are measured; Moondream 2 has the same ones in the parts that it has."""


@dataclass(frozen=True, slots=True)
class VisionDims:
    enc_dim: int
    enc_ff_dim: int
    enc_n_heads: int
    crop_size: int
    enc_patch_size: int

    @property
    def num_patches(self) -> int:
        return (self.crop_size // self.enc_patch_size) ** 2


@dataclass(frozen=True, slots=True)
class MoeDims:
    num_experts: int
    experts_per_token: int
    expert_inner_dim: int


@dataclass(frozen=True, slots=True)
class TextDims:
    dim: int
    ff_dim: int
    n_heads: int
    n_kv_heads: int
    rotary_dim: int
    rope_theta: float
    vocab_size: int
    max_context: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def qkv_dim(self) -> int:
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim


DimsT = TypeVar("DimsT", VisionDims, MoeDims, TextDims)


def _dims(kind: type[DimsT], section: Mapping[str, Any]) -> DimsT:
    """From a part of a config.json."""
    return kind(**{field.name: section[field.name] for field in fields(kind)})


@dataclass(frozen=True, slots=True)
class Sizes:
    vision: VisionDims
    text: TextDims
    moe: MoeDims
    crops: tuple[int, ...]
    """Encoded at once."""
    num_keys: int
    max_keys: int
    decode_rows: tuple[int, ...]
    few_rows: tuple[int, ...]
    """Rows of a linear layer or of a small mixture of experts."""
    prefill_tokens: tuple[int, ...]
    prompt: tuple[int, int]
    """Positions of a picture, with the one before it, and of the text behind it."""
    prompts: tuple[int, ...]
    """Filled at once."""
    tau_tokens: tuple[int, ...]
    routed_tokens: tuple[int, ...]
    """Tokens of a large mixture of experts."""
    adapters: tuple[tuple[int, int, int], ...]
    """How many, of which rank, in slots of which rank."""
    adapted_rows: tuple[int, ...]
    product_crops: tuple[int, ...]
    product_rows: tuple[int, ...]
    """Of the vendor's products."""
    gated_text: tuple[tuple[int, int, int], ...] = ()
    """Other text models, with gated MLPs: width, width of q, k and v together, inner width."""
    gated_rows: tuple[int, ...] = ()


def full_sizes() -> Sizes:
    """Pictures of nine crops, alone and four at once; prompts of 750 tokens, one to eight at once; 770 keys."""
    config = find_model(MODEL).config
    return Sizes(
        vision=_dims(VisionDims, config["vision"]),
        text=_dims(TextDims, config["text"]),
        moe=_dims(MoeDims, config["text"]["moe"]),
        crops=(9, 36),
        num_keys=770,
        max_keys=2048,
        decode_rows=(1, 4, 16, 64),
        few_rows=(1, 4, 16),
        prefill_tokens=(750, 3000),
        prompt=(730, 20),
        prompts=(1, 4, 8),
        tau_tokens=(1, 4, 16, 64, 750, 3000),
        routed_tokens=(16, 64, 750, 3000),
        adapters=((8, 16, 16), (1, 512, 512)),
        adapted_rows=(16, 750, 3000),
        product_crops=(9, 45),
        product_rows=(64, 768, 3840),
    )


def tuning_sizes() -> Sizes:
    """One in every range of rows (`kestrel.kernels.triton.launch`) that serving meets often."""
    return replace(
        full_sizes(),
        crops=(1, 4, 9, 36),
        prefill_tokens=(250, 750, 3000),
        routed_tokens=(16, 64, 250, 750, 3000),
        tau_tokens=(1, 4, 16, 64, 250, 750, 3000),
        adapters=((8, 16, 16), (8, 16, 64), (1, 512, 512)),
        adapted_rows=(4, 16, 64, 250, 750, 3000),
        product_crops=(1, 2, 3, 4, 5, 6, 8, 9, 10, 13, 18, 22, 27, 31, 36, 45, 63, 72),
        product_rows=(32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 2304, 3072, 3840, 4608, 6016),
        gated_text=(LLAMA_1B, LLAMA_8B),
        gated_rows=(32, 64, 128, 256, 512, 1024, 2048, 3072, 4096),
    )


def small_sizes() -> Sizes:
    """Every code path once, quickly; nothing is a multiple of a block."""
    return Sizes(
        vision=VisionDims(enc_dim=80, enc_ff_dim=100, enc_n_heads=2, crop_size=98, enc_patch_size=14),
        text=TextDims(
            dim=48, ff_dim=40, n_heads=3, n_kv_heads=3, rotary_dim=8, rope_theta=1e4, vocab_size=56, max_context=64
        ),
        moe=MoeDims(num_experts=5, experts_per_token=2, expert_inner_dim=24),
        crops=(1,),
        num_keys=37,
        max_keys=64,
        decode_rows=(3,),
        few_rows=(1, 6),
        prefill_tokens=(7,),
        prompt=(37, 6),
        prompts=(2,),
        tau_tokens=(3, 21),
        routed_tokens=(7, 70),
        adapters=((3, 12, 12), (2, 16, 32)),
        adapted_rows=(6, 70),
        product_crops=(1,),
        product_rows=(7,),
    )
