"""From a checkpoint to a Moondream: names of either kind, optional parts, quantised forms, all checked first.

Hub files use `model.` and this engine's own parameter names; the publisher's .pt files (and Moondream 3.1) use older
module names and keep the two Fourier tables transposed. `{i}` stands for a block number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel.errors import CheckpointError
from kestrel.models.checkpoint_files import Checkpoint, TensorInfo
from kestrel.models.contract import KvScale
from kestrel.models.family import LoadedModel, Progress, no_progress
from kestrel.models.strict_loading import LoadPlan, Source, check_plan, load_parameters, plain_source, whole_shapes
from kestrel.moondream.config import MoondreamConfig, TextConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.releases import FAMILY
from kestrel.parallel.ranks import ALONE, Ranks, refuse_uneven

_MODULES = (
    ("text.blocks.{i}.ln", "text_model.transformer.h.{i}.ln"),
    ("text.blocks.{i}.attn.qkv", "text_model.transformer.h.{i}.mixer.Wqkv"),
    ("text.blocks.{i}.attn.proj", "text_model.transformer.h.{i}.mixer.out_proj"),
    ("text.blocks.{i}.mlp.fc1", "text_model.transformer.h.{i}.mlp.fc1"),
    ("text.blocks.{i}.mlp.fc2", "text_model.transformer.h.{i}.mlp.fc2"),
    ("text.blocks.{i}.mlp.router", "text_model.transformer.h.{i}.gate"),
    ("text.post_ln", "text_model.lm_head.ln"),
    ("text.lm_head", "text_model.lm_head.linear"),
    ("vision.patch_emb", "vision_encoder.encoder.model.visual.patch_embed.linear"),
    ("vision.blocks.{i}.ln1", "vision_encoder.encoder.model.visual.blocks.{i}.norm1"),
    ("vision.blocks.{i}.ln2", "vision_encoder.encoder.model.visual.blocks.{i}.norm2"),
    ("vision.blocks.{i}.attn.qkv", "vision_encoder.encoder.model.visual.blocks.{i}.attn.qkv"),
    ("vision.blocks.{i}.attn.proj", "vision_encoder.encoder.model.visual.blocks.{i}.attn.proj"),
    ("vision.blocks.{i}.mlp.fc1", "vision_encoder.encoder.model.visual.blocks.{i}.mlp.fc1"),
    ("vision.blocks.{i}.mlp.fc2", "vision_encoder.encoder.model.visual.blocks.{i}.mlp.fc2"),
    ("vision.post_ln", "vision_encoder.encoder.model.visual.norm"),
    ("vision.proj_mlp.fc1", "vision_encoder.projection.mlp.fc1"),
    ("vision.proj_mlp.fc2", "vision_encoder.projection.mlp.fc2"),
    ("region.coord_encoder", "region_model.coordinate_encoder"),
    ("region.size_encoder", "region_model.size_encoder"),
    ("region.coord_decoder.fc1", "region_model.coordinate_decoder.fc1"),
    ("region.coord_decoder.fc2", "region_model.coordinate_decoder.fc2"),
    ("region.size_decoder.fc1", "region_model.size_decoder.fc1"),
    ("region.size_decoder.fc2", "region_model.size_decoder.fc2"),
    ("region.coord_decoder", "region_model.coordinate_head"),
    ("region.size_decoder", "region_model.size_head"),
    ("region.ln", "region_model.ln"),
)
"""Modules with a weight and a bias."""

_EXPERTS = (
    ("text.blocks.{i}.mlp.fc1.weight", "text_model.transformer.h.{i}.mlp.experts.weight"),
    ("text.blocks.{i}.mlp.fc2.weight", "text_model.transformer.h.{i}.mlp.output_experts.weight"),
)
"""Three-dimensional in hub files, where dense and expert matrices share their names."""

_TENSORS = (
    ("text.wte", "text_model.transformer.embd.wte.weight"),
    ("text.blocks.{i}.attn.tau.wq", "text_model.transformer.h.{i}.tau_wq"),
    ("text.blocks.{i}.attn.tau.wv", "text_model.transformer.h.{i}.tau_wv"),
    ("text.blocks.{i}.attn.tau.alpha", "text_model.transformer.h.{i}.tau_alpha"),
    ("text.blocks.{i}.attn.tau.wqwv", "text_model.transformer.h.{i}.tau_wqwv"),
    ("text.blocks.{i}.moe_quant.up_scale", "text_model.transformer.h.{i}.moe_quant.up_scale"),
    ("text.blocks.{i}.moe_quant.down_scale", "text_model.transformer.h.{i}.moe_quant.down_scale"),
    ("text.blocks.{i}.kv_quantizer.k_scale", "text_model.transformer.h.{i}.kv_quantizer.k_scale"),
    ("text.blocks.{i}.kv_quantizer.v_scale", "text_model.transformer.h.{i}.kv_quantizer.v_scale"),
    ("vision.pos_emb", "vision_encoder.encoder.model.visual.pos_embed"),
    ("region.coord_features", "region_model.coordinate_features.weight"),
    ("region.size_features", "region_model.size_features.weight"),
)

FOURIER_TABLES = ("region.coord_features", "region.size_features")
"""Kept in fp32, and stored transposed under their .pt names."""

_PT_PREFIXES = ("text_model.", "vision_encoder.", "region_model.")


def has_pt_name(name: str) -> bool:
    return _plain(name).startswith(_PT_PREFIXES)


def to_hub_name(name: str) -> str:
    """The parameter name for a tensor name of either kind; an unknown name comes back without its wrappings."""
    plain = _plain(name)
    if not plain.startswith(_PT_PREFIXES):
        return plain.removeprefix("model.")
    for pattern, hub in _PT_TO_HUB:
        match = pattern.fullmatch(plain)
        if match:
            return _fill(hub, match)
    return plain


def to_pt_name(hub_name: str, num_dims: int) -> str:
    """The .pt name of a parameter. Expert matrices have three dimensions."""
    table = _EXPERTS_TO_PT if num_dims == 3 and hub_name.startswith("text.") else _HUB_TO_PT
    for pattern, pt in table:
        match = pattern.fullmatch(hub_name)
        if match:
            return _fill(pt, match)
    raise ValueError(f"{hub_name!r} has no .pt name")


def _plain(name: str) -> str:
    """Without what torch.compile puts into names."""
    return name.replace("._orig_mod", "").removeprefix("_orig_mod.")


def _fill(template: str, match: re.Match[str]) -> str:
    groups = match.groupdict()
    return template.replace("{i}", groups.get("i", "")) + groups.get("tail", "")


def _pattern(template: str, tail: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)") + tail)


def _patterns(source: int, target: int) -> list[tuple[re.Pattern[str], str]]:
    tail = r"(?P<tail>\.(weight|bias)(\.packed|\.scale|\.zero_point)?)"
    modules = [(_pattern(pair[source], tail), pair[target]) for pair in _MODULES]
    return modules + [(_pattern(pair[source], ""), pair[target]) for pair in _TENSORS]


_EXPERTS_TO_PT = [(_pattern(hub, ""), pt) for hub, pt in _EXPERTS]
_HUB_TO_PT = _patterns(0, 1)
_PT_TO_HUB = _patterns(1, 0) + [(_pattern(pt, ""), hub) for hub, pt in _EXPERTS]


# ---------------------------------------------------------------------- quantised forms, and scales of a KV cache


INT4_GROUP = 128
"""Consecutive elements of a matrix that share one scale and zero point."""

_KV_SCALE = re.compile(r"text\.blocks\.(\d+)\.kv_quantizer\.([kv])_scale")
_MLX_INT4 = re.compile(r".*\.fc[12]_(q|scales|biases)|vision\.proj_fc[12]\..*|.*\.scales")


def kv_scale_layer(hub_name: str) -> int | None:
    """The layer that a KV scale belongs to; None for any other tensor."""
    match = _KV_SCALE.fullmatch(hub_name)
    return None if match is None else int(match[1])


def read_kv_scales(checkpoint: Checkpoint) -> Mapping[int, KvScale]:
    """KV scales by layer; empty when the checkpoint has none. A float8 cache needs every layer to be present."""
    found: dict[int, dict[str, float]] = {}
    for name in checkpoint.tensors:
        match = _KV_SCALE.fullmatch(to_hub_name(name))
        if match:
            found.setdefault(int(match[1]), {})[match[2]] = _positive_scalar(checkpoint, name)
    halves = sorted(layer for layer, scales in found.items() if len(scales) != 2)
    if halves:
        raise CheckpointError(
            f"{checkpoint.path}: layers {halves} have only one of kv_quantizer.k_scale and v_scale; both are needed"
        )
    return {layer: KvScale(scales["k"], scales["v"]) for layer, scales in sorted(found.items())}


def refuse_mlx_int4(hub_names: Iterable[str], label: str) -> None:
    """MLX packs four-bit weights in its own way, which this engine does not read."""
    for name in hub_names:
        if _MLX_INT4.fullmatch(name):
            raise CheckpointError(
                f"{label} holds MLX 4-bit weights ({name}), which are not supported; "
                "use the bfloat16 or float8 checkpoint of the model"
            )


def write_fp8_experts(target: Tensor, tensors: Sequence[Tensor]) -> None:
    """target[e, row] = weight[e, row] · scale[e, row], one expert at a time so that little is held in fp32."""
    weight, scale = tensors
    for expert in range(target.shape[0]):
        scale_rows = scale[expert].to(target.device, torch.float32)[:, None]
        target[expert].copy_(weight[expert].to(target.device).float() * scale_rows)


def int4_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shapes of `packed`, and of `scale` and `zero_point`, for a matrix; None if it cannot be packed."""
    count = math.prod(shape)
    if count == 0 or count % (2 * INT4_GROUP):
        return None
    return (count // (2 * INT4_GROUP), INT4_GROUP), (count // INT4_GROUP, 1)


def write_int4_groups(target: Tensor, tensors: Sequence[Tensor]) -> None:
    """target = (nibble - zero_point) · scale. High nibbles hold the first half of the groups, low ones the second."""
    packed, scale, zero_point = (tensor.to(target.device) for tensor in tensors)
    nibbles = torch.cat([packed >> 4, packed & 15]).float()
    target.copy_(((nibbles - zero_point.float()) * scale.float()).view(target.shape))


def _positive_scalar(checkpoint: Checkpoint, name: str) -> float:
    if math.prod(checkpoint.tensors[name].shape) != 1:
        shape = list(checkpoint.tensors[name].shape)
        raise CheckpointError(f"{checkpoint.path}: {name} must be a single number (its shape is {shape})")
    value = float(checkpoint.read(name))
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"{checkpoint.path}: {name} must be positive and finite (got {value})")
    return value


