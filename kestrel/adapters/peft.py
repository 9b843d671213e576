"""Adapters as the peft library saves them: a folder with adapter_config.json and adapter_model.safetensors.

LoRA is read, for the matrices of attention and MLP, experts and router. What would change the answers and is not done
is refused by the name of its field. Pairs of smaller rank are filled up with zeros to the largest, and a scale that
differs from the others' is multiplied into its `b`.

Experts come in two forms. Each matrix of each expert is a module with a pair of its own; those of gate and up become
one, [a_gate; a_up] and [[b_gate, 0], [0, b_up]]. Or (target_parameters) a layer's experts are two parameters [experts,
out, in]: then a pair [rank · experts, in], expert by expert, and [out, rank · experts], rank by rank, serves them all.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kestrel.adapters.adapter import SIDES, Adapter, AdapterShape, AdapterTarget, ExpertShape, LowRankPair, Side
from kestrel.errors import CheckpointError, shown

if TYPE_CHECKING:
    from torch import Tensor

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
    "mlp.gate": "router",
    "mlp.gate.weight": "router",
}
"""Our own name of each single matrix of a layer."""
_EXPERT_PARTS: Mapping[str, tuple[str, ...]] = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
"""Our own name of each matrix of experts, and the modules of an expert that it is made of."""
_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight")
_WRAPPERS: tuple[str, ...] = ("mlp.experts", "mlp.experts.base_layer")
"""Around the module of the first two, from outside; their tensors are named by these."""
_ORDER = (*dict.fromkeys(MODULES.values()), "gate_up")

_MAX_CONFIG_BYTES = 2**20
_MAX_LISTED = 8
_TENSOR = re.compile(
    r"base_model\.model\.((?:model\.)?layers\.(0|[1-9][0-9]{0,3})\.)((?:self_attn|mlp)\.[\w.]+)\.lora_([AB])\.weight"
)
_EXPERT_MODULE = re.compile(r"mlp\.experts\.(0|[1-9][0-9]{0,3})\.(\w+)")
_PLAIN_PATTERN = re.compile(r"\w+(?:\.\w+)*", re.ASCII)

_READ = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias"}
    | {"init_lora_weights", "target_parameters"}
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
    | {"use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "megatron_config"}
)
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model as it is."""
_FIRST_UPRIGHT = (0, 19, 1)
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
    parameters: tuple[str, ...]
    """Ends of the names of adapted parameters."""
    metadata: Mapping[str, str]

    def rank_of(self, module: str) -> int:
        return next((rank for end, rank in self.ranks.items() if _ends_with(module, end)), self.rank)

    def scale_of(self, module: str) -> float:
        alpha = next((alpha for end, alpha in self.alphas.items() if _ends_with(module, end)), self.alpha)
        return alpha / self._divisor(self.rank_of(module))

    def names(self, module: str) -> bool:
        """Whether the config names a module, or parameter, of the model: `model.layers.0.` and so on."""
        ends = self.parameters if module.endswith(_PARAMETERS) else self.targets or ()
        return any(_ends_with(module, end) for end in ends)

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
        parameters=fields.target_parameters(),
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
        # peft itself writes .*\.gate_up_proj, which is an end too.
        if not isinstance(found, dict) or not all(_PLAIN_PATTERN.fullmatch(_end(key)) for key in found):
            problem = "expected an object whose keys are ends of module names, such as layers.0.mlp.up_proj"
            raise self.refusal(name, found, problem)
        return [(_end(key), value) for key, value in found.items()]

    def target_modules(self) -> tuple[str, ...] | None:
        found = self.raw.get("target_modules")
        if found is None or isinstance(found, str):
            return None
        if not isinstance(found, list) or not all(isinstance(end, str) for end in found):
            raise self.refusal("target_modules", found, "expected a list of names")
        known = [module.rpartition(".")[2] for module in MODULES if module not in _PARAMETERS]
        unknown = sorted({end for end in found if end.rpartition(".")[2] not in known})
        if unknown:
            raise self.refusal("target_modules", unknown, f"adapters of {', '.join(known)} alone are supported")
        return tuple(found)

    def target_parameters(self) -> tuple[str, ...]:
        found, version = self.raw.get("target_parameters") or [], str(self.raw.get("peft_version"))
        if not isinstance(found, list) or not all(isinstance(end, str) for end in found):
            raise self.refusal("target_parameters", found, "expected a list of names")
        if any(not any(_ends_with(end, one) or _ends_with(one, end) for one in _PARAMETERS) for end in found):
            problem = f"adapters of {', '.join(_PARAMETERS)} alone are supported"
            raise self.refusal("target_parameters", found, problem)
        numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
        if found and (numbers is None or tuple(map(int, numbers.groups())) < _FIRST_UPRIGHT):
            problem = f"in files of peft {version} they may be transposed; train the adapter with 0.19.1 or newer"
            raise self.refusal("target_parameters", found, problem)
        return tuple(found)


