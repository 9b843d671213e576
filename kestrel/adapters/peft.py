"""Adapters as the peft library saves them: a folder with adapter_config.json and adapter_model.safetensors.

LoRA is read, for the matrices of attention and MLP. What would change the answers and is not done is refused by the
name of its field. Pairs of smaller rank are filled up with zeros to the largest, and a scale that differs from the
others' is multiplied into its `b`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kestrel.adapters.adapter import SIDES, Adapter, AdapterTarget, LowRankPair, Side
from kestrel.errors import CheckpointError, shown

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
NAME_PREFIX = "base_model."

MODULES: Mapping[str, str] = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
"""Our own name of each matrix of a layer."""

_MAX_CONFIG_BYTES = 2**20
_MAX_LISTED = 8
_TENSOR = re.compile(
    r"base_model\.model\.((?:model\.)?layers\.(0|[1-9][0-9]{0,3})\.((?:self_attn|mlp)\.\w+))\.lora_([AB])\.weight"
)
_PLAIN_PATTERN = re.compile(r"\w+(?:\.\w+)*", re.ASCII)

_READ = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias"}
    | {"init_lora_weights"}
)
_WITHOUT_EFFECT = frozenset(
    {"auto_mapping", "base_model_name_or_path", "revision", "task_type", "peft_version"}
    | {"inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "ensure_weight_tying"}
    | {"layers_to_transform", "layers_pattern", "exclude_modules", "loftq_config", "eva_config", "corda_config"}
    | {"lora_ga_config"}
)
"""On answers: they name the origin, steer training, or choose matrices, which the tensors show anyway."""
_NOT_BUILT = frozenset(
    {"use_dora", "lora_bias", "modules_to_save", "fan_in_fan_out", "trainable_token_indices", "layer_replication"}
    | {"target_parameters", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "megatron_config"}
)
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model as it is."""
_ORIGIN = ("base_model_name_or_path", "revision", "peft_version")


def adapter_files(weights: Path) -> tuple[Path, ...]:
    """All files of an adapter: of peft's, the config too."""
    config = weights.with_name(PEFT_CONFIG)
    return (weights, config) if weights.name == PEFT_WEIGHTS and os.path.lexists(config) else (weights,)


# ---------------------------------------------------------------------- adapter_config.json


@dataclass(frozen=True)
class PeftConfig:
    rank: int
    alpha: float
    uses_rslora: bool
    ranks: Mapping[str, int]
    """Of modules whose names end so, in the order of the file; the first that fits counts."""
    alphas: Mapping[str, float]
    targets: tuple[str, ...] | None
    """Ends of the names of adapted modules. None where only the tensors tell."""
    metadata: Mapping[str, str]

    def rank_of(self, module: str) -> int:
        return next((rank for end, rank in self.ranks.items() if _ends_with(module, end)), self.rank)

    def scale_of(self, module: str) -> float:
        alpha = next((alpha for end, alpha in self.alphas.items() if _ends_with(module, end)), self.alpha)
        return alpha / self._divisor(self.rank_of(module))

    @property
    def scale(self) -> float:
        """Of modules that no pattern names."""
        return self.alpha / self._divisor(self.rank)

    def alpha_at(self, rank: int) -> float:
        """The alpha that gives `scale` as alpha / rank."""
        return self.alpha * rank / self._divisor(self.rank)

    def _divisor(self, rank: int) -> float:
        return math.sqrt(rank) if self.uses_rslora else rank


def read_config(path: Path) -> PeftConfig:
    fields = _Fields(path, _read_object(path))
    fields.refuse_others()
    raw = fields.raw
    chooses_layers = bool(raw.get("layers_to_transform") or raw.get("exclude_modules"))
    targets = fields.target_modules()
    return PeftConfig(
        rank=fields.rank("r", raw.get("r")),
        alpha=fields.alpha("lora_alpha", raw.get("lora_alpha")),
        uses_rslora=fields.switch("use_rslora"),
        ranks={end: fields.rank(f"rank_pattern.{end}", value) for end, value in fields.pattern("rank_pattern")},
        alphas={end: fields.alpha(f"alpha_pattern.{end}", value) for end, value in fields.pattern("alpha_pattern")},
        targets=None if chooses_layers else targets,
        metadata={name: raw[name] for name in _ORIGIN if isinstance(raw.get(name), str)},
    )


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; copy the {PEFT_CONFIG} that peft wrote beside {PEFT_WEIGHTS}")
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise CheckpointError(f"{path} has more than {_MAX_CONFIG_BYTES} bytes; copy the adapter again")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check the adapter's folder") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON; copy the adapter again") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object; copy the adapter again")
    return raw


