"""Optimisers: orthogonal steps for the matrices inside blocks (Muon), AdamW for everything else.

The momentum of a matrix is replaced by the nearest matrix whose singular values are all about one, by a few
Newton-Schulz iterations, and scaled so that its entries are as large as those of a usual AdamW step. All directions of
a matrix learn at one pace, which from scratch takes far fewer scenes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kestrel.runtime.wide_products import fast_dtype

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
