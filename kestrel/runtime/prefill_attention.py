"""Who attends to whom among the prefill chunks of a step, in as few calls as their shapes allow.

- Pictures at the beginning of their context, which see themselves and nothing else: one call for all of a length.
- Short texts (a question behind its picture): padded to the longest, one call for all, or one for all about a picture.
- What is left (long texts, later pictures): a call each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from kestrel.kernels.paged_attention import attend_segment, causal_mask
from kestrel.runtime.attention_group import AttentionGroup, LayerInputs, SlotsOf
from kestrel.runtime.contract import PrefillChunk
from kestrel.runtime.padded_rows import RowQueries, padded_groups
from kestrel.runtime.rows import RowTable
from kestrel.tokens import ImageSpan

SHORT = 64
"""Queries of a chunk that is padded to its neighbours."""


def in_packed_order(prefill: list[PrefillChunk]) -> list[PrefillChunk]:
    """Leading pictures first, those of one length side by side; a row's own chunks keep their order."""
    return sorted(prefill, key=lambda chunk: (0, chunk.num_positions) if _is_leading_picture(chunk) else (1, 0))


def prefill_groups(
    prefill: Sequence[PrefillChunk], table: RowTable, page_size: int, slots_of: SlotsOf
) -> list[AttentionGroup]:
    """`prefill` in packed order; its positions lie at the beginning of the flat batch."""
    groups: list[AttentionGroup] = []
    short: list[tuple[int, PrefillChunk]] = []
    first = 0
    for key, chunks in groupby(prefill, lambda chunk: (_is_leading_picture(chunk), chunk.num_positions)):
        is_leading, length = key
        if is_leading:
            count = len(list(chunks))
            groups.append(LeadingPictures(first, count, length))
            first += count * length
            continue
        for chunk in chunks:
            if _is_short(chunk):
                short.append((first, chunk))
            else:
                groups.append(OneChunk.of(first, chunk, slots_of, table.device))
            first += chunk.num_positions
    if len(short) == 1:
        groups.append(OneChunk.of(*short[0], slots_of, table.device))
    elif short:
        queries = [RowQueries(first, chunk.num_positions, chunk.start, chunk.row) for first, chunk in short]
        groups += padded_groups(queries, table, page_size, slots_of)
    return groups


@dataclass(frozen=True, slots=True)
class LeadingPictures:
    first: int
    count: int
    length: int

    def attend(self, layer: LayerInputs, out_THD: Tensor) -> None:
        last = self.first + self.count * self.length
        q, k, v = (
            x_THD[self.first : last].unflatten(0, (self.count, self.length)).transpose(1, 2)
            for x_THD in (layer.q_THD, layer.k_THD.to(layer.q_THD.dtype), layer.v_THD.to(layer.q_THD.dtype))
        )
        seen = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        out_THD[self.first : last] = seen.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class OneChunk:
    first: int
    last: int
    kv_slots_K: Tensor
    mask_QK: Tensor | None
    is_causal: bool

    @classmethod
    def of(cls, first: int, chunk: PrefillChunk, slots_of: SlotsOf, device: torch.device) -> OneChunk:
        num_keys = chunk.start + chunk.num_positions
        keys_K = torch.arange(num_keys, device=device)
        kv_slots_K = slots_of(torch.full_like(keys_K, chunk.row), keys_K)
        is_span = isinstance(chunk.items[0], ImageSpan)
        is_causal = not is_span and chunk.start == 0
        needs_mask = not is_span and chunk.start > 0 and chunk.num_positions > 1
        mask_QK = causal_mask(chunk.num_positions, num_keys, device) if needs_mask else None
        return cls(first, first + chunk.num_positions, kv_slots_K, mask_QK, is_causal)

    def attend(self, layer: LayerInputs, out_THD: Tensor) -> None:
        q_QHD = layer.q_THD[self.first : self.last]
        out_THD[self.first : self.last] = attend_segment(
            q_QHD, layer.k_cache, layer.v_cache, self.kv_slots_K, self.mask_QK, self.is_causal,
            layer.k_scale, layer.v_scale,
        )  # fmt: skip


def is_picture(chunk: PrefillChunk) -> bool:
    """A picture is a chunk of its own, and all its positions see each other."""
    return isinstance(chunk.items[0], ImageSpan)


def _is_leading_picture(chunk: PrefillChunk) -> bool:
    return chunk.start == 0 and is_picture(chunk)


def _is_short(chunk: PrefillChunk) -> bool:
    return chunk.num_positions <= SHORT and not is_picture(chunk)
