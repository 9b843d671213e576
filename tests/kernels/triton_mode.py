"""Where Triton kernels are tested: on the GPU of this machine, or without one in Triton's interpreter.

Import this before any kernel: the interpreter is chosen when a kernel is defined.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]
devices = pytest.mark.parametrize("device", [pytest.param(d, marks=[pytest.mark.gpu] * (d == "cuda")) for d in DEVICES])
