"""Moondream behind the runtime's contracts: embeddings, forward pass, heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kestrel.adapters import AdaptedMatrix, AdapterShape, ExpertShape
from kestrel.config import RuntimeConfig
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
from kestrel.images.picture import PictureForm, RgbImage, ShrunkImage, TilingParams, TilingPlan, plan_tiling
from kestrel.kernels.ops import Ops
from kestrel.models.contract import DecoderShape, EncodeCrops, KvScale, PreparedImage
from kestrel.models.decoder import TextModelDecoder
from kestrel.moondream.config import TextConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.region import coord_from_bins, logprob_around, size_from_bins
from kestrel.runtime.bring_up import NO_SCALES, ModelRuntime


def adapter_shape(text: TextConfig) -> AdapterShape:
    """An expert's fc1 makes its gate as well."""
    sizes = {"qkv": (text.qkv_dim, text.dim), "proj": (text.dim, text.dim)}
    sizes |= {"fc1": (text.ff_dim, text.dim), "fc2": (text.dim, text.ff_dim)}
    dense = {name: AdaptedMatrix(*size, place=name) for name, size in sizes.items()}
    moe = text.moe
    if moe is None:
        return AdapterShape((dense,) * text.n_layers, is_parallel=True)
    experts, inner_dim = ExpertShape(moe.num_experts, sharing=moe.experts_per_token), moe.expert_inner_dim
    sparse = dense | {
        "fc1": AdaptedMatrix(2 * inner_dim, text.dim, "fc1", experts=experts),
        "fc2": AdaptedMatrix(text.dim, inner_dim, "fc2", experts=experts),
    }
    layers = (sparse if layer >= moe.start_layer else dense for layer in range(text.n_layers))
    return AdapterShape(tuple(layers), is_parallel=True)


class MoondreamVision:
    """`kestrel.models.contract.VisionPart`: crops of a picture, their features, and what the text model reads."""

    def __init__(self, model: MoondreamModel) -> None:
        vision = model.config.vision
        self._model = model
        self._ops: Ops | None = None
        self._tiling = TilingParams(
            crop_size=vision.crop_size,
            patch_size=vision.enc_patch_size,
            overlap_margin=vision.overlap_margin,
            max_crops=vision.max_crops,
        )

    @property
    def device(self) -> torch.device:
        return self._model.text.wte.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.text.wte.dtype

    def fuse(self, ops: Ops) -> None:
        self._ops = ops

    def picture_form(self, outline_side: int | None) -> PictureForm:
        """A GPU resizes all but large pictures in a few ms, on a CPU that is for threads outside of the steps."""
        on_gpu = self.device.type == "cuda"
        return PictureForm(self._tiling, outline_side, LARGE_PIXELS if on_gpu else 0)

    def prepare_image(self, image: RgbImage | ShrunkImage) -> PreparedImage:
        plan = plan_tiling(image.height, image.width, self._tiling, image.max_crops)
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

    def embed_images(self, images: Sequence[PreparedImage], encode_crops: EncodeCrops | None = None) -> list[Tensor]:
        features_NPD = (encode_crops or self.encode_crops)([image.patches_NPC for image in images])
        of_each = features_NPD.split([image.num_crops for image in images])
        return self.join_crops(of_each, [image.tiles_hw for image in images])

    def encode_crops(self, patches: Sequence[Tensor]) -> Tensor:
        return self._model.vision.encode_crops(patches[0] if len(patches) == 1 else torch.cat(list(patches)))

    def new_crop_buffers(self, num_crops: int) -> tuple[Tensor, Tensor]:
        return self._model.vision.new_buffers(num_crops)

    def join_crops(self, features: Sequence[Tensor], tiles: Sequence[tuple[int, int]]) -> list[Tensor]:
        return self._model.vision.embed_images(features, tiles)


class MoondreamRegions:
    """`kestrel.models.contract.RegionPart`."""

    def __init__(self, model: MoondreamModel) -> None:
        ids = model.config.tokenizer
        self._region = model.region
        self.coord_id, self.size_id = ids.coord_id, ids.size_id

    def embed_coords(self, values_N: Tensor) -> Tensor:
        return self._region.encode_coord(values_N)

    def embed_sizes(self, values_N2: Tensor) -> Tensor:
        return self._region.encode_size(values_N2)

    def decode_coords(self, hidden_ND: Tensor) -> Tensor:
        logits_NC = self._region.decode_coord(hidden_ND).float()
        bins_N = logits_NC.argmax(-1)
        values_N = coord_from_bins(bins_N, logits_NC.shape[-1])
        return torch.stack((values_N, logprob_around(logits_NC, bins_N)), dim=-1)

    def decode_sizes(self, hidden_ND: Tensor) -> Tensor:
        logits_N2C = self._region.decode_size(hidden_ND).float()
        bins_N2 = logits_N2C.argmax(-1)
        values_N2 = size_from_bins(bins_N2, logits_N2C.shape[-1])
        return torch.cat((values_N2, logprob_around(logits_N2C, bins_N2).sum(-1, keepdim=True)), dim=-1)


class MoondreamDecoder(TextModelDecoder):
    """A loaded model as `kestrel.models.contract.DecoderModel`."""

    def __init__(self, model: MoondreamModel, vision: MoondreamVision | None = None) -> None:
        """`vision` may be one that also observes what it is asked."""
        text = model.config.text
        shape = DecoderShape(
            num_layers=text.n_layers,
            num_kv_heads=text.n_kv_heads,
            head_dim=text.head_dim,
            hidden_dim=text.dim,
            vocab_size=text.vocab_size,
            max_context=text.max_context,
            num_image_positions=model.config.vision.num_patches,
        )
        self._vision = vision or MoondreamVision(model)
        super().__init__(model.text, shape, adapter_shape(text), self._vision, MoondreamRegions(model))
        self._model = model

    def fuse(self, ops: Ops) -> None:
        self._vision.fuse(ops)
        self._model.fuse(ops)

    def quantise(self, quantization: str) -> None:
        self._model.quantise(quantization)


class MoondreamRuntime(ModelRuntime):
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
        super().__init__(make_decoder(model), config, with_adapters, kv_scales)
