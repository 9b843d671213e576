"""Who attends to whom among the prefill chunks of a step, in as few calls as their shapes allow.

- Pictures at the beginning of their context, which see themselves and nothing else: one call for all of a length.
- Short texts (a question behind its picture): padded to the longest, one call for all.
- What is left (long texts, later pictures): a call each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from kestrel.kernels.paged_attention import attend_padded, attend_segment, causal_mask
from kestrel.runtime.contract import PrefillChunk
from kestrel.runtime.upload import upload
from kestrel.tokens import ImageSpan

SHORT = 64
"""Queries of a chunk that is padded to its neighbours."""

SlotsOf: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(rows, positions) to the slots where their keys and values lie."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What one layer hands over: the flat new positions, and the cache that already holds them."""

    q_THD: Tensor
    k_THD: Tensor
    v_THD: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_scale: float
    v_scale: float


class AttentionGroup(Protocol):
    def attend(self, layer: LayerInputs, out_THD: Tensor) -> None:
        """Writes the outputs of the group's positions."""
        ...


def in_packed_order(prefill: list[PrefillChunk]) -> list[PrefillChunk]:
    """Leading pictures first, those of one length side by side; a row's own chunks keep their order."""
    return sorted(prefill, key=lambda chunk: (0, chunk.num_positions) if _is_leading_picture(chunk) else (1, 0))


def prefill_groups(prefill: Sequence[PrefillChunk], slots_of: SlotsOf, device: torch.device) -> list[AttentionGroup]:
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
                groups.append(OneChunk.of(first, chunk, slots_of, device))
            first += chunk.num_positions
    if len(short) == 1:
        groups.append(OneChunk.of(*short[0], slots_of, device))
    elif short:
        groups.append(ShortTexts.of(short, slots_of, device))
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


@dataclass(frozen=True, slots=True)
class ShortTexts:
    at_NQ: Tensor
    """Where the queries lie in the flat batch; a short chunk repeats its last one."""
    kv_slots_NK: Tensor
    mask_NQK: Tensor

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, PrefillChunk]], slots_of: SlotsOf, device: torch.device) -> ShortTexts:
        num_queries = max(chunk.num_positions for _, chunk in chunks)
        num_keys = max(chunk.start + chunk.num_positions for _, chunk in chunks)
        numbers = upload([(first, c.num_positions, c.start, c.row) for first, c in chunks], device)
        first_N1, count_N1, start_N1, row_N1 = numbers[:, :, None].unbind(1)
        query_NQ = torch.arange(num_queries, device=device)[None].minimum(count_N1 - 1)
        key_1K = torch.arange(num_keys, device=device)[None]
        mask_NQK = key_1K[:, None] <= (start_N1 + query_NQ)[:, :, None]
        # Past a row's own positions its page table is stale: read its first position there, whose values are finite.
        known_NK = torch.where(key_1K < start_N1 + count_N1, key_1K, 0)
        return cls(first_N1 + query_NQ, slots_of(row_N1.expand_as(known_NK), known_NK), mask_NQK)

    def attend(self, layer: LayerInputs, out_THD: Tensor) -> None:
        q_NQHD = layer.q_THD[self.at_NQ]
        out_NQHD = attend_padded(
            q_NQHD, layer.k_cache, layer.v_cache, self.kv_slots_NK, self.mask_NQK, layer.k_scale, layer.v_scale
        )
        out_THD[self.at_NQ] = out_NQHD


def is_picture(chunk: PrefillChunk) -> bool:
    """A picture is a chunk of its own, and all its positions see each other."""
    return isinstance(chunk.items[0], ImageSpan)


def _is_leading_picture(chunk: PrefillChunk) -> bool:
    return chunk.start == 0 and is_picture(chunk)


def _is_short(chunk: PrefillChunk) -> bool:
    return chunk.num_positions <= SHORT and not is_picture(chunk)
