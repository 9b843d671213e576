"""Masks that the host worked out, one bit per id, applied to the logits of the rows they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kestrel.runtime.upload import upload, upload_tensor


def apply_masks(logits_BV: Tensor, row_indices: Sequence[int], masks: Mapping[int, bytes]) -> Tensor:
    """Logits with −inf where a row's mask forbids an id; row b of the logits belongs to row_indices[b].

    Bit k % 8 of byte k // 8 stands for id k; ids past the end of a mask are forbidden. Other rows stay as they are.
    """
    masked = [b for b, row in enumerate(row_indices) if row in masks]
    if not masked:
        return logits_BV
    vocab_size, device = logits_BV.shape[1], logits_BV.device
    num_bytes = -(-vocab_size // 8)
    packed = bytearray().join(masks[row_indices[b]][:num_bytes].ljust(num_bytes, b"\0") for b in masked)
    packed_MP = upload_tensor(torch.frombuffer(packed, dtype=torch.uint8).view(len(masked), num_bytes), device)
    bits_8 = torch.arange(8, dtype=torch.uint8, device=device)
    allowed_MV = (packed_MP[:, :, None] >> bits_8 & 1).view(len(masked), -1)[:, :vocab_size].bool()
    masked_M = upload(masked, device)
    return logits_BV.index_copy(0, masked_M, logits_BV[masked_M].masked_fill(~allowed_MV, -torch.inf))
