"""Ways to run one model: by its modules, in fused operations, or quantised. A decoder holds one of them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kestrel.errors import ConfigError
from kestrel.kernels.fp8_linear import WIDTH_MULTIPLE
from kestrel.kernels.ops import Ops
from kestrel.models.contract import Adapt, StepAttention
from kestrel.moondream.adapted_text import AdaptedText
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.fp8_text import Fp8Text, fp8_experts_block
from kestrel.moondream.fp8_vision import Fp8Vision
from kestrel.moondream.fused_text import FusedText
from kestrel.moondream.fused_vision import FusedVision
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.vision_graphs import CropEncoder


class TextForward(Protocol):
    def forward(self, x_TD: Tensor, positions_T: Tensor, attend: StepAttention) -> Tensor: ...

    def logits(self, hidden_TD: Tensor) -> Tensor: ...


class PlainForward:
    def __init__(self, model: MoondreamModel) -> None:
        self._model = model
        self.vision = model.vision

    def text(self, x_TD: Tensor, positions_T: Tensor, attend: StepAttention, adapt: Adapt | None) -> Tensor:
        return self._model.text(x_TD, positions_T, attend, adapt)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._model.text.logits(hidden_ND)


class FusedForward:
    """In few, wide operations wherever no adapter is involved."""

    def __init__(self, model: MoondreamModel, ops: Ops) -> None:
        self._model = model
        self.adapted = AdaptedText(model.text, ops) if model.config.text.moe is None else None
        """Adapters as device work; experts have none such."""
        self._fused = self.adapted or FusedText(model.text, ops)
        self.vision: CropEncoder = FusedVision(model.vision, ops)

    def text(self, x_TD: Tensor, positions_T: Tensor, attend: StepAttention, adapt: Adapt | None) -> Tensor:
        if adapt is not None:
            return self._model.text(x_TD, positions_T, attend, adapt)
        return self._fused.forward(x_TD, positions_T, attend)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._fused.logits(hidden_ND)


class QuantisedForward:
    """In fused operations on weights that took the place of the model's own: its modules cannot run any more."""

    def __init__(self, text: TextForward, vision: CropEncoder) -> None:
        self._text = text
        self.vision = vision

    @classmethod
    def of(cls, quantization: str, model: MoondreamModel, ops: Ops) -> QuantisedForward:
        """`quantization` as in the runtime configuration."""
        check_quantisable(quantization, model.config)
        match quantization:
            case "fp8":
                return cls(Fp8Text(model.text, ops), Fp8Vision(model.vision, ops))
            case "fp8-experts":
                return cls(FusedText(model.text, ops, fp8_experts_block), FusedVision(model.vision, ops))
        raise AssertionError(quantization)

    def text(self, x_TD: Tensor, positions_T: Tensor, attend: StepAttention, adapt: Adapt | None) -> Tensor:
        assert adapt is None, "a quantised model has no adapter slots"
        return self._text.forward(x_TD, positions_T, attend)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._text.logits(hidden_ND)


def check_quantisable(quantization: str, config: MoondreamConfig) -> None:
    """Refuses a model whose matrices the float8 operations do not take."""
    if quantization == "fp8-experts" and config.text.moe is None:
        raise ConfigError("quantization", "'fp8-experts' needs a model with experts, and this one has none; use fp8")
    if quantization == "fp8":
        text, vision = config.text, config.vision
        widths = (text.dim, text.qkv_dim, text.ff_dim, vision.enc_dim, vision.enc_ff_dim)
        odd = [width for width in widths if width % WIDTH_MULTIPLE]
        if odd:
            raise ConfigError(
                "quantization",
                f"'fp8' needs matrices whose sides are multiples of {WIDTH_MULTIPLE}, and this model has sides of "
                f"{odd}; use none",
            )
