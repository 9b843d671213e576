"""Strict, streaming load: every parameter has exactly one source, and no second copy of the model ever exists.

A family turns a checkpoint's headers into a `LoadPlan`. `check_plan` reports everything wrong with it at once, before
any data is read; `load_parameters` then fills the model parameter by parameter, straight in its final type and place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kestrel.errors import CheckpointError
from kestrel.layers.linear import parts_of
from kestrel.models.checkpoint_files import Checkpoint, TensorInfo
from kestrel.models.family import Progress, no_progress
from kestrel.parallel.ranks import Part

PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_MAX_LISTED = 8

Write = Callable[[Tensor, Sequence[Tensor]], None]


def copy_plain(target: Tensor, tensors: Sequence[Tensor]) -> None:
    target.copy_(tensors[0])


def copy_stacked(target: Tensor, tensors: Sequence[Tensor]) -> None:
    """One above the other; experts come one after the other."""
    rows = target.flatten(0, 1) if target.ndim == 3 else target
    for own, given in zip(rows.split([len(one) for one in tensors]), tensors, strict=True):
        own.copy_(given)


@dataclass(frozen=True, slots=True)
class Source:
    """How one parameter is made: which checkpoint tensors, the shape they give, and the write into the parameter."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    write: Write = copy_plain


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Sources by parameter name, and what could not be planned."""

    sources: Mapping[str, Source]
    unexpected: Sequence[str] = ()
    """Checkpoint tensors that no parameter uses."""
    problems: Sequence[str] = field(default_factory=list)
    """Other reasons to refuse, one sentence each."""


def plain_source(name: str, info: TensorInfo, problems: list[str]) -> Source:
    """A tensor taken as it is. Types that would need a scale are noted as a problem."""
    if info.dtype not in PLAIN_DTYPES:
        kind = str(info.dtype).removeprefix("torch.")
        problems.append(f"{name} is stored as {kind} without scales; use an unquantised checkpoint")
    return Source((name,), info.shape)


def check_plan(plan: LoadPlan, model: nn.Module, label: str, hint: str = "") -> None:
    """Raises one CheckpointError with all that is missing, unexpected, wrongly shaped or otherwise wrong."""
    expected = whole_shapes(model)
    missing = sorted(expected.keys() - plan.sources.keys())
    unexpected = sorted({*plan.unexpected, *(plan.sources.keys() - expected.keys())})
    misshapen = sorted(
        f"{name} is {list(source.shape)}, expected {list(expected[name])}"
        for name, source in plan.sources.items()
        if name in expected and source.shape != expected[name]
    )
    parts = [
        _listing("missing tensors", missing),
        _listing("unexpected tensors", unexpected),
        _listing("wrong shapes", misshapen),
        _listing("problems", sorted(plan.problems)),
    ]
    found = [part for part in parts if part]
    if found:
        raise CheckpointError("\n  ".join([f"{label} does not fit the model:", *found, *([hint] if hint else [])]))


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of the parameters as checkpoints have them, also where the model is one rank's part."""
    parts, shapes = parts_of(model), {name: tuple(each.shape) for name, each in model.named_parameters()}
    return {name: parts[name].whole_shape(shape) if name in parts else shape for name, shape in shapes.items()}


@torch.no_grad()
def load_parameters(
    model: nn.Module,
    checkpoint: Checkpoint,
    plan: LoadPlan,
    device: torch.device,
    dtype_of: Callable[[str], torch.dtype],
    progress: Progress = no_progress,
) -> None:
    """Replaces every parameter of `model` (on the meta device) by its checked source, in the order of the files.

    Of a tensor that the model has a part of, only that part is read, unless it has to be widened first."""
    parts = parts_of(model)
    position = {name: index for index, name in enumerate(checkpoint.tensors)}
    ordered = sorted(plan.sources.items(), key=lambda entry: position[entry[1].names[0]])
    total_bytes = sum(model.get_parameter(name).numel() * dtype_of(name).itemsize for name, _ in ordered)
    done_bytes = 0
    progress("loading weights", done_bytes, total_bytes)
    for name, source in ordered:
        target = torch.empty(model.get_parameter(name).shape, dtype=dtype_of(name), device=device)
        if name in parts:
            _write_part(target, source, parts[name], checkpoint)
        else:
            source.write(target, [checkpoint.read(each) for each in source.names])
        _check_range(checkpoint, source, target)
        _assign(model, name, target)
        done_bytes += target.numel() * target.itemsize
        progress("loading weights", done_bytes, total_bytes)
    checkpoint.close()


def _write_part(target: Tensor, source: Source, part: Part, checkpoint: Checkpoint) -> None:
    if part.is_elsewhere:
        target.zero_()
    elif source.write in (copy_plain, copy_stacked):
        windows = zip(source.names, _windows(source, part, checkpoint), strict=True)
        source.write(target, [checkpoint.read(name, own) for name, own in windows])
    else:
        whole = torch.empty(source.shape, dtype=target.dtype, device=target.device)
        source.write(whole, [checkpoint.read(each) for each in source.names])
        target.copy_(part.cut(whole))


def _windows(source: Source, part: Part, checkpoint: Checkpoint) -> Iterator[Part]:
    """The part of each tensor of a source."""
    shapes = [checkpoint.tensors[name].shape for name in source.names]
    if source.write is copy_plain or part.dim != -len(shapes[0]):  # not the dimension along which they are stacked
        yield from [part] * len(shapes)
        return
    first = 0
    for rows, *_ in shapes:
        yield part.within(first, rows)
        first = (first + rows) % part.whole  # the next expert's begin anew


def _check_range(checkpoint: Checkpoint, source: Source, target: Tensor) -> None:
    # Only float16 has a smaller range than the types that weights are stored in.
    narrowed = target.dtype == torch.float16 and checkpoint.tensors[source.names[0]].dtype != torch.float16
    if narrowed and not bool(target.isfinite().all()):
        raise CheckpointError(
            f"{source.names[0]} of {checkpoint.path} exceeds the range of float16; use dtype bfloat16 or float32"
        )


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).register_parameter(leaf, nn.Parameter(value, requires_grad=False))


def _listing(title: str, entries: Sequence[str]) -> str:
    if not entries:
        return ""
    rest = f", and {len(entries) - _MAX_LISTED} more" if len(entries) > _MAX_LISTED else ""
    return f"{title} ({len(entries)}): {', '.join(entries[:_MAX_LISTED])}{rest}"
