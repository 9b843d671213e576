"""A config.json of the hub, as far as the decoder depends on it. What it asks for and cannot be done is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kestrel.errors import CheckpointError, shown

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


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
    qkv_bias: bool
    proj_bias: bool
    has_qk_norm: bool
    is_tied: bool
    """The output head is the embedding."""
    bos_id: int | None
    stop_ids: tuple[int, ...]

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> LlamaConfig:
        kind = raw["model_type"]
        dim, heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
        has_bias = bool(raw.get("attention_bias", False))
        _refuse_others(raw)
        return cls(
            vocab_size=_count(raw, "vocab_size"),
            dim=dim,
            ff_dim=_count(raw, "intermediate_size"),
            n_layers=_count(raw, "num_hidden_layers"),
            n_heads=heads,
            n_kv_heads=_count(raw, "num_key_value_heads", heads),
            head_dim=_count(raw, "head_dim", dim // heads),
            max_context=_count(raw, "max_position_embeddings"),
            norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(raw),
            qkv_bias=has_bias or kind == "qwen2",
            proj_bias=has_bias,
            has_qk_norm=kind == "qwen3",
            is_tied=bool(raw.get("tie_word_embeddings", False)),
            bos_id=next(iter(_ids(raw, "bos_token_id")), None),
            stop_ids=_ids(raw, "eos_token_id"),
        )


def _refuse_others(raw: Mapping[str, Any]) -> None:
    """What changes the answers and is not built."""
    usual = {"hidden_act": ("silu",), "mlp_bias": (False,), "use_sliding_window": (False,)}
    for name, values in usual.items():
        if raw.get(name, values[0]) not in values:
            raise _refusal(name, raw[name], f"only {shown(values[0])} is supported")
    window, context = raw.get("sliding_window"), _count(raw, "max_position_embeddings")
    uses_window = raw.get("use_sliding_window", raw["model_type"] == "mistral")
    if uses_window and window is not None and window < context:
        raise _refusal("sliding_window", window, f"attention over fewer than all {context} positions is not supported")


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """In a field of its own, or among `rope_parameters` as newer configs have it."""
    for name in ("rope_scaling", "rope_parameters"):
        section = raw.get(name) or {}
        if not isinstance(section, Mapping):
            raise _refusal(name, section, "expected an object")
        kind = section.get("rope_type", section.get("type", "default"))
        if kind != "default":
            raise _refusal(f"{name}.rope_type", kind, "only 'default' is supported")
        if "rope_theta" in section:
            return _number(section, "rope_theta", 10_000.0)
    return _number(raw, "rope_theta", 10_000.0)


def _count(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refusal(name, value, "expected a whole number above 0")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _refusal(name, value, "expected a number above 0")
    return float(value)


def _ids(raw: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = raw.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        raise _refusal(name, value, "expected a token id or a list of them")
    return tuple(ids)


def _refusal(name: str, value: object, problem: str) -> CheckpointError:
    return CheckpointError(f"config.json: {name} is {shown(value)}; {problem}")
