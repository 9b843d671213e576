"""Attention inside each crop of a picture: every position sees every other of its own crop.

    out_h = softmax(q_h · k_hᵀ / sqrt(head_dim)) · v_h

A row of `qkv_NPC` is [q heads | k heads | v heads], C = 3 · D, D = heads · head_dim.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def attend_crops(qkv_NPC: Tensor, n_heads: int) -> Tensor:
    """[N, P, D], heads side by side, ready for the output projection."""
    assert qkv_NPC.ndim == 3
    q, k, v = qkv_NPC.unflatten(2, (3, n_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
