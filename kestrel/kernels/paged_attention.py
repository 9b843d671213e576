"""Attention over keys and values that lie in pages.

Contract. `k_cache`, `v_cache`: [num_slots, kv_heads, head_dim], a slot per position, pages one after another. A row's
positions 0..n-1 live in the slots given for it. q: [.., heads, head_dim]; heads is a multiple of kv_heads.
out = softmax(q·kᵀ / sqrt(head_dim) + mask) · v, mask per query: position ≤ own position, or everything given when the
queries are one bidirectional block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def write_kv(k_cache: Tensor, v_cache: Tensor, slots_T: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
    """Put new keys and values into their slots."""
    k_cache.index_copy_(0, slots_T, k_THD.to(k_cache.dtype))
    v_cache.index_copy_(0, slots_T, v_THD.to(v_cache.dtype))


def attend_segment(
    q_QHD: Tensor, k_cache: Tensor, v_cache: Tensor, kv_slots_K: Tensor, mask_QK: Tensor | None, is_causal: bool
) -> Tensor:
    """Queries of one row, over the row's first K positions. `is_causal` needs Q = K; otherwise give the mask."""
    assert q_QHD.ndim == 3
    assert kv_slots_K.ndim == 1
    k_KHD, v_KHD = k_cache[kv_slots_K], v_cache[kv_slots_K]
    out_HQD = F.scaled_dot_product_attention(
        q_QHD.transpose(0, 1)[None],
        k_KHD.transpose(0, 1)[None],
        v_KHD.transpose(0, 1)[None],
        attn_mask=mask_QK,
        is_causal=is_causal,
        enable_gqa=q_QHD.shape[1] != k_KHD.shape[1],
    )[0]
    return out_HQD.transpose(0, 1)


def attend_padded(q_NQHD: Tensor, k_cache: Tensor, v_cache: Tensor, kv_slots_NK: Tensor, mask_NQK: Tensor) -> Tensor:
    """Queries of several rows, padded to the same number; `mask_NQK` is true where a query sees a position."""
    assert q_NQHD.ndim == 4
    assert mask_NQK.shape == (*q_NQHD.shape[:2], kv_slots_NK.shape[1])
    k_NHKD = k_cache[kv_slots_NK].transpose(1, 2)
    v_NHKD = v_cache[kv_slots_NK].transpose(1, 2)
    out_NHQD = F.scaled_dot_product_attention(
        q_NQHD.transpose(1, 2),
        k_NHKD,
        v_NHKD,
        attn_mask=mask_NQK[:, None],
        enable_gqa=q_NQHD.shape[2] != k_NHKD.shape[1],
    )
    return out_NHQD.transpose(1, 2)


def attend_decode(q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, kv_slots_BK: Tensor, mask_BK: Tensor) -> Tensor:
    """One query per row; `mask_BK` is true where a row has a position."""
    assert q_BHD.ndim == 3
    assert kv_slots_BK.shape == mask_BK.shape
    k_BHKD = k_cache[kv_slots_BK].transpose(1, 2)
    v_BHKD = v_cache[kv_slots_BK].transpose(1, 2)
    out_BH1D = F.scaled_dot_product_attention(
        q_BHD[:, :, None],
        k_BHKD,
        v_BHKD,
        attn_mask=mask_BK[:, None, None],
        enable_gqa=q_BHD.shape[1] != k_BHKD.shape[1],
    )
    return out_BH1D[:, :, 0]


def attend_rows(
    q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, pages_BP: Tensor, num_keys_B: Tensor, page_size: int
) -> Tensor:
    """One query per row over its first `num_keys` positions, found through its page table; none of them give zeros."""
    keys_1K = torch.arange(pages_BP.shape[1] * page_size, device=q_BHD.device)[None]
    mask_BK = keys_1K < num_keys_B[:, None]
    # Past a row's end its page table is stale: read its first position there, whose values are finite.
    known_BK = torch.where(mask_BK, keys_1K, 0)
    slots_BK = pages_BP.gather(1, known_BK // page_size) * page_size + known_BK % page_size
    out_BHD = attend_decode(q_BHD, k_cache, v_cache, slots_BK, mask_BK)
    return out_BHD.masked_fill((num_keys_B == 0)[:, None, None], 0.0)


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Queries are the last `num_queries` of `num_keys` positions; each sees itself and what came before."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