# ---------------------------------------------------------------------- loading


_FUSED_TAU = ".attn.tau.wqwv"
_PACKED = ".weight.packed"
_EXPERT_SCALES = {"fc1": "up_scale", "fc2": "down_scale"}


def load_moondream(
    checkpoint: Checkpoint,
    config: MoondreamConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
    hint: str = "",
    ranks: Ranks = ALONE,
) -> MoondreamModel:
    """A model on `device` in `dtype`; the region's Fourier tables stay fp32.

    Whether the region has a LayerNorm is the checkpoint's to say: `model.config` records it. Scales of a float8 KV
    cache are accepted and not applied; `read_kv_scales` returns them. `hint` ends the message of a misfit.
    """
    device = torch.device(device)
    refuse_mlx_int4((to_hub_name(name) for name in checkpoint.tensors), str(checkpoint.path))
    _check_ranks(config.text, ranks)
    model = build_on_meta(config.with_region_ln(has_region_ln(checkpoint.tensors)))
    model.split(ranks)
    plan = plan_load(checkpoint.tensors, model)
    check_plan(plan, model, str(checkpoint.path), hint)
    load_parameters(model, checkpoint, plan, device, lambda name: stored_dtype(name, dtype), progress or no_progress)
    model.reset_buffers(device)
    return model.eval()


