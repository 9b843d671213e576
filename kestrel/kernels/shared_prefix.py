"""Attention of several rows that share the beginning of their contexts, such as questions about one picture.

The same as `kestrel.kernels.paged_attention.attend_padded` over all keys, but the shared ones are read once instead of
once a row, and multiplied with the queries of all rows together. On a CPU, where reading keys and values is most of a
decoding step, that is most of what a row costs.

    scores = q·kᵀ / sqrt(head_dim), over the shared keys | over a row's own, masked;  out = softmax(scores) · v

`attend_shared` multiplies each row's queries with its own keys alone. `attend_joined` takes the own keys of all rows
for one list and masks those of others: more to multiply, but in few operations, which is less where queries are few.
Everything in between is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel.kernels.paged_attention import widened


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
    g = k_cache.shape[1]
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
    g = k_cache.shape[1]
    assert bias_ML.shape == (n * q, len(slots_L))
    k_LGd, v_LGd = (widened(c, slots_L, s, torch.float32) for c, s in ((k_cache, k_scale), (v_cache, v_scale)))
    queries_MGRd = (q_NQHD.float() * d**-0.5).view(n * q, g, h // g, d)
    # The many keys first and the few queries in one piece: the other way round takes up to four times as long.
    queries_GdP = queries_MGRd.permute(1, 3, 0, 2).flatten(2).contiguous()
    scores_GMRL = torch.bmm(k_LGd.transpose(0, 1), queries_GdP).unflatten(2, (n * q, h // g)).permute(0, 2, 3, 1)
    weights_GPL = (scores_GMRL + bias_ML[:, None]).softmax(dim=3).flatten(1, 2)
    out_GPd = torch.bmm(weights_GPL, v_LGd.transpose(0, 1))
    return out_GPd.view(g, n, q, h // g, d).permute(1, 2, 0, 3, 4).reshape(n, q, h, d).to(q_NQHD.dtype)
