"""Writing an adapter in our own form: safetensors with rank, targets, alpha and base model in the header."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save

from kestrel.adapters.adapter import Adapter, LowRankPair
from kestrel.adapters.formats import own_roles, parse_header, write_header
from kestrel.adapters.loading import value_flaw
from kestrel.errors import CheckpointError


def save_adapter(adapter: Adapter, path: str | Path) -> None:
    """Writes the file whole or not at all: a reader never sees half of it."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: adapters are written as safetensors; end the name in .safetensors")
    texts = write_header(adapter)
    try:
        parse_header(texts)
    except ValueError as error:
        raise CheckpointError(f"{path} was not written: {error}") from error
    tensors = {}
    for name, (target, side) in own_roles(adapter.targets).items():
        pair = adapter.targets[target]
        tensor = (pair.a if side == "a" else pair.b).detach()
        if flaw := value_flaw(tensor) or _rank_flaw(pair, adapter.rank):
            raise CheckpointError(f"{path} was not written: {name} {flaw}")
        tensors[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(_in_order(save(tensors, metadata=texts)))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _in_order(file: bytes) -> bytes:
    """The same file with its header sorted, so that equal adapters are equal bytes; the library's order varies."""
    size = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + size])
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(text) <= size
    return file[:8] + text.ljust(size) + file[8 + size :]


def _rank_flaw(pair: LowRankPair, rank: int) -> str | None:
    """An expert's share of the rank depends on the base model, so here it must only divide the rank."""
    if pair.a.ndim != pair.b.ndim or pair.a.ndim not in (2, 3):
        return f"belongs to a pair of {pair.a.ndim} and {pair.b.ndim} dimensions, expected 2 or, with experts, 3"
    ranks = {pair.a.shape[-2], pair.b.shape[-1]}
    fits = ranks == {rank} if pair.a.ndim == 2 else len(ranks) == 1 and 0 not in ranks and rank % max(ranks) == 0
    return None if fits else f"belongs to a pair of rank {sorted(ranks)}, expected {rank}"
