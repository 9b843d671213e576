"""The engine as a model of NVIDIA's Triton Inference Server. Not to be confused with kernels/triton, the language."""

from kestrel.integrations.triton_server.backend import KestrelBackend

__all__ = ["KestrelBackend"]
