"""Which attention inside crops is the fastest that runs here: the Hopper kernel where it does, torch's elsewhere."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kestrel.kernels.crop_attention import attend_crops
from kestrel.kernels.ops import Op

logger = logging.getLogger("kestrel.kernels")

DEVICE = "cuda"
HOPPER = 9
HEADS = 16
CLOSE = 0.01
"""Relative distance of a right result in bfloat16; it is 0.002."""


def fastest_attend_crops(capability: tuple[int, int]) -> Op:
    if capability[0] != HOPPER:
        return attend_crops
    fault = _why_not_hopper()
    if fault is None:
        return attend_crops_on_hopper
    logger.warning("attention of crops runs in torch, without the Hopper kernel: %s", fault)
    return attend_crops


def attend_crops_on_hopper(qkv_NPC: Tensor, n_heads: int) -> Tensor:
    """By the Hopper kernel if it takes these sizes."""
    # Here and not above: other GPUs, and Triton before 3.6, have no use for the module.
    from kestrel.kernels.triton import hopper_crop_attention as hopper  # noqa: PLC0415

    run = hopper.attend_crops if hopper.fits(qkv_NPC, n_heads) else attend_crops
    return run(qkv_NPC, n_heads)


def _why_not_hopper() -> str | None:
    """Tries the kernel, several tiles a program. Its language is young, and another compiler may fail in any way."""
    try:
        qkv_NPC = torch.randn(12, 300, 3 * HEADS * 72, device=DEVICE, dtype=torch.bfloat16)
        expected = attend_crops(qkv_NPC.float(), HEADS)
        got = attend_crops_on_hopper(qkv_NPC, HEADS).float()
        distance = float((got - expected).norm() / expected.norm())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else 'no message'}"
    return None if distance < CLOSE else f"its result is {distance:.2g} from the right one"
