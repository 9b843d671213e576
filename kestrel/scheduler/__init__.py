"""Continuous batching: which sequence does what in each step."""

from kestrel.scheduler.generation import GenerationScheduler

__all__ = ["GenerationScheduler"]
