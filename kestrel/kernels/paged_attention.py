"""Attention over keys and values that lie in pages.

Contract. `k_cache`, `v_cache`: [num_slots, kv_heads, head_dim], a slot per position, pages one after another. A row's
positions 0..n-1 live in the slots given for it. q: [.., heads, head_dim]; heads is a multiple of kv_heads.
out = softmax(q·kᵀ / sqrt(head_dim) + mask) · v, mask per query: position ≤ own position, or everything given when the
queries are one bidirectional block.

Caches of float8 hold k / k_scale and v / v_scale, one scale each for a whole layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def write_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Put new keys and values into their slots; float8 limited to what the type can hold."""
    for cache, x_THD, scale in ((k_cache, k_THD, k_scale), (v_cache, v_THD, v_scale)):
        _as_bytes(cache).index_copy_(0, slots_T, _as_bytes(_for_cache(x_THD, cache.dtype, scale)))


def _for_cache(x_THD: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if dtype.itemsize > 1:
        return x_THD.to(dtype)
    limit = torch.finfo(dtype).max
    return (x_THD.float() / scale).clamp(-limit, limit).to(dtype)


def attend_segment(
    q_QHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_slots_K: Tensor,
    mask_QK: Tensor | None,
    is_causal: bool,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Queries of one row, over the row's first K positions. `is_causal` needs Q = K; otherwise give the mask."""
    assert q_QHD.ndim == 3
    assert kv_slots_K.ndim == 1
    k_KHD = widened(k_cache, kv_slots_K, k_scale, q_QHD.dtype)
    v_KHD = widened(v_cache, kv_slots_K, v_scale, q_QHD.dtype)
    out_HQD = F.scaled_dot_product_attention(
        q_QHD.transpose(0, 1)[None],
        k_KHD.transpose(0, 1)[None],
        v_KHD.transpose(0, 1)[None],
        attn_mask=mask_QK,
        is_causal=is_causal,
        enable_gqa=q_QHD.shape[1] != k_KHD.shape[1],
    )[0]
    return out_HQD.transpose(0, 1)


def attend_padded(
    q_NQHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_slots_NK: Tensor,
    mask_NQK: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Queries of several rows, padded to the same number; `mask_NQK` is true where a query sees a position."""
    assert q_NQHD.ndim == 4
    assert mask_NQK.shape == (*q_NQHD.shape[:2], kv_slots_NK.shape[1])
    k_NHKD = widened(k_cache, kv_slots_NK, k_scale, q_NQHD.dtype).transpose(1, 2)
    v_NHKD = widened(v_cache, kv_slots_NK, v_scale, q_NQHD.dtype).transpose(1, 2)
    out_NHQD = F.scaled_dot_product_attention(
        q_NQHD.transpose(1, 2),
        k_NHKD,
        v_NHKD,
        attn_mask=mask_NQK[:, None],
        enable_gqa=q_NQHD.shape[2] != k_NHKD.shape[1],
    )
    return out_NHQD.transpose(1, 2)


def attend_rows(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages_BP: Tensor,
    num_keys_B: Tensor,
    page_size: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out_BHD: Tensor | None = None,
) -> Tensor:
    """One query per row over the row's first `num_keys` positions, found through its pages. `out_BHD` receives it.

    Position p of row b lies in slot pages[b, p // page_size] · page_size + p % page_size. A row of no keys gives zeros;
    what its pages hold does not matter, nor what other rows' pages hold past their last key.
    """
    assert q_BHD.ndim == 3
    assert pages_BP.shape[0] == num_keys_B.shape[0] == q_BHD.shape[0]
    keys_1K = torch.arange(pages_BP.shape[1] * page_size, device=q_BHD.device)[None]
    mask_BK = keys_1K < num_keys_B[:, None]
    pages_BK = pages_BP.repeat_interleave(page_size, dim=1)
    slots_BK = torch.where(mask_BK, pages_BK * page_size + keys_1K % page_size, 0)
    k_BKHD, v_BKHD = (
        widened(k_cache, slots_BK, k_scale, q_BHD.dtype),
        widened(v_cache, slots_BK, v_scale, q_BHD.dtype),
    )
    out_BH1D = F.scaled_dot_product_attention(
        q_BHD[:, :, None],
        k_BKHD.transpose(1, 2),
        v_BKHD.masked_fill(~mask_BK[:, :, None, None], 0.0).transpose(1, 2),
        attn_mask=mask_BK[:, None, None],
        enable_gqa=q_BHD.shape[1] != k_cache.shape[1],
    )
    seen_BHD = torch.where(num_keys_B[:, None, None] > 0, out_BH1D[:, :, 0], 0.0)
    return seen_BHD if out_BHD is None else out_BHD.copy_(seen_BHD)


def widened(cache: Tensor, slots_BK: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What lies in the slots, as numbers of `dtype`; a scale is for a cache of another dtype."""
    # Whole rows at a time: an index of tensors copies number by number on a CPU.
    taken = _as_bytes(cache).index_select(0, slots_BK.flatten()).unflatten(0, slots_BK.shape)
    if cache.dtype == dtype:
        return taken
    return (taken.view(cache.dtype).to(torch.float32) * scale).to(dtype)


def _as_bytes(x: Tensor) -> Tensor:
    """float8 as bytes, which can be indexed on every device; other numbers as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Queries are the last `num_queries` of `num_keys` positions; each sees itself and what came before."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
