"""Random numbers for many scenes: every scene has its own counted stream, made from its seed alone."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


class SceneRandom:
    """Numbers are the SplitMix64 finaliser of (seed, salt, running count): row i never depends on other rows."""

    def __init__(self, seeds: NDArray[np.int64], salt: int = 0) -> None:
        salts = np.array([salt], np.uint64) * _STEP
        self._keys = _mix(_mix(np.asarray(seeds, np.int64).astype(np.uint64) + _STEP) + _mix(salts))
        self._used = 0

    def uniform(self, *shape: int) -> NDArray[np.float64]:
        """[B, *shape] from 0 up to but not including 1"""
        return self._numbers(self._keys, shape)

    def uniform_of(self, rows: NDArray[np.int64], *shape: int) -> NDArray[np.float64]:
        """[rows, *shape] for some scenes; the streams of all scenes move on alike."""
        return self._numbers(self._keys[rows], shape)

    def between(self, low: float, high: float, *shape: int) -> NDArray[np.float64]:
        """[B, *shape] from low to high"""
        return low + (high - low) * self.uniform(*shape)

    def below(self, limit: int, *shape: int) -> NDArray[np.int64]:
        """[B, *shape] whole numbers from 0 to limit - 1"""
        return (self.uniform(*shape) * limit).astype(np.int64)

    def chance(self, probability: float, *shape: int) -> NDArray[np.bool_]:
        return self.uniform(*shape) < probability

    def weighted(self, weights: NDArray[np.float64]) -> NDArray[np.int64]:
        """[B] indices into the weights"""
        edges = np.cumsum(weights) / weights.sum()
        return np.minimum(np.searchsorted(edges, self.uniform(), side="right"), len(weights) - 1)

    def _numbers(self, keys: NDArray[np.uint64], shape: tuple[int, ...]) -> NDArray[np.float64]:
        amount = math.prod(shape)
        counts = np.arange(self._used + 1, self._used + amount + 1, dtype=np.uint64) * _STEP
        self._used += amount
        bits = _mix(keys[:, None] + counts[None, :]) >> np.uint64(11)
        return (bits.astype(np.float64) * 2.0**-53).reshape(len(keys), *shape)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST_FACTOR
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND_FACTOR
    return bits ^ (bits >> np.uint64(31))
