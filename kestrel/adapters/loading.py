"""From an adapter file to a checked `Adapter`, and back to a file in our own form.

Everything that is wrong with a file is said in one message, and nothing is guessed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save
from torch import Tensor

from kestrel.adapters.adapter import Adapter, AdapterShape, AdapterTarget, LowRankPair, ProjInput
from kestrel.adapters.formats import (
    OWN_FORMAT,
    PEFT_FORMAT,
    AdapterFile,
    Roles,
    TensorRole,
    format_of,
    hosted_roles,
    in_own_form,
    own_roles,
    parse_header,
    read_adapter_file,
    variant_roles,
    without_hosted_prefix,
    write_header,
)
from kestrel.errors import CheckpointError

ADAPTER_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_MAX_LISTED = 8


def load_adapter(path: str | Path, shape: AdapterShape) -> Adapter:
    """Reads an adapter of any format, and checks it against the base model."""
    return fitted_adapter(read_adapter_file(Path(path)), shape)


def fitted_adapter(file: AdapterFile, shape: AdapterShape) -> Adapter:
    """The adapter that a file holds, checked against a base model."""
    load = {
        OWN_FORMAT: _load_own,
        PEFT_FORMAT: _load_peft,
        "torch-variant": _load_variant,
        "hosted-finetune": _load_hosted,
    }
    return load[format_of(file)](file, shape)


def _load_peft(file: AdapterFile, shape: AdapterShape) -> Adapter:
    return replace(_load_own(in_own_form(file, shape), shape), format=PEFT_FORMAT)


def _load_own(file: AdapterFile, shape: AdapterShape) -> Adapter:
    try:
        header = parse_header(file.texts)
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {error}; write the adapter again") from error
    outside = sorted({target.layer for target in header.targets if not 0 <= target.layer < shape.num_layers})
    if outside:
        raise CheckpointError(
            f"{file.path} adapts layers {outside}, but the base model has {shape.num_layers} layers; "
            f"use the adapter with the model it was made for ({header.base_model or 'not named in the file'})"
        )
    _require_matrices(file.path, header.targets, shape)
    _require_norm(file.path, header.proj_input, shape)
    pairs = _checked_pairs(file.path, file.tensors, own_roles(header.targets), shape, header.rank)
    return Adapter(
        format=OWN_FORMAT,
        rank=header.rank,
        targets=pairs,
        alpha=header.alpha,
        proj_input=header.proj_input,
        base_model=header.base_model,
        metadata=header.metadata,
    )


def _load_variant(file: AdapterFile, shape: AdapterShape) -> Adapter:
    if shape.num_dense_layers < shape.num_layers:
        raise CheckpointError(
            f"{file.path} is a torch variant, which adapts dense layers only, but the base model has layers of experts "
            f"from layer {shape.num_dense_layers} on; use it with the model it was made for"
        )
    roles = variant_roles(shape)
    _require_matrices(file.path, (target for target, _ in roles.values()), shape)
    _require_norm(file.path, "block_norm", shape)
    rank = _common_rank(file.path, file.tensors, roles, shape)
    pairs = _checked_pairs(file.path, file.tensors, roles, shape, rank)
    return Adapter("torch-variant", rank, pairs, proj_input="block_norm", metadata=file.texts)


def _load_hosted(file: AdapterFile, shape: AdapterShape) -> Adapter:
    tensors: dict[str, Tensor] = {}
    for name, tensor in file.tensors.items():
        # A fine-tune may carry its text part under both prefixes.
        bare_name = without_hosted_prefix(name)
        twin = tensors.setdefault(bare_name, tensor)
        if twin is not tensor and not _same_values(twin, tensor):
            raise CheckpointError(f"{file.path} holds {bare_name} under two prefixes, but not the same finite values")
    roles = hosted_roles(shape)
    _require_matrices(file.path, (target for target, _ in roles.values()), shape)
    rank = _common_rank(file.path, tensors, roles, shape)
    return Adapter("hosted-finetune", rank, _checked_pairs(file.path, tensors, roles, shape, rank), metadata=file.texts)


def _require_matrices(path: Path, targets: Iterable[AdapterTarget], shape: AdapterShape) -> None:
    unknown = [target for target in targets if target.matrix not in shape.layers[target.layer]]
    if unknown:
        layer, names = unknown[0].layer, dict.fromkeys(target.matrix for target in unknown)
        raise CheckpointError(
            f"{path} adapts the matrices {', '.join(names)}, which the base model does not have (layer {layer} has "
            f"{', '.join(shape.layers[layer])}); use the adapter with the model it was made for"
        )


def _require_norm(path: Path, proj_input: ProjInput, shape: AdapterShape) -> None:
    if proj_input == "block_norm" and not shape.is_parallel:
        raise CheckpointError(
            f"{path} has deltas of proj that read the block's norm (proj_input block_norm), and attention and MLP of "
            "the base model have norms of their own; use the adapter with the model it was made for"
        )


def _same_values(one: Tensor, other: Tensor) -> bool:
    if value_flaw(one) or value_flaw(other) or one.dtype != other.dtype:
        return False
    return torch.equal(one, other)


def _common_rank(path: Path, tensors: Mapping[str, Tensor], roles: Roles, shape: AdapterShape) -> int:
    """The rank most tensors agree on; dense layers speak first, since an expert's share may be rounded."""
    dense: Counter[int] = Counter()
    sparse: Counter[int] = Counter()
    for name, (target, side) in roles.items():
        experts = shape.experts_of(target)
        if name not in tensors or tensors[name].ndim != (2 if experts is None else 3):
            continue
        own_rank = tensors[name].shape[-2 if side == "a" else -1]
        if experts is None:
            dense[own_rank] += 1
        else:
            sparse[own_rank * experts.sharing // experts.joined] += 1
    votes = dense or sparse
    if not votes:
        raise CheckpointError(
            f"{path} has no tensor of the base model's layers; use the adapter with the model it was made for"
        )
    return votes.most_common(1)[0][0]


def _checked_pairs(
    path: Path, tensors: Mapping[str, Tensor], roles: Roles, shape: AdapterShape, rank: int
) -> Mapping[AdapterTarget, LowRankPair]:
    """The pairs by target, or one CheckpointError with all that keeps the tensors from being an adapter."""
    misshapen: list[str] = []
    unusable: list[str] = []
    for name in sorted(roles.keys() & tensors.keys()):
        expected = shape.tensor_shape(*roles[name], rank)
        if tuple(tensors[name].shape) != expected:
            misshapen.append(f"{name} is {list(tensors[name].shape)}, expected {list(expected)}")
        elif flaw := value_flaw(tensors[name]):
            unusable.append(f"{name} {flaw}")
    found = [
        *_rank_problem(roles, shape, rank),
        *_listing("missing tensors", sorted(roles.keys() - tensors.keys())),
        *_listing("unexpected tensors", sorted(tensors.keys() - roles.keys())),
        *_listing(f"wrong shapes at rank {rank}", misshapen),
        *_listing("unusable tensors", unusable),
    ]
    if found:
        raise CheckpointError("\n  ".join([f"{path} does not fit the base model:", *found]))
    owned = {role: tensors[name].detach().clone(memory_format=torch.contiguous_format) for name, role in roles.items()}
    return MappingProxyType(
        {
            target: LowRankPair(owned[TensorRole(target, "a")], owned[TensorRole(target, "b")])
            for target in dict.fromkeys(role.target for role in owned)
        }
    )


def value_flaw(tensor: Tensor) -> str | None:
    """Why a tensor cannot serve in an adapter, None when it can."""
    if tensor.dtype not in ADAPTER_DTYPES or tensor.layout != torch.strided or tensor.is_meta:
        kind = "without data" if tensor.is_meta else str(tensor.dtype).removeprefix("torch.")
        return f"is {kind}, expected plain floating-point numbers"
    return None if bool(tensor.isfinite().all()) else "holds values that are not finite"


def _rank_problem(roles: Roles, shape: AdapterShape, rank: int) -> list[str]:
    if rank < 1:
        return [f"rank {rank} is below 1"]
    step = shape.rank_step(target for target, _ in roles.values())
    return [f"rank {rank} is not a multiple of the {step} experts per token"] if rank % step else []


def _listing(title: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    rest = f", and {len(entries) - _MAX_LISTED} more" if len(entries) > _MAX_LISTED else ""
    return [f"{title} ({len(entries)}): {', '.join(entries[:_MAX_LISTED])}{rest}"]


def save_adapter(adapter: Adapter, path: str | Path) -> None:
    """Writes safetensors with rank, targets, alpha and base model in the header; whole or not at all."""
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
    """What an expert holds depends on the base model: here a part of the rank, or some times the rank."""
    if pair.a.ndim != pair.b.ndim or pair.a.ndim not in (2, 3):
        return f"belongs to a pair of {pair.a.ndim} and {pair.b.ndim} dimensions, expected 2 or, with experts, 3"
    ranks = {pair.a.shape[-2], pair.b.shape[-1]}
    own = max(ranks)
    fits = ranks == {rank} if pair.a.ndim == 2 else ranks == {own} and own > 0 and 0 in (rank % own, own % rank)
    return None if fits else f"belongs to a pair of rank {sorted(ranks)}, expected {rank}"
