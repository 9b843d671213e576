"""Attention over keys and values that lie in pages.

Contract. `k_cache`, `v_cache`: [num_pages, page_size, kv_heads, head_dim], in either order of `as_pages`. A slot per
position: page · page_size + offset. A row's positions 0..n-1 live in the slots given for it. q: [.., heads, head_dim];
heads is a multiple of kv_heads.
out = softmax(q·kᵀ / sqrt(head_dim) + mask) · v, mask per query: position ≤ own position, or everything given when the
queries are one bidirectional block.

Caches of float8 hold k / k_scale and v / v_scale, one scale each for a whole layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def as_pages(memory_PSHD: Tensor) -> Tensor:
    """This memory as a cache [.., num_pages, page_size, kv_heads, head_dim] in the order that suits its device.

    On a GPU a page lies head by head, since programs of the kernels read one head each; on a CPU position by position,
    since torch gathers whole positions.
    """
    if memory_PSHD.device.type == "cpu":
        return memory_PSHD
    page_size, kv_heads, head_dim = memory_PSHD.shape[-3:]
    return memory_PSHD.view(*memory_PSHD.shape[:-3], kv_heads, page_size, head_dim).transpose(-3, -2)


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
        numbers, new = _as_bytes(cache), _as_bytes(_for_cache(x_THD, cache.dtype, scale))
        if cache.is_contiguous():
            numbers.flatten(0, 1).index_copy_(0, slots_T, new)
        else:
            numbers[slots_T // cache.shape[1], slots_T % cache.shape[1]] = new


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
    page_size = k_cache.shape[1]
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
        enable_gqa=q_BHD.shape[1] != k_cache.shape[2],
    )
    seen_BHD = torch.where(num_keys_B[:, None, None] > 0, out_BH1D[:, :, 0], 0.0)
    return seen_BHD if out_BHD is None else out_BHD.copy_(seen_BHD)


def widened(cache: Tensor, slots_BK: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What lies in the slots, as numbers of `dtype`; a scale is for a cache of another dtype."""
    numbers = _as_bytes(cache)
    if cache.is_contiguous():
        # Whole rows at a time: an index of tensors copies number by number on a CPU.
        taken = numbers.flatten(0, 1).index_select(0, slots_BK.flatten()).view(*slots_BK.shape, *cache.shape[2:])
    else:
        taken = numbers[slots_BK // cache.shape[1], slots_BK % cache.shape[1]]
    if cache.dtype == dtype:
        return taken
    return (taken.view(cache.dtype).to(torch.float32) * scale).to(dtype)


def _as_bytes(x: Tensor) -> Tensor:
    """float8 as bytes, which can be indexed on every device; other numbers as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Queries are the last `num_queries` of `num_keys` positions; each sees itself and what came before."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


# ---------------------------------------------------------------------- chunks of queries
# Attention of chunks of queries over keys and values that lie in pages: what a step of prefill does for all its rows.
#
# Contract. Chunk c owns the queries first[c] .. first[c] + count[c] - 1 of q_THD; query i of them stands at position
# start[c] + i of its row. It sees the positions 0 .. start[c] + i, or, where `bidirectional` is 1 (a picture), all of 0
# .. start[c] + count[c] - 1. Position p lies in slot pages[c, p // page_size] · page_size + p % page_size of k_cache
# and v_cache; the chunk's own keys and values have been stored. What a chunk's pages hold past its last position does
# not matter and may be no page at all.
#
#     out = softmax(q·kᵀ / sqrt(head_dim) + mask) · v
#
# heads is a multiple of kv_heads. Caches of float8 hold k / k_scale and v / v_scale. No chunk is longer than
# `max_count`, which is known without asking the device, so that a captured graph can be replayed for other chunks.
# Queries that belong to no chunk leave their row of the result as it is.


def attend_chunks(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages_CP: Tensor,
    first_C: Tensor,
    count_C: Tensor,
    start_C: Tensor,
    bidirectional_C: Tensor,
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
    slots_CK, stored_CK = _slots(pages_CP, start_C + count_C, k_cache.shape[1])
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
        enable_gqa=q_THD.shape[1] != k_cache.shape[2],
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


# ---------------------------------------------------------------------- rows with a shared prefix
# Attention of several rows that share the beginning of their contexts, such as questions about one picture.
#
# The same as `attend_padded` over all keys, but the shared ones are read once instead of
# once a row, and multiplied with the queries of all rows together. On a CPU, where reading keys and values is most of a
# decoding step, that is most of what a row costs.
#
#     scores = q·kᵀ / sqrt(head_dim), over the shared keys | over a row's own, masked;  out = softmax(scores) · v
#
# `attend_shared` multiplies each row's queries with its own keys alone. `attend_joined` takes the own keys of all rows
# for one list and masks those of others: more to multiply, but in few operations, which is less where queries are few.
# Everything in between is float32.


def attend_shared(
    q_NQHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    shared_slots_S: Tensor,
    own_slots_NK: Tensor,
    own_mask_NQK: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """[N, Q, heads, head_dim]. All queries see all shared keys; `own_mask_NQK` is true where one sees a key of its row.
    G heads of keys, each for R heads of queries."""
    n, q, h, d = q_NQHD.shape
    g = k_cache.shape[2]
    assert own_mask_NQK.shape == (n, q, own_slots_NK.shape[1])
    k_SGd, v_SGd = (widened(c, shared_slots_S, s, torch.float32) for c, s in ((k_cache, k_scale), (v_cache, v_scale)))
    k_NKGd, v_NKGd = (widened(c, own_slots_NK, s, torch.float32) for c, s in ((k_cache, k_scale), (v_cache, v_scale)))
    queries_NQGRd = (q_NQHD.float() * d**-0.5).view(n, q, g, h // g, d)
    queries_GMd = queries_NQGRd.permute(2, 0, 1, 3, 4).reshape(g, -1, d)
    queries_NGPd = queries_NQGRd.permute(0, 2, 1, 3, 4).reshape(n, g, -1, d)
    scores_GMS = torch.bmm(queries_GMd, k_SGd.permute(1, 2, 0))
    scores_NGPK = torch.matmul(queries_NGPd, k_NKGd.permute(0, 2, 3, 1))
    scores_NGQRK = scores_NGPK.view(n, g, q, h // g, -1).masked_fill(~own_mask_NQK[:, None, :, None], float("-inf"))
    scores_GMK = scores_NGQRK.transpose(0, 1).reshape(g, n * q * (h // g), -1)
    weights_GML = torch.cat((scores_GMS, scores_GMK), dim=2).softmax(dim=2)
    weights_GMS, weights_GMK = weights_GML.split((len(shared_slots_S), own_slots_NK.shape[1]), dim=2)
    weights_NGPK = weights_GMK.view(g, n, -1, weights_GMK.shape[2]).transpose(0, 1)
    shared_GMd = torch.bmm(weights_GMS, v_SGd.transpose(0, 1))
    out_NGPd = torch.matmul(weights_NGPK, v_NKGd.transpose(1, 2)) + shared_GMd.view(g, n, -1, d).transpose(0, 1)
    return out_NGPd.view(n, g, q, h // g, d).transpose(1, 2).reshape(n, q, h, d).to(q_NQHD.dtype)


def join_keys(shared_slots_S: Tensor, own_slots_NK: Tensor, own_mask_NQK: Tensor) -> tuple[Tensor, Tensor]:
    """`slots_L` and `bias_ML` of `attend_joined`: L = S + N·K keys, M = N·Q queries."""
    n, q, k = own_mask_NQK.shape
    own_NN = torch.eye(n, dtype=torch.bool, device=own_mask_NQK.device)
    sees_NQNK = own_NN[:, None, :, None] & own_mask_NQK[:, :, None]
    bias_ML = torch.zeros(n * q, len(shared_slots_S) + n * k, device=own_mask_NQK.device)
    bias_ML[:, len(shared_slots_S) :].masked_fill_(~sees_NQNK.view(n * q, n * k), float("-inf"))
    return torch.cat((shared_slots_S, own_slots_NK.flatten())), bias_ML


def attend_joined(
    q_NQHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_L: Tensor,
    bias_ML: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """[N, Q, heads, head_dim]. `bias_ML` is 0 where a query sees a key and -inf elsewhere."""
    n, q, h, d = q_NQHD.shape
    g = k_cache.shape[2]
    assert bias_ML.shape == (n * q, len(slots_L))
    k_LGd, v_LGd = (widened(c, slots_L, s, torch.float32) for c, s in ((k_cache, k_scale), (v_cache, v_scale)))
    queries_MGRd = (q_NQHD.float() * d**-0.5).view(n * q, g, h // g, d)
    # The many keys first and the few queries in one piece: the other way round takes up to four times as long.
    queries_GdP = queries_MGRd.permute(1, 3, 0, 2).flatten(2).contiguous()
    scores_GMRL = torch.bmm(k_LGd.transpose(0, 1), queries_GdP).unflatten(2, (n * q, h // g)).permute(0, 2, 3, 1)
    weights_GPL = (scores_GMRL + bias_ML[:, None]).softmax(dim=3).flatten(1, 2)
    out_GPd = torch.bmm(weights_GPL, v_LGd.transpose(0, 1))
    return out_GPd.view(g, n, q, h // g, d).permute(1, 2, 0, 3, 4).reshape(n, q, h, d).to(q_NQHD.dtype)
