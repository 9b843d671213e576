"""Which ids the positions of a prefill chunk are asked to score. No torch."""

from __future__ import annotations

from kestrel.runtime.contract import PrefillChunk
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken


def scored_ids(chunk: PrefillChunk, coord_id: int, size_id: int) -> list[tuple[int, int]]:
    """(position inside the chunk, id of the token that follows it), for each token that the chunk predicts."""
    if chunk.prompt_outputs is None or chunk.prompt_outputs.logprobs is None:
        return []
    inside = [] if isinstance(chunk.items[0], ImageSpan) else list(chunk.items[1:])
    targets = [(at, _scored_id(item, coord_id, size_id)) for at, item in enumerate(inside)]
    if chunk.following is not None and not isinstance(chunk.following, ImageSpan):
        targets.append((chunk.num_positions - 1, _scored_id(chunk.following, coord_id, size_id)))
    return targets


def first_pooled(chunk: PrefillChunk) -> int:
    """The first position inside the chunk that counts in the pooled sum; `num_positions` when none does."""
    if chunk.prompt_outputs is None or chunk.prompt_outputs.pool_from is None:
        return chunk.num_positions
    return min(max(chunk.prompt_outputs.pool_from - chunk.start, 0), chunk.num_positions)


def _scored_id(item: ContextItem, coord_id: int, size_id: int) -> int:
    assert not isinstance(item, ImageSpan), "a picture has no id"
    if isinstance(item, CoordToken):
        return coord_id
    if isinstance(item, SizeToken):
        return size_id
    return item.id
