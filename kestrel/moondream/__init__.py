"""The Moondream family."""

from kestrel.moondream.decoder import MoondreamRuntime

__all__ = ["MoondreamRuntime"]
