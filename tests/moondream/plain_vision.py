"""A block of the vision tower written out in torch's own functions: what the shared layers must give."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from kestrel.moondream.vision import VisionBlock


def plain_block(block: nn.Module, x_NPD: Tensor) -> Tensor:
    assert isinstance(block, VisionBlock)
    num_crops, num_patches, dim = x_NPD.shape
    y_NPD = functional.layer_norm(x_NPD, (dim,), block.ln1.weight, block.ln1.bias)
    qkv = functional.linear(y_NPD, block.attn.qkv.weight, block.attn.qkv.bias)
    q, k, v = qkv.view(num_crops, num_patches, 3, block.attn.n_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x_NPD = x_NPD + functional.linear(mixed, block.attn.proj.weight, block.attn.proj.bias)
    y_NPD = functional.layer_norm(x_NPD, (dim,), block.ln2.weight, block.ln2.bias)
    hidden = functional.gelu(functional.linear(y_NPD, block.mlp.fc1.weight, block.mlp.fc1.bias), approximate="tanh")
    return x_NPD + functional.linear(hidden, block.mlp.fc2.weight, block.mlp.fc2.bias)
