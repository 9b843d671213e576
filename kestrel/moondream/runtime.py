"""Moondream behind the runtime's contracts: embeddings, forward pass, heads, and the torch executor around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.images.crops import cut_patches, image_tensor, make_crops, normalise_and_patchify
from kestrel.images.rgb import RgbImage
from kestrel.images.tiling import TilingParams, TilingPlan, plan_tiling
from kestrel.kernels.ops import PLAIN, Ops
from kestrel.models.contract import Adapt, DecoderModel, DecoderShape, PreparedImage, SlotDeltas, StepAttention
from kestrel.moondream.adapted_text import AdaptedText
from kestrel.moondream.fused_text import FusedText
from kestrel.moondream.fused_vision import FusedVision
from kestrel.moondream.lora import adapter_shape
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.region import coord_from_bins, size_from_bins
from kestrel.moondream.vision_graphs import VisionGraphs
from kestrel.runtime.adapter_slots import AdapterSlots
from kestrel.runtime.contract import RuntimeLimits
from kestrel.runtime.decode_graphs import DecodeGraphs
from kestrel.runtime.executor import Executor, FastSteps, MakeFastSteps
from kestrel.runtime.graph_pool import GraphPool
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.memory import plan_pages
from kestrel.runtime.prefill_graphs import PrefillGraphs
from kestrel.runtime.rows import RowTable


@dataclass(frozen=True, slots=True)
class FusedForward:
    ops: Ops
    text: FusedText
    vision: FusedVision


class MoondreamDecoder:
    """A loaded model as `kestrel.models.contract.DecoderModel`."""

    def __init__(self, model: MoondreamModel) -> None:
        text, vision, ids = model.config.text, model.config.vision, model.config.tokenizer
        self._model = model
        self._fused: FusedForward | None = None
        self._vision_graphs: VisionGraphs | None = None
        self._tiling = TilingParams(
            crop_size=vision.crop_size,
            patch_size=vision.enc_patch_size,
            overlap_margin=vision.overlap_margin,
            max_crops=vision.max_crops,
        )
        self._shape = DecoderShape(
            num_layers=text.n_layers,
            num_kv_heads=text.n_kv_heads,
            head_dim=text.head_dim,
            hidden_dim=text.dim,
            vocab_size=text.vocab_size,
            max_context=text.max_context,
            num_image_positions=vision.num_patches,
            coord_id=ids.coord_id,
            size_id=ids.size_id,
        )

    @property
    def shape(self) -> DecoderShape:
        return self._shape

    @property
    def device(self) -> torch.device:
        return self._model.text.wte.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.text.wte.dtype

    def embed_text(self, ids_T: Tensor) -> Tensor:
        return self._model.text.embed(ids_T)

    def embed_coords(self, values_N: Tensor) -> Tensor:
        return self._model.region.encode_coord(values_N)

    def embed_sizes(self, values_N2: Tensor) -> Tensor:
        return self._model.region.encode_size(values_N2)

    def prepare_image(self, image: RgbImage) -> PreparedImage:
        plan = plan_tiling(image.height, image.width, self._tiling)
        patches_NPC = self.cut_patches(self.upload_image(image), plan)
        return PreparedImage(patches_NPC, (plan.rows, plan.cols))

    def upload_image(self, image: RgbImage) -> Tensor:
        """[height, width, 3] uint8 on the model's device."""
        return image_tensor(image, self.device)

    def cut_patches(self, pixels_HWC: Tensor, plan: TilingPlan) -> Tensor:
        """Resized, cropped and normalised: [crops, grid², 3·patch²]."""
        if self._fused is not None:
            return cut_patches(pixels_HWC, plan, self.dtype, self._fused.ops)
        return normalise_and_patchify(make_crops(pixels_HWC, plan), self._tiling.patch_size, self.dtype)

    def fuse(self, ops: Ops) -> None:
        """From now on run in few, wide operations of this bundle wherever no `Adapt` is involved."""
        make_text = FusedText if self._model.config.text.moe is not None else AdaptedText
        self._fused = FusedForward(ops, make_text(self._model.text, ops), FusedVision(self._model.vision, ops))

    def capture_vision(self, max_crops: int, pool: GraphPool) -> None:
        """From now on encode up to so many crops by replaying graphs."""
        assert self._fused is not None
        self._vision_graphs = VisionGraphs(self._fused.vision, max_crops, pool)

    def embed_images(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        features_NPD = self._encode_crops([image.patches_NPC for image in images])
        of_each = features_NPD.split([image.num_crops for image in images])
        return self._model.vision.embed_images(of_each, [image.tiles_hw for image in images])

    def _encode_crops(self, patches: list[Tensor]) -> Tensor:
        if self._vision_graphs is not None:
            return self._vision_graphs.encode_crops(patches)
        vision = self._model.vision if self._fused is None else self._fused.vision
        return vision.encode_crops(torch.cat(patches))

    def forward(self, x_TD: Tensor, positions_T: Tensor, attend: StepAttention, adapt: Adapt | None = None) -> Tensor:
        if self._fused is not None and adapt is None:
            return self._fused.text.forward(x_TD, positions_T, attend)
        return self._model.text(x_TD, positions_T, attend, adapt)

    @property
    def can_adapt_on_device(self) -> bool:
        return self._fused is not None and isinstance(self._fused.text, AdaptedText)

    def forward_adapted(self, x_TD: Tensor, positions_T: Tensor, attend: StepAttention, deltas: SlotDeltas) -> Tensor:
        assert self._fused is not None
        assert isinstance(self._fused.text, AdaptedText)
        return self._fused.text.forward_adapted(x_TD, positions_T, attend, deltas)

    def final_norm(self, hidden_ND: Tensor) -> Tensor:
        return self._model.text.post_ln(hidden_ND)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        text = self._model.text if self._fused is None else self._fused.text
        return text.logits(hidden_ND)

    def decode_coords(self, hidden_ND: Tensor) -> Tensor:
        logits_NC = self._model.region.decode_coord(hidden_ND)
        return coord_from_bins(logits_NC.argmax(-1), logits_NC.shape[-1])

    def decode_sizes(self, hidden_ND: Tensor) -> Tensor:
        logits_N2C = self._model.region.decode_size(hidden_ND)
        return size_from_bins(logits_N2C.argmax(-1), logits_N2C.shape[-1])


class MoondreamRuntime(Executor):
    """One Moondream on one device, ready for a scheduler."""

    def __init__(
        self,
        model: MoondreamModel,
        config: RuntimeConfig,
        with_adapters: bool = False,
        make_decoder: Callable[[MoondreamModel], MoondreamDecoder] = MoondreamDecoder,
    ) -> None:
        """`make_decoder` may give one that also observes what it is asked."""
        decoder = make_decoder(model)
        self.decoder = decoder
        self.adapter_shape = adapter_shape(model.config.text)
        slots = self._make_slots(config) if with_adapters else None  # first: the KV cache is planned from what is left
        is_gpu = decoder.device.type == "cuda"
        ops = gpu_ops() if is_gpu else PLAIN
        limits = runtime_limits(decoder, config, 0 if slots is None else slots.num_slots)
        num_crops = batch_crops(config, decoder.device)
        graphs: MakeFastSteps | None = None
        if is_gpu:
            decoder.fuse(ops)
        if is_gpu and config.enable_cuda_graphs:
            pool = GraphPool(decoder.device)
            decoder.capture_vision(num_crops, pool)
            graphs = captured_steps(limits, ops, pool, slots if decoder.can_adapt_on_device else None)
        super().__init__(decoder, limits, slots, num_crops, graphs, ops)

    def _make_slots(self, config: RuntimeConfig) -> AdapterSlots:
        experts = self.adapter_shape.moe
        share = 1 if experts is None else experts.experts_per_token
        max_rank = -(-config.max_adapter_rank // share) * share
        return AdapterSlots(self.adapter_shape, config.max_adapters, max_rank, self.decoder.device, self.decoder.dtype)


def gpu_ops() -> Ops:
    # Here and not above: Triton comes with CUDA builds of torch only.
    from kestrel.kernels.triton.ops import TRITON  # noqa: PLC0415

    return TRITON


def captured_steps(
    limits: RuntimeLimits, ops: Ops, pool: GraphPool, adapters: AdapterSlots | None = None
) -> MakeFastSteps:
    def make(model: DecoderModel, kv: PagedKVCache, table: RowTable) -> FastSteps:
        decode = DecodeGraphs(model, kv, table, ops, batch_sizes(limits.max_batch_size), pool, adapters)
        return FastSteps(decode, PrefillGraphs(model, kv, table, ops, limits.max_prefill_tokens, pool, adapters))

    return make


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then every eighth up to 64, then doubling; the largest is one of them."""
    usual = [1, 2, 4, 8, *range(16, 65, 8), *(2**power for power in range(7, 13))]
    return [*(size for size in usual if size < largest), largest]


def batch_crops(config: RuntimeConfig, device: torch.device) -> int:
    """Crops encoded together: a GPU is the faster the more there are, a CPU only needs more memory."""
    return config.vision_batch_crops or (72 if device.type == "cuda" else 16)


def runtime_limits(decoder: MoondreamDecoder, config: RuntimeConfig, num_adapter_slots: int = 0) -> RuntimeLimits:
    shape = decoder.shape
    max_seq_length = config.max_seq_length or shape.max_context
    if max_seq_length > shape.max_context:
        raise ConfigError(
            "max_seq_length", f"{max_seq_length} exceeds the model's context of {shape.max_context}; lower it"
        )
    return RuntimeLimits(
        max_batch_size=config.max_batch_size,
        max_seq_length=max_seq_length,
        num_pages=plan_pages(config, shape, decoder.device, decoder.dtype),
        page_size=config.page_size,
        max_prefill_tokens=config.max_prefill_tokens,
        steps_in_flight=1 if decoder.device.type == "cuda" else 0,
        num_adapter_slots=num_adapter_slots,
    )
