"""One Moondream as frozen data, read strictly from JSON, and the configs of the published releases.

`MoondreamConfig.from_dict` reads an object with the sections text, vision, region, tokenizer and generation. An unknown
or missing key is a CheckpointError that names it. These keys may be left out:

- text.n_kv_heads: n_heads; text.rope_theta: 10000; text.rotary_dim: 32; text.tau_attn: false; text.moe: null
- region.inner_dim: null (one matrix per decoder); region.has_ln: false (the loader sets it from the weights)
- tokenizer.templates: a skill or caption length that is absent or null is not supported
- generation, or any key of it: see `derived_generation`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from kestrel.errors import CheckpointError
from kestrel.moondream.section_json import (
    json_object,
    read_flat,
    read_generation,
    read_text,
    read_tokenizer,
    refuse_unknown,
    required_key,
)
from kestrel.moondream.sections import (
    GenerationConfig,
    MoeConfig,
    RegionConfig,
    TextConfig,
    TokenizerConfig,
    VisionConfig,
    derived_generation,
)
from kestrel.skills.base import SkillDefaults, Template

__all__ = [
    "MOONDREAM2",
    "MOONDREAM3",
    "MOONDREAM_0_5B",
    "GenerationConfig",
    "MoeConfig",
    "MoondreamConfig",
    "RegionConfig",
    "TextConfig",
    "TokenizerConfig",
    "VisionConfig",
    "derived_generation",
]


@dataclass(frozen=True)
class MoondreamConfig:
    text: TextConfig
    vision: VisionConfig
    region: RegionConfig
    tokenizer: TokenizerConfig
    generation: GenerationConfig

    def __post_init__(self) -> None:
        for complaint in (*_text_faults(self), *_vision_faults(self), *_region_faults(self), *_id_faults(self)):
            raise CheckpointError(f"model config: {complaint}")

    def with_region_ln(self, has_ln: bool) -> MoondreamConfig:
        return replace(self, region=replace(self.region, has_ln=has_ln))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MoondreamConfig:
        data = json_object(data, "config")
        refuse_unknown(data, tuple(f.name for f in fields(cls)), "config")
        text = read_text(required_key(data, "text", "config"))
        vision = read_flat(VisionConfig, required_key(data, "vision", "config"), "vision")
        region = read_flat(RegionConfig, required_key(data, "region", "config"), "region")
        tokenizer = read_tokenizer(required_key(data, "tokenizer", "config"))
        generation = read_generation(data.get("generation", {}), derived_generation(text, tokenizer))
        return cls(text, vision, region, tokenizer, generation)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` gives an equal config back."""
        data = asdict(replace(self, tokenizer=replace(self.tokenizer, templates={})))
        templates: dict[str, Any] = {}
        for name, template in self.tokenizer.templates.items():
            skill, _, length = name.partition(".")
            if length:
                templates.setdefault(skill, {})[length] = list(template.prefix)
            else:
                templates[skill] = {"prefix": list(template.prefix), "suffix": list(template.suffix)}
        data["tokenizer"]["templates"] = templates
        for name in ("query_answer_opener", "query_reasoning_opener"):
            data["generation"][name] = list(data["generation"][name])
        return data


def _text_faults(config: MoondreamConfig) -> Iterator[str]:
    text, patches = config.text, config.vision.num_patches
    if text.dim % text.n_heads:
        yield f"text.n_heads {text.n_heads} must divide text.dim {text.dim}"
    if text.n_heads % text.n_kv_heads:
        yield f"text.n_kv_heads {text.n_kv_heads} must divide text.n_heads {text.n_heads}"
    if text.tau_attn and text.n_kv_heads != text.n_heads:
        yield f"text.n_kv_heads {text.n_kv_heads} must equal text.n_heads {text.n_heads} with text.tau_attn"
    if text.rotary_dim % 2 or text.rotary_dim > text.head_dim:
        yield f"text.rotary_dim {text.rotary_dim} must be even and at most the head size {text.head_dim}"
    if text.moe is not None and text.moe.experts_per_token > text.moe.num_experts:
        yield f"text.moe.experts_per_token {text.moe.experts_per_token} exceeds num_experts {text.moe.num_experts}"
    if text.prefix_attn != 1 + patches:
        yield f"text.prefix_attn {text.prefix_attn} must be 1 + the {patches} patches of a crop"


def _vision_faults(config: MoondreamConfig) -> Iterator[str]:
    vision, text = config.vision, config.text
    if vision.crop_size % vision.enc_patch_size:
        yield f"vision.enc_patch_size {vision.enc_patch_size} must divide vision.crop_size {vision.crop_size}"
    if vision.enc_dim % vision.enc_n_heads:
        yield f"vision.enc_n_heads {vision.enc_n_heads} must divide vision.enc_dim {vision.enc_dim}"
    if vision.in_channels != 3:
        yield f"vision.in_channels {vision.in_channels} must be 3 (RGB)"
    if 2 * vision.overlap_margin >= vision.grid:
        yield f"vision.overlap_margin {vision.overlap_margin} leaves nothing of a tile of {vision.grid} patches"
    if vision.proj_out_dim != text.dim:
        yield f"vision.proj_out_dim {vision.proj_out_dim} must equal text.dim {text.dim}"


