"""Strict, streaming load: every parameter has exactly one source, and no second copy of the model ever exists.

A family turns a checkpoint's headers into a `LoadPlan`. `check_plan` reports everything wrong with it at once, before
any data is read; `load_parameters` then fills the model parameter by parameter, straight in its final type and place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kestrel.errors import CheckpointError
from kestrel.models.checkpoint_files import Checkpoint, TensorInfo
from kestrel.models.family import Progress, no_progress

PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_MAX_LISTED = 8

Write = Callable[[Tensor, Sequence[Tensor]], None]


def copy_plain(target: Tensor, tensors: Sequence[Tensor]) -> None:
    target.copy_(tensors[0])


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
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
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


@torch.no_grad()
def load_parameters(
    model: nn.Module,
    checkpoint: Checkpoint,
    plan: LoadPlan,
    device: torch.device,
    dtype_of: Callable[[str], torch.dtype],
    progress: Progress = no_progress,
) -> None:
    """Replaces every parameter of `model` (on the meta device) by its checked source, in the order of the files."""
    position = {name: index for index, name in enumerate(checkpoint.tensors)}
    ordered = sorted(plan.sources.items(), key=lambda entry: position[entry[1].names[0]])
    total_bytes = sum(model.get_parameter(name).numel() * dtype_of(name).itemsize for name, _ in ordered)
    done_bytes = 0
    progress("loading weights", done_bytes, total_bytes)
    for name, source in ordered:
        target = torch.empty(source.shape, dtype=dtype_of(name), device=device)
        source.write(target, [checkpoint.read(each) for each in source.names])
        _check_range(checkpoint, source, target)
        _assign(model, name, target)
        done_bytes += target.numel() * target.itemsize
        progress("loading weights", done_bytes, total_bytes)
    checkpoint.close()


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
