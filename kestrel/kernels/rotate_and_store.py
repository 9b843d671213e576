"""What happens between the fused projection and attention, in one operation.

A row of `qkv_TF` is [q heads | k heads | v heads]. Queries and values are scaled per head where factors are given
(`kestrel.kernels.tau`), queries and keys are normalised per head where weights are given and rotated by their positions
(`kestrel.kernels.rope`), keys and values go to their slots of the cache, queries come back. Every step rounds to the
dtype of `qkv_TF`.

Caches of float8 receive k / k_scale and v / v_scale, limited to what the type can hold.
"""

from __future__ import annotations

from torch import Tensor

from kestrel.kernels.paged_attention import write_kv
from kestrel.kernels.rms_norm import rms_norm
from kestrel.kernels.rope import apply_rope
from kestrel.kernels.tau import scale_heads


def rotate_and_store(
    qkv_TF: Tensor,
    n_heads: int,
    n_kv_heads: int,
    cos_table: Tensor | None,
    sin_table: Tensor | None,
    positions_T: Tensor,
    slots_T: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tau: tuple[Tensor, Tensor] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """q [T, heads, head_dim], contiguous. Tables: [num_positions, rotary_dim / 2], fp32; without them nothing is
    rotated. `tau`: factors [T, heads] of queries and [T, kv_heads] of values, fp32. `norms`: weights [head_dim] of an
    RMS norm of each query and key before the rotation, and its eps."""
    assert qkv_TF.ndim == 2
    heads = qkv_TF.unflatten(1, (n_heads + 2 * n_kv_heads, -1))
    q_THD, k_THD, v_THD = heads.split([n_heads, n_kv_heads, n_kv_heads], dim=1)
    if tau is not None:
        q_THD, v_THD = scale_heads(q_THD, tau[0]), scale_heads(v_THD, tau[1])
    if norms is not None:
        q_weight_D, k_weight_D, eps = norms
        q_THD, k_THD = rms_norm(q_THD, q_weight_D, eps), rms_norm(k_THD, k_weight_D, eps)
    if cos_table is not None and sin_table is not None:
        cos_TR, sin_TR = cos_table[positions_T], sin_table[positions_T]
        q_THD, k_THD = apply_rope(q_THD, cos_TR, sin_TR), apply_rope(k_THD, cos_TR, sin_TR)
    write_kv(k_cache, v_cache, slots_T, k_THD, v_THD, k_scale, v_scale)
    return q_THD.contiguous()