def _region_faults(config: MoondreamConfig) -> Iterator[str]:
    region = config.region
    if region.dim != config.text.dim:
        yield f"region.dim {region.dim} must equal text.dim {config.text.dim}"
    for name in ("coord_feat_dim", "size_feat_dim", "size_out_dim"):
        value = asdict(region)[name]
        if value % 2:
            yield f"region.{name} {value} must be even"


def _id_faults(config: MoondreamConfig) -> Iterator[str]:
    tokenizer, generation = config.tokenizer, config.generation
    groups = {f"tokenizer.{k}": (v,) for k, v in vars(tokenizer).items() if isinstance(v, int)}
    groups |= {f"tokenizer.templates.{k}": t.prefix + t.suffix for k, t in tokenizer.templates.items()}
    groups["generation.query_answer_opener"] = generation.query_answer_opener
    groups["generation.query_reasoning_opener"] = generation.query_reasoning_opener
    for path, ids in groups.items():
        for token_id in ids:
            if not 0 <= token_id < config.text.vocab_size:
                yield f"{path} has id {token_id}; ids run from 0 to text.vocab_size - 1 = {config.text.vocab_size - 1}"


def _release(
    text: TextConfig, vision: VisionConfig, inner_dim: int | None, tokenizer: TokenizerConfig
) -> MoondreamConfig:
    region = RegionConfig(text.dim, 256, 1024, 512, 2048, inner_dim)
    return MoondreamConfig(text, vision, region, tokenizer, derived_generation(text, tokenizer))


_VISION = VisionConfig(
    enc_dim=1152,
    enc_patch_size=14,
    enc_n_layers=27,
    enc_ff_dim=4304,
    enc_n_heads=16,
    proj_out_dim=2048,
    crop_size=378,
    in_channels=3,
    max_crops=12,
    overlap_margin=4,
    proj_inner_dim=8192,
)
_TEMPLATES = {
    "caption.short": Template((1, 32708, 2, 12492, 3)),
    "caption.normal": Template((1, 32708, 2, 6382, 3)),
    "caption.long": Template((1, 32708, 2, 4059, 3)),
    "query": Template((1, 15381, 2), (3,)),
    "detect": Template((1, 7235, 476, 2), (3,)),
    "point": Template((1, 2581, 2), (3,)),
}
_TOKENIZER = TokenizerConfig(
    bos_id=0,
    eos_id=0,
    answer_id=3,
    thinking_id=4,
    coord_id=5,
    size_id=6,
    start_ground_points_id=7,
    end_ground_id=9,
    templates=_TEMPLATES,
)
_TEXT = TextConfig(
    dim=2048,
    ff_dim=8192,
    n_layers=24,
    vocab_size=51200,
    max_context=2048,
    n_heads=32,
    n_kv_heads=32,
    prefix_attn=730,
)

MOONDREAM2 = _release(_TEXT, _VISION, 8192, _TOKENIZER)

MOONDREAM3 = _release(
    replace(
        _TEXT, max_context=32768, rope_theta=1_500_000.0, tau_attn=True, moe=MoeConfig(64, 4, 8, expert_inner_dim=1024)
    ),
    _VISION,
    None,
    replace(_TOKENIZER, templates={**_TEMPLATES, "segment": Template((1, 17374, 2), (3,))}),
)

# The legacy tokenizer has no marker ids. Ours are padding rows of the embedding, which it never yields.
_LEGACY_TOKENIZER = TokenizerConfig(
    bos_id=50256,
    eos_id=50256,
    answer_id=51194,
    thinking_id=51195,
    coord_id=51196,
    size_id=51197,
    start_ground_points_id=51198,
    end_ground_id=51199,
    templates={
        "caption.short": Template((198, 198, 16438, 8305, 25)),
        "caption.normal": Template((198, 198, 24334, 1159, 25)),
        "query": Template((198, 198, 24361, 25), (198, 198, 33706, 25)),
        "detect": Template((198, 198, 47504, 25), (628,)),
        "point": Template((198, 198, 12727, 25), (628,)),
    },
)

MOONDREAM_0_5B = replace(
    _release(
        replace(_TEXT, dim=1024, ff_dim=4096, n_heads=16, n_kv_heads=16),
        replace(_VISION, enc_dim=720, enc_ff_dim=2690, enc_n_heads=10, proj_out_dim=1024),
        8192,
        _LEGACY_TOKENIZER,
    ),
    generation=GenerationConfig(
        query_answer_opener=_LEGACY_TOKENIZER.templates["query"].suffix,
        query_reasoning_opener=(),
        compares_coord_and_eos_only=False,
        defaults=SkillDefaults(0.5, 0.3, max_new_tokens=768, max_objects=50, reasoning=False),
    ),
)
