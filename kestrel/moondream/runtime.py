"""Moondream behind the runtime's contracts: embeddings, forward pass, heads, and the torch executor around them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.images.crops import (
    cut_crops,
    cut_patches,
    cut_resized,
    image_tensor,
    make_crops,
    normalise_and_patchify,
    shrunk_tensors,
)
from kestrel.images.decode import LARGE_PIXELS
from kestrel.images.rgb import RgbImage
from kestrel.images.shrink import PictureForm, ShrunkImage
from kestrel.images.tiling import TilingParams, TilingPlan, plan_tiling
from kestrel.kernels.ops import Ops
from kestrel.layers.adapt import Adapt
from kestrel.layers.attention import Attend
from kestrel.models.contract import DecoderModel, DecoderShape, PreparedImage
from kestrel.moondream.fast_path import Abilities, FastPath, choose_fast_path
from kestrel.moondream.limits import batch_crops, batch_sizes, prefill_budget, runtime_limits
from kestrel.moondream.lora import adapter_shape
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.quantised_weights import KvScale
from kestrel.moondream.region import coord_from_bins, size_from_bins
from kestrel.moondream.vision_graphs import VisionGraphs
from kestrel.runtime.adapter_slots import AdapterSlots
from kestrel.runtime.contract import POSITIONS_PER_CROP, RuntimeLimits
from kestrel.runtime.decode_graphs import DecodeGraphs
from kestrel.runtime.device import on_device
from kestrel.runtime.executor import Executor, FastSteps, MakeFastSteps
from kestrel.runtime.graph_pool import GraphPool
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.memory import MemoryPlan, picture_bytes
from kestrel.runtime.prefill_graphs import PrefillGraphs
from kestrel.runtime.rows import RowTable
from kestrel.runtime.working_memory import WorkingMemory, measure_working_memory

NO_SCALES: Mapping[int, KvScale] = MappingProxyType({})
logger = logging.getLogger("kestrel.runtime")


class MoondreamDecoder:
    """A loaded model as `kestrel.models.contract.DecoderModel`."""

    def __init__(self, model: MoondreamModel) -> None:
        text, vision, ids = model.config.text, model.config.vision, model.config.tokenizer
        self._model = model
        self._ops: Ops | None = None
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

    def picture_form(self, outline_side: int | None) -> PictureForm:
        """A GPU resizes all but large pictures in a few ms, on a CPU that is for threads outside of the steps."""
        on_gpu = self.device.type == "cuda"
        return PictureForm(self._tiling, outline_side, LARGE_PIXELS if on_gpu else 0)

    def prepare_image(self, image: RgbImage | ShrunkImage) -> PreparedImage:
        plan = plan_tiling(image.height, image.width, self._tiling)
        if isinstance(image, ShrunkImage):
            patches_NPC = self._cut_shrunk(image, plan)
        else:
            patches_NPC = self.cut_patches(self.upload_image(image), plan)
        return PreparedImage(patches_NPC, (plan.rows, plan.cols))

    def _cut_shrunk(self, image: ShrunkImage, plan: TilingPlan) -> Tensor:
        whole, tiled = shrunk_tensors(image, self.device)
        if self._ops is not None:
            return cut_resized(whole, tiled, plan, self.dtype, self._ops)
        return normalise_and_patchify(cut_crops(whole, tiled, plan), self._tiling.patch_size, self.dtype)

    def upload_image(self, image: RgbImage) -> Tensor:
        """[height, width, 3] uint8 on the model's device."""
        return image_tensor(image, self.device)

    def cut_patches(self, pixels_HWC: Tensor, plan: TilingPlan) -> Tensor:
        """Resized, cropped and normalised: [crops, grid², 3·patch²]."""
        if self._ops is not None:
            return cut_patches(pixels_HWC, plan, self.dtype, self._ops)
        return normalise_and_patchify(make_crops(pixels_HWC, plan), self._tiling.patch_size, self.dtype)

    def fuse(self, ops: Ops) -> None:
        """From now on run in few, wide operations of this bundle."""
        self._ops = ops
        self._model.fuse(ops)

    def quantise(self, quantization: str) -> None:
        """From now on run on quantised weights, which take the place of the model's own."""
        self._model.quantise(quantization)

    def capture_vision(self, max_crops: int, pool: GraphPool) -> None:
        """From now on encode up to so many crops by replaying graphs."""
        self._vision_graphs = VisionGraphs(self._model.vision, max_crops, pool)

    def prepare_vision(self, num_crops: int) -> None:
        """Does what the first pictures that come in so many crops would otherwise wait for."""
        if self._vision_graphs is not None:
            self._vision_graphs.prepare(num_crops)

    def embed_images(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        features_NPD = self.encode_crops([image.patches_NPC for image in images])
        of_each = features_NPD.split([image.num_crops for image in images])
        return self.join_crops(of_each, [image.tiles_hw for image in images])

    def encode_crops(self, patches: Sequence[Tensor]) -> Tensor:
        if self._vision_graphs is not None:
            return self._vision_graphs.encode_crops(patches)
        return self._model.vision.encode_crops(torch.cat(list(patches)))

    def join_crops(self, features: Sequence[Tensor], tiles: Sequence[tuple[int, int]]) -> list[Tensor]:
        return self._model.vision.embed_images(features, tiles)

    def forward(self, x_TD: Tensor, positions_T: Tensor, attend: Attend, adapt: Adapt | None = None) -> Tensor:
        return self._model.text(x_TD, positions_T, attend, adapt)

    def final_norm(self, hidden_ND: Tensor) -> Tensor:
        return self._model.text.post_ln(hidden_ND)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self._model.text.logits(hidden_ND)

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
        kv_scales: Mapping[int, KvScale] = NO_SCALES,
    ) -> None:
        """`make_decoder` may give one that also observes what it is asked. `kv_scales`: those of the checkpoint."""
        decoder = make_decoder(model)
        abilities = Abilities.of(decoder.device)
        path = choose_fast_path(config, abilities, decoder.dtype)
        ops = path.make_ops(abilities)
        if path.note is not None:
            logger.log(logging.WARNING if decoder.device.type == "cuda" else logging.INFO, "%s", path.note)
        self.decoder = decoder
        self.adapter_shape = adapter_shape(model.config.text)
        # Slots, matrices and buffers first: the KV cache is planned from what they leave.
        slots = self._make_slots(config) if with_adapters else None
        put_on_path(decoder, path, ops)
        is_captured = path.is_fused and config.enable_cuda_graphs
        working = measured_steps(decoder, config, path, is_captured) if decoder.device.type == "cuda" else None
        num_crops = batch_crops(config, decoder.device, working)
        working_bytes = 0 if working is None else working.planned(num_crops)
        if is_captured:
            # Apart from the other graphs, since pictures are encoded beside the rest of a step.
            decoder.capture_vision(num_crops, GraphPool(decoder.device))
        num_slots = 0 if slots is None else slots.num_slots
        limits = runtime_limits(decoder.shape, decoder.device, config, path.kv_dtype, num_slots, working_bytes)
        graphs: MakeFastSteps | None = None
        if is_captured:
            graphs = captured_steps(limits, ops, GraphPool(decoder.device, is_urgent=True), slots)
        scales = cache_scales(kv_scales, path.kv_dtype, decoder.shape.num_layers)
        super().__init__(decoder, limits, slots, num_crops, graphs, ops, path.is_fused, path.kv_dtype, scales)
        self.prepare()
        pictures = picture_bytes(config, decoder.device, decoder.dtype)
        self.memory_plan = MemoryPlan.of(decoder.shape, limits, path.kv_dtype, decoder.device, working_bytes, pictures)
        logger.info("%s", self.memory_plan)
        self.memory_plan.warn_if_short()

    @torch.inference_mode()
    def prepare(self) -> None:
        super().prepare()
        with on_device(self.decoder.device):
            self.decoder.prepare_vision(self.limits.streaming_prefill_tokens // POSITIONS_PER_CROP)
            if self.decoder.device.type == "cuda":
                torch.cuda.empty_cache()  # trying out has left memory that only the captures' streams could use

    def _make_slots(self, config: RuntimeConfig) -> AdapterSlots:
        experts = self.adapter_shape.moe
        share = 1 if experts is None else experts.experts_per_token
        max_rank = -(-config.max_adapter_rank // share) * share
        return AdapterSlots(self.adapter_shape, config.max_adapters, max_rank, self.decoder.device, self.decoder.dtype)


def put_on_path(decoder: MoondreamDecoder, path: FastPath, ops: Ops) -> None:
    if path.is_fused:
        decoder.fuse(ops)
    decoder.quantise(path.quantization)
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)  # other streams will read the new matrices
        torch.cuda.empty_cache()  # what matrices left behind counts as free when the KV cache is planned


def measured_steps(
    decoder: MoondreamDecoder, config: RuntimeConfig, path: FastPath, is_captured: bool
) -> WorkingMemory:
    budget = prefill_budget(config, decoder.shape, decoder.device)
    with on_device(decoder.device):
        working = measure_working_memory(decoder, budget, path.kv_dtype, is_captured, path.is_fused)
        torch.cuda.empty_cache()  # what the measurement took counts as free again
    return working


def cache_scales(found: Mapping[int, KvScale], kv_dtype: torch.dtype, num_layers: int) -> list[tuple[float, float]]:
    """Scales of every layer for a float8 cache; none for another cache, or when the checkpoint has none."""
    if not found or kv_dtype.itemsize > 1:
        return []
    missing = [layer for layer in range(num_layers) if layer not in found]
    if missing:
        raise ConfigError(
            "kv_cache_dtype",
            f"'fp8' needs the scales of all layers or of none, and the checkpoint lacks those of {missing}; use auto",
        )
    return [(found[layer].k, found[layer].v) for layer in range(num_layers)]


def captured_steps(
    limits: RuntimeLimits, ops: Ops, pool: GraphPool, adapters: AdapterSlots | None = None
) -> MakeFastSteps:
    def make(model: DecoderModel, kv: PagedKVCache, table: RowTable) -> FastSteps:
        decode = DecodeGraphs(model, kv, table, ops, batch_sizes(limits.max_batch_size), pool, adapters)
        return FastSteps(decode, PrefillGraphs(model, kv, table, ops, limits.max_prefill_tokens, pool, adapters))

    return make
