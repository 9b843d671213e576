"""A text decoder of shared layers behind the runtime's contract; families add the parts that theirs has beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kestrel.adapters import AdapterShape
from kestrel.errors import ConfigError
from kestrel.kernels.fp8 import WIDTH_MULTIPLE
from kestrel.kernels.ops import Ops
from kestrel.layers.adapt import Adapt
from kestrel.layers.attention import Attend
from kestrel.layers.decoder import TextDecoder
from kestrel.models.contract import DecoderShape, RegionPart, VisionPart
from kestrel.parallel.ranks import Part, Ranks


class TextModelDecoder:
    """`kestrel.models.contract.DecoderModel`."""

    def __init__(
        self,
        text: TextDecoder,
        shape: DecoderShape,
        adapter_shape: AdapterShape,
        vision: VisionPart | None = None,
        regions: RegionPart | None = None,
    ) -> None:
        self._text = text
        self.shape, self.adapter_shape = replace(shape, num_kv_heads=text.num_kv_heads), adapter_shape
        self.vision, self.regions = vision, regions

    @property
    def device(self) -> torch.device:
        return self._text.wte.device

    @property
    def dtype(self) -> torch.dtype:
        return self._text.wte.dtype

    @property
    def ranks(self) -> Ranks:
        return self._text.ranks

    def filled_up(self, num_rows: int) -> int:
        return self._text.filled_up(num_rows)

    @property
    def adapter_parts(self) -> Mapping[tuple[int, str], Part]:
        return self._text.adapter_parts()

    def fuse(self, ops: Ops) -> None:
        self._text.fuse(ops)

    def quantise(self, quantization: str) -> None:
        if needs_quantising(self._text.quantization, quantization):
            refuse_experts_only(quantization, has_experts=self._text.has_experts)
            check_widths(quantization, self._text.matrix_sides())
            self._text.to_fp8(experts_only=quantization == "fp8-experts")

    def embed_text(self, ids_T: Tensor) -> Tensor:
        return self._text.embed(ids_T)

    def forward(
        self,
        x_TD: Tensor,
        positions_T: Tensor,
        attend: Attend,
        adapt: Adapt | None = None,
        wanted_N: Tensor | None = None,
    ) -> Tensor:
        return self._text(x_TD, positions_T, attend, adapt, wanted_N)

    def final_norm(self, hidden_ND: Tensor) -> Tensor:
        return self._text.post_ln(hidden_ND)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._text.logits(hidden_ND)


# ---------------------------------------------------------------------- number formats


def needs_quantising(now: str, wanted: str) -> bool:
    """Whether the weights have to change; refuses what they cannot become any more."""
    if wanted == now:
        return False
    if now != "none":
        raise ConfigError("quantization", f"this model is in {now!r} already; load it again for {wanted!r}")
    return True


def refuse_experts_only(quantization: str, *, has_experts: bool) -> None:
    if quantization == "fp8-experts" and not has_experts:
        raise ConfigError("quantization", "'fp8-experts' needs a model with experts, and this one has none; use fp8")


def check_widths(quantization: str, sides: Iterable[int]) -> None:
    """Refuses a model whose matrices the float8 operations do not take."""
    odd = sorted({side for side in sides if side % WIDTH_MULTIPLE})
    if quantization == "fp8" and odd:
        raise ConfigError(
            "quantization",
            f"'fp8' needs matrices whose sides are multiples of {WIDTH_MULTIPLE}, and this model has sides of {odd}; "
            "use none",
        )
