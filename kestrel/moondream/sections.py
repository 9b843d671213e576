"""The sections of a Moondream config as frozen data: shapes, ids, templates and habits of generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kestrel.skills.base import SkillDefaults, Template


@dataclass(frozen=True)
class MoeConfig:
    """Layers from `start_layer` on replace the dense MLP by experts."""

    num_experts: int
    start_layer: int
    experts_per_token: int
    expert_inner_dim: int


@dataclass(frozen=True)
class TextConfig:
    dim: int
    ff_dim: int
    n_layers: int
    vocab_size: int
    max_context: int
    n_heads: int
    n_kv_heads: int
    prefix_attn: int
    """Positions at the start that attend to each other both ways when they hold BOS and an image."""
    rope_theta: float = 10000.0
    rotary_dim: int = 32
    tau_attn: bool = False
    moe: MoeConfig | None = None

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def qkv_dim(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim


@dataclass(frozen=True)
class VisionConfig:
    enc_dim: int
    enc_patch_size: int
    enc_n_layers: int
    enc_ff_dim: int
    enc_n_heads: int
    proj_out_dim: int
    crop_size: int
    in_channels: int
    max_crops: int
    overlap_margin: int
    """Patches that neighbouring tiles share on each side."""
    proj_inner_dim: int

    @property
    def grid(self) -> int:
        """Patches along one side of a crop."""
        return self.crop_size // self.enc_patch_size

    @property
    def num_patches(self) -> int:
        return self.grid**2

    @property
    def patch_dim(self) -> int:
        return self.in_channels * self.enc_patch_size**2


@dataclass(frozen=True)
class RegionConfig:
    dim: int
    coord_feat_dim: int
    coord_out_dim: int
    size_feat_dim: int
    size_out_dim: int
    inner_dim: int | None = None
    """Width of the MLP decoders; None: one matrix each."""
    has_ln: bool = False
    """Whether a LayerNorm stands in front of the decoders."""


@dataclass(frozen=True)
class TokenizerConfig:
    bos_id: int
    eos_id: int
    answer_id: int
    thinking_id: int
    coord_id: int
    size_id: int
    start_ground_points_id: int
    end_ground_id: int
    templates: Mapping[str, Template] = field(default_factory=dict)
    """By skill; captions as "caption.short", "caption.normal", "caption.long"."""


@dataclass(frozen=True)
class GenerationConfig:
    """How this generation of the model is prompted and decoded."""

    query_answer_opener: tuple[int, ...]
    """Ids after a question that open a direct answer."""
    query_reasoning_opener: tuple[int, ...]
    """Ids after a question that open thinking; empty when the model cannot reason."""
    compares_coord_and_eos_only: bool
    """After an object, only the coordinate and end ids compete (otherwise any id but the end means one more)."""
    defaults: SkillDefaults


def derived_generation(text: TextConfig, tokenizer: TokenizerConfig) -> GenerationConfig:
    """What holds when a config does not say: tau attention marks Moondream 3, anything else is Moondream 2.

    Moondream 2 was trained with the answer suffix doubled and opens thinking after one suffix; Moondream 3 uses either
    alone. A model without a query template gets no openers.
    """
    query = tokenizer.templates.get("query")
    suffix = () if query is None else query.suffix
    thinking = () if query is None else (tokenizer.thinking_id,)
    if text.tau_attn:
        defaults = SkillDefaults(0.5, 0.9, max_new_tokens=768, max_objects=150, reasoning=bool(thinking))
        return GenerationConfig(suffix, thinking, True, defaults)
    defaults = SkillDefaults(0.5, 0.3, max_new_tokens=768, max_objects=50, reasoning=False)
    return GenerationConfig(suffix + suffix, suffix + thinking, False, defaults)
