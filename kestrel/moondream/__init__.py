"""The Moondream family."""

from kestrel.moondream.runtime import MoondreamRuntime

__all__ = ["MoondreamRuntime"]