def _check_ranks(text: TextConfig, ranks: Ranks) -> None:
    counts = {"text.n_heads": text.n_heads, "text.ff_dim": text.ff_dim}
    if text.moe is not None:
        counts["text.moe.expert_inner_dim"] = text.moe.expert_inner_dim
    refuse_uneven(ranks.size, counts, {"text.n_kv_heads": text.n_kv_heads})


def build_on_meta(config: MoondreamConfig) -> MoondreamModel:
    """Shapes only, no memory."""
    with torch.device("meta"):
        return MoondreamModel(config)


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type a parameter gets in a model of type `dtype`."""
    return torch.float32 if name in FOURIER_TABLES else dtype


def has_region_ln(tensors: Mapping[str, TensorInfo]) -> bool:
    return any(to_hub_name(name) in ("region.ln.weight", "region.ln.bias") for name in tensors)


def plan_load(tensors: Mapping[str, TensorInfo], model: MoondreamModel) -> LoadPlan:
    """A source for every parameter that the headers offer, and what is left over."""
    problems: list[str] = []
    names = _by_hub_name(tensors, problems)
    sources = _fused_tau(names, tensors) | _fp8_experts(names, tensors, problems)
    sources |= _int4_matrices(names, tensors, problems, model)
    unexpected: list[str] = []
    parameters = dict(model.named_parameters())
    for name, stored in names.items():
        layer = kv_scale_layer(name)
        if layer is not None and layer < len(model.text.blocks):
            continue
        if name not in parameters:
            unexpected.append(stored)
        elif name in sources:
            problems.append(f"{stored} and {sources[name].names[0]} both give {name}; keep one of them")
        elif name in FOURIER_TABLES and has_pt_name(stored):
            sources[name] = Source((stored,), tensors[stored].shape[::-1], _copy_transposed)
        else:
            sources[name] = plain_source(stored, tensors[stored], problems)
    return LoadPlan(sources, unexpected, problems)


def _by_hub_name(tensors: Mapping[str, TensorInfo], problems: list[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for stored in tensors:
        name = to_hub_name(stored)
        if name in names:
            problems.append(f"{stored} and {names[name]} both give {name}; keep one of them")
        names[name] = stored
    return names


def _fused_tau(names: dict[str, str], tensors: Mapping[str, TensorInfo]) -> dict[str, Source]:
    """wq and wv stored as one tensor, the rows of wq first."""
    sources: dict[str, Source] = {}
    for name in [name for name in names if name.endswith(_FUSED_TAU)]:
        stored = names.pop(name)
        rows, *rest = tensors[stored].shape or (0,)
        base = name.removesuffix("wqwv")
        sources[f"{base}wq"] = Source((stored,), (rows // 2, *rest), _copy_first_half)
        sources[f"{base}wv"] = Source((stored,), (rows - rows // 2, *rest), _copy_second_half)
    return sources


def _fp8_experts(names: dict[str, str], tensors: Mapping[str, TensorInfo], problems: list[str]) -> dict[str, Source]:
    """Expert matrices in float8 with one fp32 scale per expert and output row."""
    sources: dict[str, Source] = {}
    for name in [name for name, stored in names.items() if _is_fp8_experts(tensors[stored])]:
        stored = names.pop(name)
        shape = tensors[stored].shape
        block, _, matrix = name.removesuffix(".weight").rpartition(".mlp.")
        scale = names.pop(f"{block}.moe_quant.{_EXPERT_SCALES.get(matrix)}", None)
        if scale is None:
            problems.append(f"{stored} is float8 without its scales (moe_quant); use a complete checkpoint")
            sources[name] = Source((stored,), shape)
            continue
        if tensors[scale].shape != shape[:2]:
            problems.append(f"{scale} is {list(tensors[scale].shape)}, expected {list(shape[:2])}")
        sources[name] = Source((stored, scale), shape, write_fp8_experts)
    return sources


def _int4_matrices(
    names: dict[str, str], tensors: Mapping[str, TensorInfo], problems: list[str], model: MoondreamModel
) -> dict[str, Source]:
    """Matrices as packed groups with scales and zero points. Only the model knows their shape."""
    parameters = whole_shapes(model)
    sources: dict[str, Source] = {}
    for packed_name in [name for name in names if name.endswith(_PACKED)]:
        name = packed_name.removesuffix(".packed")
        if name not in parameters:
            continue
        parts = [names.pop(f"{name}.{part}", None) for part in ("packed", "scale", "zero_point")]
        stored = tuple(part for part in parts if part is not None)
        shape = parameters[name]
        shapes = int4_shapes(shape)
        found = [tensors[part].shape for part in stored]
        if shapes is None or found != [shapes[0], shapes[1], shapes[1]]:
            problems.append(
                f"{stored[0]} with its scale and zero_point has shapes {[list(s) for s in found]}, "
                f"which are not 4-bit groups of a {list(shape)} matrix"
            )
        elif tensors[stored[0]].dtype != torch.uint8:
            problems.append(f"{stored[0]} must be uint8 (it is {tensors[stored[0]].dtype})")
        sources[name] = Source(stored, shape, write_int4_groups)
    return sources


def _is_fp8_experts(info: TensorInfo) -> bool:
    return info.dtype == torch.float8_e4m3fn and len(info.shape) == 3


def _copy_transposed(target: Tensor, tensors: Sequence[Tensor]) -> None:
    target.copy_(tensors[0].T)


def _copy_first_half(target: Tensor, tensors: Sequence[Tensor]) -> None:
    target.copy_(tensors[0][: target.shape[0]])


def _copy_second_half(target: Tensor, tensors: Sequence[Tensor]) -> None:
    target.copy_(tensors[0][-target.shape[0] :])


# ---------------------------------------------------------------------- in memory


@dataclass(frozen=True)
class LoadedMoondream(LoadedModel[MoondreamModel, MoondreamConfig]):
    family = FAMILY
