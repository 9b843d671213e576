"""The training loop of kestrel-tiny: one GPU, bf16, scenes drawn on the fly, resumable from its last weights."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kestrel.runtime.device import fast_dtype
from kestrel.train.curves import CurveWriter
from kestrel.train.model import MoondreamModel
from kestrel.train.objective import Losses, TaskTensors, all_experts, losses


@dataclass(frozen=True)
class TrainingPlan:
    """One run. The learning rate warms up, then follows a half cosine from `lr` to `final_lr`."""

    steps: int
    lr: float = 1e-3
    final_lr: float = 1e-3
    warmup_steps: int = 200
    weight_decay: float = 0.03
    clip_norm: float = 1.0
    ema_decay: float = 0.999
    max_seconds: float = math.inf
    log_every: int = 25
    orthogonal: bool = True
    """Orthogonal steps for the matrices inside blocks, instead of AdamW."""
    compile: bool = False
    mixed_precision: bool = True
    """Products in bfloat16, where the device has fast ones."""

    def lr_at(self, step: int, seconds: float = 0.0) -> float:
        """Where a time limit ends the run before its steps do, the time decides how far it is."""
        done = min(1.0, max(step / max(1, self.steps), seconds / self.max_seconds))
        return cosine_lr(self.lr, self.final_lr, self.warmup_steps, step, done)


def cosine_lr(lr: float, final_lr: float, warmup_steps: int, step: int, done: float) -> float:
    """Rises over the first steps, then follows a half cosine; `done` is the share of the run that lies behind."""
    warm = min(1.0, (step + 1) / max(1, warmup_steps))
    return warm * (final_lr + 0.5 * (lr - final_lr) * (1.0 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class StepReport:
    step: int
    scenes: int
    scenes_per_s: float
    seconds: float
    lr: float
    text: float
    coord: float
    size: float
    balance: float
    token_accuracy: float
    waiting: float
    """Share of the time without a batch to work on."""


class AveragedWeights:
    """Exponential moving average of the parameters: what is evaluated and shipped."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._live = list(model.parameters())
        self._average = [p.detach().clone() for p in self._live]
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        self._steps += 1
        decay = min(self._decay, self._steps / (self._steps + 10.0))
        for average, live in zip(self._average, self._live, strict=True):
            average.lerp_(live.detach(), 1.0 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange live and averaged values; call again to go back."""
        for live, average in zip(self._live, self._average, strict=True):
            held = live.detach().clone()
            live.copy_(average)
            average.copy_(held)


class Optimiser:
    """Orthogonal steps for the matrices inside blocks, AdamW for the rest; weight decay on matrices only."""

    def __init__(self, model: MoondreamModel, plan: TrainingPlan) -> None:
        self._plan = plan
        pieces = block_matrices(model) if plan.orthogonal else {}
        rest = [p for p in model.parameters() if p not in pieces]
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": plan.weight_decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._parameters = list(model.parameters())
        self._steps = OrthogonalSteps(pieces)
        self._adam = adamw(groups, lr=plan.lr, betas=(0.9, 0.98), fused=rest[0].is_cuda)

    def step(self, lr: float) -> None:
        nn.utils.clip_grad_norm_(self._parameters, self._plan.clip_norm)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._steps.step(lr, self._plan.weight_decay)
        for parameter in self._parameters:
            parameter.grad = None


def block_matrices(model: MoondreamModel) -> dict[nn.Parameter, int]:
    """The matrices of all blocks and of the projector, and how many lie on top of each other in each."""
    found: dict[nn.Parameter, int] = {}
    for module in (*model.vision.blocks, *model.text.blocks, model.vision.proj_mlp):
        for name, parameter in module.named_parameters():
            if name.endswith("attn.qkv.weight"):
                found[parameter] = 3
            elif name.endswith("weight") and "router" not in name and parameter.ndim >= 2:
                found[parameter] = parameter.shape[0] if parameter.ndim == 3 else 1
    return found


Batch = tuple[Tensor, TaskTensors]
"""Pictures [B, H, W, 3] uint8 and their tasks, on the model's device."""


def train(
    model: MoondreamModel,
    batches: Iterator[Batch],
    plan: TrainingPlan,
    curves: CurveWriter,
    report: Callable[[StepReport], None],
    scenes_before: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Runs the plan, or the part of it before `should_stop`; the model ends with its averaged weights. Returns the
    scenes seen in all."""
    device = model.text.wte.device
    dtype = fast_dtype(device, torch.bfloat16) if plan.mixed_precision else torch.float32
    optimiser, average = Optimiser(model, plan), AveragedWeights(model, plan.ema_decay)
    start, scenes, window = time.perf_counter(), scenes_before, _Window()
    model.train()
    with all_experts(model) as experts, compiled_blocks(model, plan.compile):
        for step in range(plan.steps):
            lr = plan.lr_at(step, time.perf_counter() - start)
            with window.waiting():
                pixels, tasks = next(batches)
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                found = losses(model, experts, pixels, tasks, dtype)
            found.total.backward()
            optimiser.step(lr)
            average.update()
            scenes += len(pixels)
            window.add(found, len(pixels))
            is_last = step + 1 == plan.steps or time.perf_counter() - start > plan.max_seconds or should_stop()
            if (step + 1) % plan.log_every == 0 or is_last:
                line = window.close(step + 1, scenes, time.perf_counter() - start, lr)
                curves.write(asdict(line))
                report(line)
            if is_last:
                break
    average.swap()
    model.eval()
    return scenes


@contextmanager
def compiled_blocks(model: MoondreamModel, is_wanted: bool) -> Iterator[None]:
    """Inside, blocks run as fused kernels: compiled once for all blocks of a sort, not once for each."""
    blocks = [*model.vision.blocks, *model.text.blocks] if is_wanted else []
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        for block in blocks:
            block.compile()
        try:
            yield
        finally:
            for block in blocks:
                block._compiled_call_impl = None


class _Window:
    """Means over the steps since the last report; losses stay on the device until then."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._scenes = 0
        self._start = time.perf_counter()
        self._waited = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def add(self, found: Losses, scenes: int) -> None:
        values = (found.text, found.coord, found.size, found.balance, found.token_accuracy)
        self._found.append(torch.stack([value.float() for value in values]))
        self._scenes += scenes

    def close(self, step: int, scenes: int, seconds: float, lr: float) -> StepReport:
        text, coord, size, balance, accuracy = torch.stack(self._found).mean(0).tolist()
        took = max(1e-9, time.perf_counter() - self._start)
        rate, waiting = self._scenes / took, self._waited / took
        line = StepReport(step, scenes, rate, seconds, lr, text, coord, size, balance, accuracy, waiting)
        self.__init__()
        return line


# ---------------------------------------------------------------------- optimiser steps
# Orthogonal steps for the matrices inside blocks (Muon), AdamW for everything else. The momentum of a matrix is
# replaced by the nearest matrix whose singular values are all about one, by a few Newton-Schulz iterations, and scaled
# so that its entries are as large as those of a usual AdamW step. All directions of a matrix learn at one pace, which
# from scratch takes far fewer scenes.

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_STEP_RMS = 0.2  # size of an AdamW step's entries, by the learning rate


def adamw(parameters: Iterable[Any], **settings: Any) -> torch.optim.AdamW:
    """In a checkout the folder `triton/` is found as a package where Triton is not installed, and AdamW, which imports
    torch's compiler, would take it for Triton."""
    found = importlib.util.find_spec("triton")
    if found is not None and found.origin is None:
        sys.modules["triton"] = None  # pyright: ignore[reportArgumentType] - how Python says: not to be imported
    return torch.optim.AdamW(parameters, **settings)


def orthogonalised(matrices_NRC: Tensor) -> Tensor:
    """About U·Vᵀ of each matrix, in bf16 where that is fast."""
    x = matrices_NRC.to(fast_dtype(matrices_NRC.device, torch.bfloat16))
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class OrthogonalSteps:
    """Momentum and steps of the given parameters. `pieces`: matrices stacked along the rows of one parameter."""

    def __init__(self, pieces: dict[nn.Parameter, int], momentum: float = 0.95) -> None:
        self._momentum = momentum
        self._by_shape: dict[tuple[int, int], list[tuple[nn.Parameter, int]]] = defaultdict(list)
        for parameter, count in pieces.items():
            stacked = parameter.detach().reshape(-1, parameter.shape[-1])
            self._by_shape[stacked.shape[0] // count, stacked.shape[1]].append((parameter, count))
        self._held = {
            shape: torch.zeros(sum(n for _, n in group), *shape, device=group[0][0].device)
            for shape, group in self._by_shape.items()
        }

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> None:
        for shape, group in self._by_shape.items():
            gradients = torch.cat([_gradient(parameter).reshape(-1, *shape) for parameter, _ in group])
            held = self._held[shape].lerp_(gradients, 1.0 - self._momentum)
            steps = orthogonalised(gradients.lerp(held, self._momentum)).float()
            scale = lr * _STEP_RMS * max(shape) ** 0.5
            for (parameter, _), share in zip(group, steps.split([count for _, count in group]), strict=True):
                parameter.mul_(1.0 - lr * weight_decay).add_(share.reshape(parameter.shape), alpha=-scale)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
