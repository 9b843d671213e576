"""Attention of chunks of queries over keys and values that lie in pages: what a step of prefill does for all its rows.

Contract. Chunk c owns the queries first[c] .. first[c] + count[c] - 1 of q_THD; query i of them stands at position
start[c] + i of its row. It sees the positions 0 .. start[c] + i, or, where `bidirectional` is 1 (a picture), all of
0 .. start[c] + count[c] - 1. Position p lies in slot pages[c, p // page_size] · page_size + p % page_size of k_cache
and v_cache, [num_slots, kv_heads, head_dim]; the chunk's own keys and values have been stored. What a chunk's pages
hold past its last position does not matter and may be no page at all.

    out = softmax(q·kᵀ / sqrt(head_dim) + mask) · v

heads is a multiple of kv_heads. Caches of float8 hold k / k_scale and v / v_scale. No chunk is longer than `max_count`,
which is known without asking the device, so that a captured graph can be replayed for other chunks. Queries that belong
to no chunk leave their row of the result as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kestrel.kernels.paged_attention import widened


def attend_chunks(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages_CP: Tensor,
    first_C: Tensor,
    count_C: Tensor,
    start_C: Tensor,
    bidirectional_C: Tensor,
    page_size: int,
    max_count: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out_THD: Tensor | None = None,
) -> Tensor:
    """Queries of several chunks over their own pages. `out_THD` receives it."""
    assert q_THD.ndim == 3
    assert pages_CP.shape[0] == first_C.shape[0] == count_C.shape[0] == start_C.shape[0] == bidirectional_C.shape[0]
    out_THD = torch.zeros_like(q_THD) if out_THD is None else out_THD
    if pages_CP.shape[0] == 0 or max_count == 0:
        return out_THD
    slots_CK, stored_CK = _slots(pages_CP, start_C + count_C, page_size)
    k_CKHD, v_CKHD = (
        widened(cache, slots_CK, scale, q_THD.dtype).masked_fill(~stored_CK[:, :, None, None], 0.0)
        for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
    )
    queries_Q = torch.arange(max_count, device=q_THD.device)
    # Past a chunk's end stands a row that is added behind the others and dropped again.
    rows_CQ = torch.where(queries_Q < count_C[:, None], first_C[:, None] + queries_Q, q_THD.shape[0])
    out_CHQD = F.scaled_dot_product_attention(
        _with_one_more(q_THD)[rows_CQ].transpose(1, 2),
        k_CKHD.transpose(1, 2),
        v_CKHD.transpose(1, 2),
        attn_mask=_visible(queries_Q, start_C, bidirectional_C, stored_CK)[:, None],
        enable_gqa=q_THD.shape[1] != k_cache.shape[1],
    )
    result = _with_one_more(out_THD)
    result[rows_CQ] = out_CHQD.transpose(1, 2)
    return out_THD.copy_(result[:-1])


def _slots(pages_CP: Tensor, num_keys_C: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Slots of all positions that the pages have room for, and whether the row has got so far; slot 0 where not."""
    keys_1K = torch.arange(pages_CP.shape[1] * page_size, device=pages_CP.device)[None]
    stored_CK = keys_1K < num_keys_C[:, None]
    pages_CK = pages_CP.repeat_interleave(page_size, dim=1)
    return torch.where(stored_CK, pages_CK * page_size + keys_1K % page_size, 0), stored_CK


def _visible(queries_Q: Tensor, start_C: Tensor, bidirectional_C: Tensor, stored_CK: Tensor) -> Tensor:
    """[C, Q, K], whether a query sees a position."""
    keys_K = torch.arange(stored_CK.shape[1], device=stored_CK.device)
    passed_CQK = keys_K <= (start_C[:, None] + queries_Q)[:, :, None]
    return stored_CK[:, None] & (passed_CQK | (bidirectional_C != 0)[:, None, None])


def _with_one_more(x_THD: Tensor) -> Tensor:
    return F.pad(x_THD, (0, 0, 0, 0, 0, 1))
