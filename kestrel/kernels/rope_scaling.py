"""Rotary positions stretched beyond the context that a model was first trained on, each way as `transformers` does.

A scaling changes the frequencies of the rotation. Yarn multiplies cosines and sines by a factor too, which scales
scores of attention by its square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by the factor."""

    factor: float
    magnitude = 1.0

    def frequencies(self, theta: float, powers_R: Tensor) -> Tensor:
        return (1.0 / powers_R) / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Waves longer than `context / low_freq_factor` are divided by the factor, those shorter than
    `context / high_freq_factor` stay, and between them one goes over into the other."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    context: int
    """Of the training before."""
    magnitude = 1.0

    def frequencies(self, theta: float, powers_R: Tensor) -> Tensor:
        inv_freq_R = 1.0 / powers_R
        wavelength_R = 2 * math.pi / inv_freq_R
        low, high = self.low_freq_factor, self.high_freq_factor
        share_R = (self.context / wavelength_R - low) / (high - low)
        between_R = (1 - share_R) * inv_freq_R / self.factor + share_R * inv_freq_R
        scaled_R = torch.where(wavelength_R > self.context / low, inv_freq_R / self.factor, between_R)
        return torch.where(wavelength_R < self.context / high, inv_freq_R, scaled_R)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Dimensions that turn fewer than `beta_slow` times within the context are divided by the factor, those that turn
    more than `beta_fast` times stay, and between them is a ramp over the dimensions."""

    factor: float
    context: int
    """Of the training before."""
    magnitude: float
    """Of cosines and sines."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True
    """The ramp begins and ends at whole dimensions."""

    def frequencies(self, theta: float, powers_R: Tensor) -> Tensor:
        num_frequencies = len(powers_R)
        first, last = (self._dimension(turns, theta, num_frequencies) for turns in (self.beta_fast, self.beta_slow))
        if self.truncates:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * num_frequencies - 1)
        steps_R = torch.arange(num_frequencies, dtype=torch.float32, device=powers_R.device)
        kept_R = 1 - ((steps_R - first) / (last - first or 0.001)).clamp(0, 1)
        return (1.0 / (self.factor * powers_R)) * (1 - kept_R) + (1.0 / powers_R) * kept_R

    def _dimension(self, turns: float, theta: float, num_frequencies: int) -> float:
        """Which one turns so many times within the context."""
        return num_frequencies * math.log(self.context / (turns * 2 * math.pi)) / math.log(theta)


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
