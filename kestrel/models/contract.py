"""What a family's model must offer to the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from kestrel.adapters import AdapterShape
from kestrel.images.picture import PictureForm, RgbImage, ShrunkImage
from kestrel.kernels.ops import Ops
from kestrel.layers.adapt import Adapt
from kestrel.layers.attention import Attend
from kestrel.parallel.ranks import Part, Ranks


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The numbers the runtime sizes its tensors by."""

    num_layers: int
    num_kv_heads: int
    """Of this rank."""
    head_dim: int
    hidden_dim: int
    vocab_size: int
    max_context: int
    num_image_positions: int = 0
    """Positions one picture takes; 0 for a text-only model."""


@dataclass(frozen=True, slots=True)
class KvScale:
    """One layer's scales of a float8 KV cache: stored value · scale = value."""

    k: float
    v: float


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """A picture as the encoder wants it."""

    patches_NPC: Tensor
    """Normalised patches of its crops, the one of the whole picture first."""
    tiles_hw: tuple[int, int]

    @property
    def num_crops(self) -> int:
        return len(self.patches_NPC)


EncodeCrops: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""Patches of pictures to the features of all their crops, which the next call may overwrite."""


class VisionPart(Protocol):
    """From pictures to embeddings."""

    def picture_form(self, outline_side: int | None) -> PictureForm:
        """What of a picture is handed to the runtime; `outline_side`: what a refiner of outlines needs beside it."""
        ...

    def prepare_image(self, image: RgbImage | ShrunkImage) -> PreparedImage:
        """Cut into crops and patches, on the device."""
        ...

    def embed_images(self, images: Sequence[PreparedImage], encode_crops: EncodeCrops | None = None) -> list[Tensor]:
        """[num_image_positions, hidden_dim] of each, all encoded together: `encode_crops` and `join_crops`, one after
        the other; another `encode_crops` may be given, as another way to the same features."""
        ...

    def encode_crops(self, patches: Sequence[Tensor]) -> Tensor:
        """Features of all crops in their order; the next call may overwrite them."""
        ...

    def new_crop_buffers(self, num_crops: int) -> tuple[Tensor, Tensor]:
        """Space for the patches and the features of so many crops."""
        ...

    def join_crops(self, features: Sequence[Tensor], tiles: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The embeddings of pictures from the features of their crops."""
        ...


class RegionPart(Protocol):
    """Coordinates and sizes that stand among the tokens."""

    @property
    def coord_id(self) -> int: ...

    @property
    def size_id(self) -> int: ...

    def embed_coords(self, values_N: Tensor) -> Tensor: ...

    def embed_sizes(self, values_N2: Tensor) -> Tensor: ...

    def decode_coords(self, hidden_ND: Tensor) -> Tensor:
        """[N, 2] in fp32: the most likely coordinate per row, in 0..1, and the log-probability that it is about there.
        Of a wide range of equally likely places none is likely."""
        ...

    def decode_sizes(self, hidden_ND: Tensor) -> Tensor:
        """[N, 3] in fp32: the most likely width and height per row, in 0..1, and the log-probability of both."""
        ...


class DecoderModel(Protocol):
    """A decoder with typed inputs and outputs. Tensors are flat: T positions of any rows, one after another."""

    @property
    def shape(self) -> DecoderShape: ...

    @property
    def vision(self) -> VisionPart | None:
        """None: it reads text only."""
        ...

    @property
    def regions(self) -> RegionPart | None:
        """None: its tokens are text."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def ranks(self) -> Ranks:
        """The processes that have the model together; what they do must not depend on time or memory of one of them,
        where sums follow from it."""
        ...

    @property
    def adapter_shape(self) -> AdapterShape:
        """What an adapter must fit."""
        ...

    @property
    def adapter_parts(self) -> Mapping[tuple[int, str], Part]:
        """What this rank has of the matrices that adapters may name, by layer and place; others are whole."""
        ...

    def fuse(self, ops: Ops) -> None:
        """From now on run in few, wide operations of this bundle."""
        ...

    def quantise(self, quantization: str) -> None:
        """From now on run on weights of this format, as `RuntimeConfig` names it; "none" keeps them."""
        ...

    def filled_up(self, num_rows: int) -> int:
        """To how many rows a decode step of so many is filled up on a GPU, because fewer take longer. Known once the
        model is quantised and fused."""
        ...

    def embed_text(self, ids_T: Tensor) -> Tensor: ...

    def forward(
        self,
        x_TD: Tensor,
        positions_T: Tensor,
        attend: Attend,
        adapt: Adapt | None = None,
        wanted_N: Tensor | None = None,
    ) -> Tensor:
        """The last layer's residual stream of the wanted positions, [N, hidden_dim], or of all. Positions are below
        `max_context`, those of padding too: a model that has no rotary ones adds its own here."""
        ...

    def final_norm(self, hidden_ND: Tensor) -> Tensor:
        """The residual stream as the output head sees it: after the model's last norm."""
        ...

    def logits(self, hidden_ND: Tensor) -> Tensor: ...


class OutlineRefiner(Protocol):
    """An optional second stage of segmentation. To be called on the thread that runs the model."""

    def refine_outline(
        self, image: RgbImage, svg_path: str, bbox: Mapping[str, float]
    ) -> tuple[str, dict[str, float]] | None:
        """(path, box) of the refined outline; None keeps the coarse one."""
        ...