def _end(pattern: str) -> str:
    return pattern.removeprefix(".*\\.")


def _ends_with(module: str, end: str) -> bool:
    return module == end or module.endswith(f".{end}")


# ---------------------------------------------------------------------- the tensors


_ALL = -1


class _Place(NamedTuple):
    """What a module, or parameter, of peft's is here."""

    target: AdapterTarget
    expert: int | None = None
    """None: it is a single matrix. -1: it is that of all experts."""
    part: int = 0
    """Of the modules of an expert that are one matrix here."""


class _Module(NamedTuple):
    name: str
    factors: dict[Side, Tensor]


_Modules = dict[_Place, _Module]


def peft_adapter(
    path: Path, tensors: Mapping[str, Tensor], config: PeftConfig, shape: AdapterShape | None = None
) -> Adapter:
    """What the tensors are as an adapter. `shape`: of the base model; without it, what may be missing is not known."""
    modules = _modules(path, tensors, config)
    _require_whole(path, modules, config, shape)
    num_experts = _num_experts(path, modules, shape)
    rank = max(-(-config.rank_of(module.name) // _joined(place)) for place, module in modules.items())
    parts: dict[AdapterTarget, dict[_Place, LowRankPair]] = {}
    for place, module in modules.items():
        pair = _upright(path, place, module, config, num_experts)
        parts.setdefault(place.target, {})[place] = _filled_up(pair, rank * _joined(place))
    pairs = {target: _whole(path, target, parts[target], num_experts) for target in sorted(parts, key=_order)}
    return Adapter("peft", rank, pairs, alpha=config.alpha_at(rank), metadata=config.metadata)


def _modules(path: Path, tensors: Mapping[str, Tensor], config: PeftConfig) -> _Modules:
    found: _Modules = {}
    strange: list[str] = []
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        own = "" if match is None else _own_name(match[1], match[3], config)
        place = None if match is None else _place(int(match[2]), own)
        if match is None or place is None:
            strange.append(name)
            continue
        module = found.setdefault(place, _Module(match[1] + own, {}))
        side: Side = "a" if match[4] == "A" else "b"
        if module.name != match[1] + own or side in module.factors:
            raise _twice(path, module.name, match[1] + own)
        module.factors[side] = tensor
    if strange:
        names = ", ".join(module for module in MODULES if module not in _PARAMETERS)
        raise CheckpointError(
            f"{path} holds tensors that are not LoRA factors of {names} or experts of a layer: {_listed(strange)}; "
            "train the adapter on these matrices alone (target_modules, target_parameters)"
        )
    return found


def _twice(path: Path, one: str, other: str) -> CheckpointError:
    return CheckpointError(f"{path} holds {one} and {other}, which are the same matrix; save it again")


def _own_name(layer: str, module: str, config: PeftConfig) -> str:
    """What the config calls it: tensors of a parameter name its module, and which of its wrappers they belong to."""
    if module == "mlp.gate" and config.names(f"{layer}mlp.gate.weight"):
        return "mlp.gate.weight"
    if module not in _WRAPPERS:
        return module
    # Wrapped in the order in which the model has them: the last one is outside.
    adapted = [parameter for parameter in reversed(_PARAMETERS[:2]) if config.names(layer + parameter)]
    return dict(zip(_WRAPPERS, adapted, strict=False)).get(module, module)


def _place(layer: int, module: str) -> _Place | None:
    if module in MODULES:
        return _Place(AdapterTarget(layer, MODULES[module]))
    of_expert = _EXPERT_MODULE.fullmatch(module)
    for matrix, parts in _EXPERT_PARTS.items():
        if module == f"mlp.experts.{matrix}_proj":
            return _Place(AdapterTarget(layer, matrix), _ALL)
        if of_expert is not None and of_expert[2] in parts:
            return _Place(AdapterTarget(layer, matrix), int(of_expert[1]), parts.index(of_expert[2]))
    return None


def _require_whole(path: Path, modules: _Modules, config: PeftConfig, shape: AdapterShape | None) -> None:
    """Both factors of each matrix, and every matrix of the model that the config names."""
    missing = [
        f"base_model.model.{module.name}.lora_{side.upper()}.weight"
        for module in modules.values()
        for side in SIDES
        if side not in module.factors
    ]
    targets = [] if shape is None else [(target, shape.experts_of(target)) for target in shape.targets]
    for (layer, matrix), experts in targets:
        for module in _names(matrix, experts):
            full = f"model.layers.{layer}.{module}"
            if config.names(full) and _place(layer, module) not in modules:
                missing.append(f"base_model.model.{full}.lora_A.weight")
    if missing:
        raise CheckpointError(
            f"{path} lacks tensors of matrices that target_modules or target_parameters name: {_listed(missing)}; copy "
            "the adapter again, or use it with the model it was made for"
        )


def _names(matrix: str, experts: ExpertShape | None) -> list[str]:
    """All that peft may have for a matrix of a layer, or for its parts."""
    if experts is None:
        return [module for module, own in MODULES.items() if own == matrix]
    parts = _EXPERT_PARTS.get(matrix, ())
    each = [f"mlp.experts.{expert}.{part}" for expert in range(experts.num_experts) for part in parts]
    return [f"mlp.experts.{matrix}_proj", *each]


def _joined(place: _Place) -> int:
    """How many matrices lie one above the other in it, as `ExpertShape` has it."""
    return len(_EXPERT_PARTS[place.target.matrix]) if place.expert == _ALL else 1


def _num_experts(path: Path, modules: _Modules, shape: AdapterShape | None) -> int | None:
    """Of the base model, or as many as are seen; None where that is to be found out from a pair of all experts."""
    seen = max((place.expert for place in modules if place.expert is not None), default=_ALL)
    known = None if shape is None else shape.num_experts
    if known is not None and seen >= known:
        raise CheckpointError(
            f"{path} adapts an expert {seen}, but the base model has {known} experts, numbered from 0; use the "
            "adapter with the model it was made for"
        )
    return known or (None if seen == _ALL else seen + 1)


def _upright(path: Path, place: _Place, module: _Module, config: PeftConfig, num_experts: int | None) -> LowRankPair:
    """A module's factors, [experts, rank, in] and [experts, out, rank] of all experts, scaled as the others."""
    a, b, rank = module.factors["a"], module.factors["b"], config.rank_of(module.name)
    count = 1 if place.expert != _ALL else num_experts or max(1, len(a) // rank if a.ndim else 0)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank * count or b.shape[1] != rank * count:
        experts = f" for each of {count} experts" if place.expert == _ALL else ""
        raise CheckpointError(
            f"{path}: the factors of {module.name} are {list(a.shape)} and {list(b.shape)}, and the config gives it "
            f"the rank {rank} (r, rank_pattern){experts}; copy {PEFT_CONFIG} and {PEFT_WEIGHTS} of the same adapter"
        )
    scale = config.scale_of(module.name)
    b = b if scale == config.scale else b.float() * (scale / config.scale)
    if place.expert != _ALL:
        return LowRankPair(a, b)
    return LowRankPair(a.view(count, rank, -1), b.view(len(b), rank, count).permute(2, 0, 1))


def _filled_up(pair: LowRankPair, rank: int) -> LowRankPair:
    lacking = rank - pair.a.shape[-2]
    if lacking == 0:
        return pair
    from torch.nn import functional  # noqa: PLC0415 - the list of adapters needs no torch

    return LowRankPair(functional.pad(pair.a, (0, 0, 0, lacking)), functional.pad(pair.b, (0, lacking)))


def _whole(
    path: Path, target: AdapterTarget, parts: Mapping[_Place, LowRankPair], num_experts: int | None
) -> LowRankPair:
    """The pair of a target; an expert, or a part of it, that the adapter leaves as it is has zeros."""
    first = next(iter(parts.values()))
    if any(place.expert in (None, _ALL) for place in parts):
        if len(parts) > 1:
            raise _twice(path, f"the whole {target.matrix} of layer {target.layer}", "parts of it")
        return first
    if len({(pair.a.shape, pair.a.dtype, pair.b.shape) for pair in parts.values()}) > 1:
        raise CheckpointError(
            f"{path}: the factors of the experts of layer {target.layer} ({', '.join(_EXPERT_PARTS[target.matrix])}) "
            "differ in size or number format; use the adapter with the model it was made for"
        )
    assert num_experts is not None
    (rank, num_in), num_out, joined = first.a.shape, len(first.b), len(_EXPERT_PARTS[target.matrix])
    widest = max((pair.b.dtype for pair in parts.values()), key=lambda dtype: dtype.itemsize)
    a = first.a.new_zeros(num_experts, joined, rank, num_in)
    b = first.b.new_zeros(num_experts, joined, num_out, joined, rank, dtype=widest)
    for (_, expert, part), pair in parts.items():
        a[expert, part], b[expert, part, :, part] = pair.a, pair.b
    return LowRankPair(a.flatten(1, 2), b.flatten(3, 4).flatten(1, 2))


def _order(target: AdapterTarget) -> tuple[int, int]:
    return target.layer, _ORDER.index(target.matrix)


def _listed(names: list[str]) -> str:
    rest = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(sorted(names)[:_MAX_LISTED]) + rest
