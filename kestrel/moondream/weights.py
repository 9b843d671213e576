"""From a checkpoint to a Moondream: names of either kind, optional parts, quantised forms, all checked first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kestrel.models.checkpoint_files import Checkpoint, TensorInfo
from kestrel.models.progress import Progress, no_progress
from kestrel.models.strict_loading import LoadPlan, Source, check_plan, load_parameters, plain_source
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.quantised_weights import (
    int4_shapes,
    kv_scale_layer,
    refuse_mlx_int4,
    write_fp8_experts,
    write_int4_groups,
)
from kestrel.moondream.weight_names import FOURIER_TABLES, has_pt_name, to_hub_name

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
) -> MoondreamModel:
    """A model on `device` in `dtype`; the region's Fourier tables stay fp32.

    Whether the region has a LayerNorm is the checkpoint's to say: `model.config` records it. Scales of a float8 KV
    cache are accepted and not applied; `read_kv_scales` returns them. `hint` ends the message of a misfit.
    """
    device = torch.device(device)
    refuse_mlx_int4((to_hub_name(name) for name in checkpoint.tensors), str(checkpoint.path))
    model = build_on_meta(config.with_region_ln(has_region_ln(checkpoint.tensors)))
    plan = plan_load(checkpoint.tensors, model)
    check_plan(plan, model, str(checkpoint.path), hint)
    load_parameters(model, checkpoint, plan, device, lambda name: stored_dtype(name, dtype), progress or no_progress)
    model.reset_buffers(device)
    return model.eval()


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
    parameters = dict(model.named_parameters())
    sources: dict[str, Source] = {}
    for packed_name in [name for name in names if name.endswith(_PACKED)]:
        name = packed_name.removesuffix(".packed")
        if name not in parameters:
            continue
        parts = [names.pop(f"{name}.{part}", None) for part in ("packed", "scale", "zero_point")]
        stored = tuple(part for part in parts if part is not None)
        shape = tuple(parameters[name].shape)
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
