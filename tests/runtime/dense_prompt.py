"""One dense pass over a whole prompt, with the final norm and the head written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken
from tests.moondream.naive_generator import NO_BLOCK, DenseAttention, NaiveGenerator


@torch.inference_mode()
def dense_hidden(naive: NaiveGenerator, items: Sequence[ContextItem], images: Mapping[str, np.ndarray]) -> Tensor:
    """The normed last hidden state of every position, [T, D]."""
    attention = DenseAttention()
    embedded = [naive.embed_item(item, images) for item in items]
    for number, (item, x_TD) in enumerate(zip(items, embedded, strict=True)):
        attention.block_of += [number if isinstance(item, ImageSpan) else NO_BLOCK] * len(x_TD)
    text = naive.model.text
    hidden_TD = text(torch.cat(embedded), torch.arange(len(attention.block_of)), attention)
    return functional.layer_norm(hidden_TD, hidden_TD.shape[1:], text.post_ln.weight, text.post_ln.bias)


@torch.inference_mode()
def dense_logprobs(
    naive: NaiveGenerator, items: Sequence[ContextItem], images: Mapping[str, np.ndarray]
) -> tuple[Tensor, list[int]]:
    """(log-probabilities [N, V] where each token but a leading one stands, the tokens' ids)."""
    hidden_TD, head = dense_hidden(naive, items, images), naive.model.text.lm_head
    rows: list[int] = []
    ids: list[int] = []
    position = 0
    for item in items:
        if isinstance(item, ImageSpan):
            position += item.num_positions
            continue
        if position:
            rows.append(position - 1)
            ids.append(_id(naive, item))
        position += 1
    return torch.log_softmax(hidden_TD[rows] @ head.weight.T + head.bias, dim=-1), ids


def _id(naive: NaiveGenerator, item: ContextItem) -> int:
    if isinstance(item, CoordToken):
        return naive.config.tokenizer.coord_id
    if isinstance(item, SizeToken):
        return naive.config.tokenizer.size_id
    assert not isinstance(item, ImageSpan)
    return item.id
