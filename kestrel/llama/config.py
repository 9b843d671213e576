"""A config.json of the hub, as far as the decoder depends on it, and the defaults of the generation_config.json there.

What they ask for and cannot be done is refused by the field's name. An absent field means what `transformers` takes for
that kind of model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kestrel.errors import CheckpointError, RequestError, shown
from kestrel.kernels.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling, yarn_magnitude
from kestrel.models.locate import read_object
from kestrel.settings import SETTINGS
from kestrel.skills.model_facts import SkillDefaults

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
GENERATION_NAME = "generation_config.json"
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class ExpertsConfig:
    num_experts: int
    experts_per_token: int
    inner_dim: int
    weights_over_all: bool
    """A token's weights are its probabilities of the chosen experts, not scaled to one (`norm_topk_prob` false)."""
    layers: frozenset[int]
    """Those with experts; the others are dense."""


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    dim: int
    ff_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool
    proj_bias: bool
    has_qk_norm: bool
    is_tied: bool
    """The output head is the embedding."""
    experts: ExpertsConfig | None
    bos_id: int | None
    stop_ids: tuple[int, ...]
    defaults: SkillDefaults

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], generation: Mapping[str, Any] = NOTHING) -> LlamaConfig:
        """`generation`: what generation_config.json holds; its end ids go before those of config.json."""
        kind = config["model_type"]
        raw, beside = _Fields({**_ABSENT.get(kind, NOTHING), **config}), _Fields(generation, GENERATION_NAME)
        has_bias = bool(raw.get("attention_bias")) and kind not in ("mistral", "qwen2")
        n_heads, n_kv_heads, head_dim = _heads(raw)
        theta, scaling, max_context = _rope(raw)
        _refuse_others(raw, max_context)
        return cls(
            vocab_size=raw.count("vocab_size"),
            dim=raw.count("hidden_size"),
            ff_dim=raw.count("intermediate_size"),
            n_layers=raw.count("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            max_context=max_context,
            norm_eps=raw.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=has_bias or kind == "qwen2",
            proj_bias=has_bias,
            has_qk_norm=kind in ("qwen3", "qwen3_moe"),
            is_tied=bool(raw.get("tie_word_embeddings")),
            experts=_experts(raw) if kind == "qwen3_moe" else None,
            bos_id=next(iter(raw.ids("bos_token_id")), None),
            stop_ids=beside.ids("eos_token_id") or raw.ids("eos_token_id"),
            defaults=_sampling_defaults(beside),
        )


# ---------------------------------------------------------------------- fields


_WINDOW = {"sliding_window": 4096}
_ABSENT: Mapping[str, Mapping[str, int]] = {
    "mistral": {"num_key_value_heads": 8, **_WINDOW},
    "qwen2": {"num_key_value_heads": 32, "max_window_layers": 28, **_WINDOW},
    "qwen3": {"num_key_value_heads": 32, "max_window_layers": 28, "head_dim": 128, **_WINDOW},
    "qwen3_moe": {
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, **_WINDOW,
    },
}  # fmt: skip
"""Of each kind, where an absent number does not follow from others."""


@dataclass(frozen=True, slots=True)
class _Fields:
    """An object of a JSON file; errors name its fields in full."""

    raw: Mapping[str, Any]
    file: str = "config.json"
    prefix: str = ""

    def get(self, name: str, default: Any = None) -> Any:
        return self.raw.get(name, default)

    def section(self, name: str) -> _Fields:
        """Empty where it is absent."""
        found = self.raw.get(name) or {}
        if not isinstance(found, Mapping):
            raise self.refusal(name, "expected an object")
        return _Fields(found, self.file, f"{self.prefix}{name}.")

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refusal(name, f"expected a whole number above {least - 1}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refusal(name, "expected a number above 0")
        return float(value)

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.raw.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
            raise self.refusal(name, "expected a token id or a list of them")
        return tuple(ids)

    def refuse_unless(self, name: str, *values: object) -> None:
        """The first is what an absent field means."""
        if self.raw.get(name, values[0]) not in values:
            raise self.refusal(name, f"only {shown(values[0])} is supported")

    def refusal(self, name: str, problem: str) -> CheckpointError:
        found = f"is {shown(self.raw[name])}" if name in self.raw else "is missing"
        return CheckpointError(f"{self.file}: {self.prefix}{name} {found}; {problem}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        return default if value is None else value


def _heads(raw: _Fields) -> tuple[int, int, int]:
    """(query heads, heads of keys and values, numbers per head)."""
    heads = raw.count("num_attention_heads")
    kv_heads = raw.count("num_key_value_heads", heads)
    head_dim = raw.count("head_dim", raw.count("hidden_size") // heads)
    if heads % kv_heads:
        raise raw.refusal("num_key_value_heads", f"it has to divide the {heads} attention heads")
    if head_dim % 2:
        raise raw.refusal("head_dim", "rotary positions need an even number")
    return heads, kv_heads, head_dim


def _experts(raw: _Fields) -> ExpertsConfig | None:
    """None where all layers are dense."""
    num_experts = raw.count("num_local_experts", raw.count("num_experts", least=0), least=0)
    dense, step = raw.get("mlp_only_layers") or [], raw.count("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise raw.refusal("mlp_only_layers", "expected a list of layer numbers")
    layers = {layer for layer in range(raw.count("num_hidden_layers")) if (layer + 1) % step == 0} - set(dense)
    if not num_experts or not layers:
        return None
    per_token = raw.count("num_experts_per_tok")
    if per_token > num_experts:
        raise raw.refusal("num_experts_per_tok", f"there are only {num_experts} experts")
    inner_dim, is_scaled = raw.count("moe_intermediate_size"), bool(raw.get("norm_topk_prob"))
    return ExpertsConfig(num_experts, per_token, inner_dim, not is_scaled, frozenset(layers))


# ---------------------------------------------------------------------- what is not built


def _refuse_others(raw: _Fields, max_context: int) -> None:
    """What changes the answers and is not built."""
    raw.refuse_unless("hidden_act", "silu", "swish")
    raw.refuse_unless("mlp_bias", False, None)
    raw.refuse_unless("partial_rotary_factor", 1.0, None)
    raw.refuse_unless("rope_interleaved", False, None)
    raw.refuse_unless("use_mrope", False, None)
    if raw.get("quantization_config") is not None:
        raise raw.refusal("quantization_config", "use a checkpoint that is not quantised")
    types = raw.get("layer_types") or []
    if not isinstance(types, list) or not set(map(str, types)) <= {"full_attention", "sliding_attention"}:
        raise raw.refusal("layer_types", "only 'full_attention' is supported")
    slides = raw.get("sliding_window") is not None and _slides(raw, types)
    if slides and raw.count("sliding_window") < max_context:
        raise raw.refusal("sliding_window", f"attention over fewer than all {max_context} positions is not supported")


def _slides(raw: _Fields, types: list[str]) -> bool:
    """Whether some layer uses the window."""
    if raw.get("model_type") == "mistral":
        return True
    if types:
        return "sliding_attention" in types
    is_on = bool(raw.get("use_sliding_window"))
    return is_on and raw.count("max_window_layers", 0, least=0) < raw.count("num_hidden_layers")


# ---------------------------------------------------------------------- rotary positions


_TRAINED = "original_max_position_embeddings"


def _rope(raw: _Fields) -> tuple[float, RopeScaling | None, int]:
    """(theta, scaling, context). Newer configs have all of it in `rope_parameters`."""
    section = raw.section("rope_scaling" if raw.get("rope_scaling") else "rope_parameters")
    section.refuse_unless("partial_rotary_factor", 1.0, None)
    theta = section.number("rope_theta", raw.number("rope_theta", 10_000.0))
    context = raw.count("max_position_embeddings")
    type_name = "rope_type" if "rope_type" in section.raw else "type"
    owner = next((one for one in (raw, section) if one.get(_TRAINED) is not None), None)
    trained = context if owner is None else owner.count(_TRAINED)
    match section.get(type_name, "default"):
        case "default":
            return theta, None, context
        case "linear":
            return theta, LinearScaling(section.number("factor")), context
        case "llama3":
            return theta, _llama3(section, trained), context
        case "yarn":
            scaling = _yarn(section, trained, context)
            stretched = 0 if owner is None else int(trained * scaling.factor)
            return theta, scaling, max(context, stretched)
    raise section.refusal(type_name, "only 'default', 'linear', 'llama3' and 'yarn' are supported")


def _llama3(section: _Fields, trained: int) -> Llama3Scaling:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise section.refusal("high_freq_factor", f"it has to exceed low_freq_factor, which is {low:g}")
    return Llama3Scaling(section.number("factor"), low, high, trained)


def _yarn(section: _Fields, trained: int, context: int) -> YarnScaling:
    factor = section.number("factor", context / trained)
    magnitude = yarn_magnitude(factor)
    if section.get("mscale") and section.get("mscale_all_dim"):
        parts = [yarn_magnitude(factor, section.number(name)) for name in ("mscale", "mscale_all_dim")]
        magnitude = parts[0] / parts[1]
    return YarnScaling(
        factor=factor,
        context=trained,
        magnitude=section.number("attention_factor", magnitude),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncates=bool(section.get("truncate", True)),
    )


# ---------------------------------------------------------------------- generation_config.json


_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_generation(folder: Path) -> Mapping[str, Any]:
    """What the generation_config.json of a folder holds; nothing when there is none."""
    return read_object(folder / GENERATION_NAME) or NOTHING


def _sampling_defaults(beside: _Fields) -> SkillDefaults:
    """What the file does not name has no effect, as other servers of text models have it."""
    given = {name: beside.get(name) for name in _SAMPLED if beside.get(name) is not None}
    try:
        checked = {name: SETTINGS[name].kind(name, value) for name, value in given.items()}
    except RequestError as error:
        raise CheckpointError(f"{beside.file}: {error}; correct it or remove the file") from error
    if beside.get("do_sample") is False:
        checked["temperature"] = 0.0
    return SkillDefaults(**{"temperature": 1.0, "top_p": 1.0, **checked})