@dataclass(frozen=True)
class _Fields:
    """Reads the fields of one file, and refuses by their names."""

    path: Path
    raw: Mapping[str, Any]

    def refusal(self, name: str, value: object, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} is {shown(value)}; {problem}")

    def refuse_others(self) -> None:
        """What changes the answers and is not built, and what nobody here has heard of."""
        kind, bias, start = (self.raw.get(name) for name in ("peft_type", "bias", "init_lora_weights"))
        if kind != "LORA":
            raise self.refusal("peft_type", kind, "only 'LORA' is supported")
        if bias not in (None, "none"):
            raise self.refusal("bias", bias, "adapters that change biases are not supported")
        if start not in _PLAIN_STARTS:
            raise self.refusal(
                "init_lora_weights",
                start,
                "such an adapter needs changed weights of the base model; save it again with "
                "path_initial_model_for_weight_conversion, which makes it a plain one",
            )
        for name, value in self.raw.items():
            if value and name in _NOT_BUILT:
                raise self.refusal(name, value, "it is not supported; train the adapter without it")
            if value and name not in _READ and name not in _WITHOUT_EFFECT:
                raise self.refusal(name, value, "this field is not known; if it changes no answers, take it out")

    def rank(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(name, value, "expected a whole number above 0")
        return value

    def alpha(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refusal(name, value, "expected a number above 0")
        return float(value)

    def switch(self, name: str) -> bool:
        value = self.raw.get(name)
        if value not in (True, False, None):
            raise self.refusal(name, value, "expected true or false")
        return bool(value)

    def pattern(self, name: str) -> list[tuple[str, object]]:
        found = self.raw.get(name) or {}
        if not isinstance(found, dict) or not all(_PLAIN_PATTERN.fullmatch(end) for end in found):
            problem = "expected an object whose keys are ends of module names, such as layers.0.mlp.up_proj"
            raise self.refusal(name, found, problem)
        return list(found.items())

    def target_modules(self) -> tuple[str, ...] | None:
        found = self.raw.get("target_modules")
        if found is None or isinstance(found, str):
            return None
        if not isinstance(found, list) or not all(isinstance(end, str) for end in found):
            raise self.refusal("target_modules", found, "expected a list of names")
        known = [module.rpartition(".")[2] for module in MODULES]
        unknown = sorted({end for end in found if end.rpartition(".")[2] not in known})
        if unknown:
            raise self.refusal("target_modules", unknown, f"adapters of {', '.join(known)} alone are supported")
        return tuple(found)


def _ends_with(module: str, end: str) -> bool:
    return module == end or module.endswith(f".{end}")


# ---------------------------------------------------------------------- the tensors


def peft_adapter(path: Path, tensors: Mapping[str, Tensor], config: PeftConfig) -> Adapter:
    """What the tensors are as an adapter. Whether it fits a base model is not known here."""
    sides = _by_target(path, tensors)
    _require_whole(path, sides, config)
    modules = {target: module for target, (module, _) in sides.items()}
    rank = max(config.rank_of(module) for module in modules.values())
    pairs: dict[AdapterTarget, LowRankPair] = {}
    for target in sorted(sides, key=_place):
        module, factors = sides[target]
        _require_rank(path, module, factors, config.rank_of(module))
        scale = config.scale_of(module)
        b = factors["b"] if scale == config.scale else factors["b"].float() * (scale / config.scale)
        pairs[target] = LowRankPair(_filled_up(factors["a"], rank, 0), _filled_up(b, rank, 1))
    return Adapter("peft", rank, pairs, alpha=config.alpha_at(rank), metadata=config.metadata)


_Sides = dict[AdapterTarget, tuple[str, dict[Side, Tensor]]]


def _by_target(path: Path, tensors: Mapping[str, Tensor]) -> _Sides:
    """The module behind each adapted matrix, and its factors."""
    found: _Sides = {}
    strange: list[str] = []
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match[3] not in MODULES:
            strange.append(name)
            continue
        module, factors = found.setdefault(AdapterTarget(int(match[2]), MODULES[match[3]]), (match[1], {}))
        side: Side = "a" if match[4] == "A" else "b"
        if module != match[1] or side in factors:
            raise CheckpointError(f"{path} holds {module} and {match[1]}, which are the same matrix; save it again")
        factors[side] = tensor
    if strange:
        raise CheckpointError(
            f"{path} holds tensors that are no LoRA factors of {', '.join(MODULES)} of a layer: {_listed(strange)}; "
            "train the adapter on these matrices alone (target_modules)"
        )
    return found


def _require_whole(path: Path, sides: _Sides, config: PeftConfig) -> None:
    """Both factors of each matrix, and the same matrices in each layer where the config says so."""
    missing = [
        f"base_model.model.{module}.lora_{side.upper()}.weight"
        for module, factors in sides.values()
        for side in SIDES
        if side not in factors
    ]
    num_layers = 1 + max(target.layer for target in sides)
    for layer in range(num_layers if config.targets is not None else 0):
        for module, matrix in MODULES.items():
            full = f"model.layers.{layer}.{module}"
            is_named = any(_ends_with(full, end) for end in config.targets or ())
            if is_named and AdapterTarget(layer, matrix) not in sides:
                missing.append(f"base_model.model.{full}.lora_A.weight")
    if missing:
        raise CheckpointError(
            f"{path} lacks tensors of matrices that target_modules names: {_listed(missing)}; copy the adapter again"
        )


def _require_rank(path: Path, module: str, factors: Mapping[Side, Tensor], rank: int) -> None:
    a, b = factors["a"], factors["b"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise CheckpointError(
            f"{path}: the factors of {module} are {list(a.shape)} and {list(b.shape)}, and the config gives it the "
            f"rank {rank} (r, rank_pattern); copy {PEFT_CONFIG} and {PEFT_WEIGHTS} of the same adapter"
        )


def _filled_up(factor: Tensor, rank: int, dim: int) -> Tensor:
    lacking = rank - factor.shape[dim]
    if lacking == 0:
        return factor
    shape = (lacking, factor.shape[1]) if dim == 0 else (factor.shape[0], lacking)
    return torch.cat([factor, factor.new_zeros(shape)], dim=dim)


def _place(target: AdapterTarget) -> tuple[int, int]:
    return target.layer, tuple(MODULES.values()).index(target.matrix)


def _listed(names: list[str]) -> str:
    rest = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(sorted(names)[:_MAX_LISTED]) + rest
