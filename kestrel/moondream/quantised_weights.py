"""Quantised forms of the weights, dequantised while loading, and the scales kept for a quantised KV cache."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kestrel.errors import CheckpointError
from kestrel.models.checkpoint_files import Checkpoint
from kestrel.models.contract import KvScale
from kestrel.moondream.weight_names import to_hub_name

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
