"""The projection to queries, keys and values for a handful of rows, with what follows it: rotation and storing."""

from __future__ import annotations

from torch import Tensor

from kestrel.kernels.linear import small_linear
from kestrel.kernels.rotary import rotate_and_store


def project_and_store(
    x_MD: Tensor,
    weight_FD: Tensor,
    bias_F: Tensor | None,
    scale_F: Tensor | None,
    norm: tuple[Tensor, float] | None,
    n_heads: int,
    n_kv_heads: int,
    cos_table: Tensor | None,
    sin_table: Tensor | None,
    positions_M: Tensor,
    slots_M: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """`rotate_and_store` of `small_linear`; q [M, heads, head_dim], contiguous."""
    qkv_MF = small_linear(x_MD, weight_FD, bias_F, scale_F=scale_F, norm=norm)
    return rotate_and_store(
        qkv_MF,
        n_heads,
        n_kv_heads,
        cos_table,
        sin_table,
        positions_M,
        slots_M,
        k_cache,
        v_cache,
        None,
        k_scale,
        v_scale,
    )
