"""One Moondream as frozen data, read strictly from JSON, and the configs of the published releases.

`MoondreamConfig.from_dict` reads an object with the sections text, vision, region, tokenizer and generation. What is
unknown, missing or of a wrong type is a CheckpointError that names it. These keys may be left out:

- text.n_kv_heads: n_heads; text.rope_theta: 10000; text.rotary_dim: 32; text.tau_attn: false; text.moe: null
- region.inner_dim: null (one matrix per decoder); region.has_ln: false (the loader sets it from the weights)
- tokenizer.templates: a skill or caption length that is absent or null is not supported
- generation, or any key of it: see `derived_generation`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol, TypeVar

from kestrel.errors import CheckpointError
from kestrel.settings import CAPTION_LENGTHS
from kestrel.skills.model_facts import SkillDefaults, Template

SKILL_TEMPLATES = ("query", "detect", "point", "segment")
MAY_BE_ZERO = ("start_layer", "overlap_margin", "temperature", "top_k", "min_p")


class DataclassType(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


ConfigT = TypeVar("ConfigT", bound=DataclassType)


def json_object(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"model config: {path} must be a JSON object (got {value!r})")
    return dict(value)


def required_key(data: Mapping[str, Any], key: str, path: str) -> Any:
    if key not in data:
        raise CheckpointError(f"model config: {path}.{key} is missing; add it to config.json")
    return data[key]


def refuse_unknown(data: Mapping[str, Any], known: tuple[str, ...], path: str) -> None:
    for key in data:
        if key not in known:
            raise CheckpointError(f"model config: {path}.{key} is unknown; {path} has {', '.join(known)}")


def read_flat(cls: type[ConfigT], raw: object, path: str, **given: Any) -> ConfigT:
    """A config class of plain numbers and flags from a JSON object; `given` fields are already read."""
    data = json_object(raw, path)
    refuse_unknown(data, tuple(f.name for f in fields(cls)), path)
    values = dict(given)
    for f in fields(cls):
        is_required = f.default is MISSING and f.default_factory is MISSING
        if f.name not in given and (is_required or f.name in data):
            value = required_key(data, f.name, path)
            is_absent = value is None and str(f.type).endswith(" | None")
            values[f.name] = None if is_absent else _plain_value(value, str(f.type), f"{path}.{f.name}")
    return cls(**values)


def read_text(raw: object) -> TextConfig:
    data = json_object(raw, "text")
    if "n_heads" in data:
        data.setdefault("n_kv_heads", data["n_heads"])
    moe = data.get("moe")
    return read_flat(TextConfig, data, "text", moe=None if moe is None else read_flat(MoeConfig, moe, "text.moe"))


def read_tokenizer(raw: object) -> TokenizerConfig:
    data = json_object(raw, "tokenizer")
    templates = _read_templates(required_key(data, "templates", "tokenizer"))
    return read_flat(TokenizerConfig, data, "tokenizer", templates=templates)


def _read_templates(raw: object, path: str = "tokenizer.templates") -> dict[str, Template]:
    data = json_object(raw, path)
    refuse_unknown(data, ("caption", *SKILL_TEMPLATES), path)
    given = {name: value for name, value in data.items() if value is not None}
    templates: dict[str, Template] = {}
    captions = json_object(given.pop("caption", {}), f"{path}.caption")
    refuse_unknown(captions, CAPTION_LENGTHS, f"{path}.caption")
    for length, ids in captions.items():
        if ids is not None:
            templates[f"caption.{length}"] = Template(_token_ids(ids, f"{path}.caption.{length}"))
    for skill, value in given.items():
        parts = json_object(value, f"{path}.{skill}")
        refuse_unknown(parts, ("prefix", "suffix"), f"{path}.{skill}")
        prefix = _token_ids(required_key(parts, "prefix", f"{path}.{skill}"), f"{path}.{skill}.prefix")
        suffix = _token_ids(required_key(parts, "suffix", f"{path}.{skill}"), f"{path}.{skill}.suffix")
        templates[skill] = Template(prefix, suffix)
    return templates


def read_generation(raw: object, derived: GenerationConfig) -> GenerationConfig:
    """`derived` with the keys that `raw` gives."""
    data = json_object(raw, "generation")
    refuse_unknown(data, tuple(f.name for f in fields(GenerationConfig)), "generation")
    values: dict[str, Any] = {}
    for name, value in data.items():
        path = f"generation.{name}"
        if name == "defaults":
            merged = asdict(derived.defaults) | json_object(value, path)
            values[name] = read_flat(SkillDefaults, merged, path)
        elif name == "compares_coord_and_eos_only":
            values[name] = _plain_value(value, "bool", path)
        elif name == "picture_question":
            values[name] = _words(value, path)
        else:
            values[name] = _token_ids(value, path)
    return replace(derived, **values)


def _plain_value(value: Any, annotation: str, path: str) -> Any:
    """`value` if it fits the field's annotation: a flag, or a number that is not negative."""
    kind = annotation.removesuffix(" | None")
    name = path.rpartition(".")[2]
    if kind == "bool":
        valid = isinstance(value, bool)
    else:
        is_number = isinstance(value, int if kind == "int" else (int, float)) and not isinstance(value, bool)
        may_be_zero = name in MAY_BE_ZERO or name.endswith("_id")
        valid = is_number and (value > 0 or (value == 0 and may_be_zero))
    if not valid:
        wanted = {"bool": "true or false", "int": "a positive integer", "float": "a positive number"}[kind]
        raise CheckpointError(f"model config: {path} must be {wanted} (got {value!r})")
    return float(value) if kind == "float" else value


def _words(value: object, path: str) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise CheckpointError(f"model config: {path} must be a text (got {value!r})")


def _token_ids(value: object, path: str) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)) and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return tuple(value)
    raise CheckpointError(f"model config: {path} must be a list of token ids (got {value!r})")


# ---------------------------------------------------------------------- sections: shapes, ids, templates, generation


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


PICTURE_QUESTION = "Describe this image."


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
    picture_question: str = PICTURE_QUESTION
    """What a chat asks about a picture that comes without words."""


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


# ---------------------------------------------------------------------- the whole, and the releases


__all__ = [
    "MOONDREAM2",
    "MOONDREAM3",
    "MOONDREAM_0_5B",
    "PICTURE_QUESTION",
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
