"""What a family's model must offer to the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kestrel.images.rgb import RgbImage
from kestrel.images.shrink import ShrunkImage
from kestrel.kernels.low_rank import SlotFactors


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The numbers the runtime sizes its tensors by."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    max_context: int
    num_image_positions: int
    """Positions one picture takes; 0 for a text-only model."""
    coord_id: int
    size_id: int


class Attend(Protocol):
    """Stores the keys and values of one layer's new positions and attends over everything stored for their rows.

    q and k are rotated and scaled already: nothing is left to do but attention. Returns [T, heads, head_dim].
    """

    def __call__(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor: ...


class StepAttention(Attend, Protocol):
    """`Attend`, and the same in two halves for a model that stores keys and values with a kernel of its own."""

    @property
    def slots_T(self) -> Tensor:
        """Where the keys and values of the new positions go."""
        ...

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values by slot."""
        ...

    def scales(self, layer: int) -> tuple[float, float]:
        """What the numbers of that cache, keys and values, are to be multiplied by; ones unless it is float8."""
        ...

    def attend_stored(self, layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
        """What the new positions see, once theirs are stored. Rows of both may lie apart."""
        ...


AdaptedMatrix = Literal["qkv", "proj", "proj_of_norm", "fc1", "fc2"]
"""A place where a low-rank delta is added. `proj_of_norm` is a delta of proj that reads the block's norm output."""


class Adapt(Protocol):
    """Adds the low-rank deltas of each position's adapter to what a matrix of the base model made of x.

    Both return y, which may be changed in place; positions without an adapter keep their y bit by bit.
    """

    def linear(self, layer: int, matrix: AdaptedMatrix, x_TD: Tensor, y_TF: Tensor) -> Tensor: ...

    def expert(
        self, layer: int, matrix: AdaptedMatrix, expert: int, positions_N: Tensor, x_ND: Tensor, y_NF: Tensor
    ) -> Tensor:
        """The same for one expert; row n belongs to the batch's position `positions_N[n]`."""
        ...


@dataclass(frozen=True, slots=True)
class LayerFactors:
    """The factors of one dense layer's matrices for all slots."""

    qkv: SlotFactors
    proj: SlotFactors
    fc1: SlotFactors
    fc2: SlotFactors


@dataclass(frozen=True, slots=True)
class SlotDeltas:
    """Adapters of a step as tensors alone: what is captured with them can be replayed for other slots and ranks."""

    slot_T: Tensor
    """Slot of each position, -1 for the base model."""
    num_slots: int
    layers: Sequence[LayerFactors]
    reads_norm_S: Tensor
    """Whether a slot's delta of proj reads the block's norm output; int32, with an entry for the base model."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """A picture as the encoder wants it."""

    patches_NPC: Tensor
    """Normalised patches of its crops, the one of the whole picture first."""
    tiles_hw: tuple[int, int]

    @property
    def num_crops(self) -> int:
        return len(self.patches_NPC)


class DecoderModel(Protocol):
    """A decoder with typed inputs and outputs. Tensors are flat: T positions of any rows, one after another."""

    @property
    def shape(self) -> DecoderShape: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def embed_text(self, ids_T: Tensor) -> Tensor: ...

    def embed_coords(self, values_N: Tensor) -> Tensor: ...

    def embed_sizes(self, values_N2: Tensor) -> Tensor: ...

    def prepare_image(self, image: RgbImage | ShrunkImage) -> PreparedImage:
        """Cut into crops and patches, on the device."""
        ...

    def embed_images(self, images: Sequence[PreparedImage]) -> list[Tensor]:
        """[num_image_positions, hidden_dim] of each, all encoded together: the two that follow, one after the other."""
        ...

    def encode_crops(self, patches: Sequence[Tensor]) -> Tensor:
        """Features of all crops in their order; the next call may overwrite them."""
        ...

    def join_crops(self, features: Sequence[Tensor], tiles: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The embeddings of pictures from the features of their crops."""
        ...

    def forward(self, x_TD: Tensor, positions_T: Tensor, attend: StepAttention, adapt: Adapt | None = None) -> Tensor:
        """The last layer's residual stream, [T, hidden_dim]."""
        ...

    @property
    def can_adapt_on_device(self) -> bool:
        """Whether there is a `forward_adapted`."""
        ...

    def forward_adapted(self, x_TD: Tensor, positions_T: Tensor, attend: StepAttention, deltas: SlotDeltas) -> Tensor:
        """`forward` with adapters and nothing to decide on the host.

        In fp32 on a CPU, positions of the base model get what `forward` gives them in a batch of the same shape, bit by
        bit. On a GPU that holds for steps of up to `Ops.max_small_rows` positions; in larger ones their hidden numbers
        are rounded to the model's dtype before the activation and not only after it.
        """
        ...

    def final_norm(self, hidden_ND: Tensor) -> Tensor:
        """The residual stream as the output head sees it: after the model's last norm."""
        ...

    def logits(self, hidden_ND: Tensor) -> Tensor: ...

    def decode_coords(self, hidden_ND: Tensor) -> Tensor:
        """The most likely coordinate per row, [N] in 0..1."""
        ...

    def decode_sizes(self, hidden_ND: Tensor) -> Tensor:
        """The most likely width and height per row, [N, 2] in 0..1."""
        ...


class OutlineRefiner(Protocol):
    """An optional second stage of segmentation. To be called on the thread that runs the model."""

    def refine_outline(
        self, image: RgbImage, svg_path: str, bbox: Mapping[str, float]
    ) -> tuple[str, dict[str, float]] | None:
        """(path, box) of the refined outline; None keeps the coarse one."""
        ...
