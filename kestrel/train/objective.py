"""What the model is asked to get right: next tokens, coordinate bins and size bins of packed tasks.

Each scene is one sequence: the image prefix (BOS and the picture, bidirectional) and behind it several tasks that see
the prefix and themselves, but not each other. Positions restart for every task, as if it stood alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kestrel.images.crops import make_crops, normalise_and_patchify
from kestrel.images.picture import TilingParams, plan_tiling
from kestrel.layers.adapt import Adapt
from kestrel.layers.attention import Heads
from kestrel.layers.mlp import Moe
from kestrel.train.model import MoondreamModel
from kestrel.train.packing import COORD, NO_LABEL, SIZE, PackedTasks

SMOOTHING_BINS = 2.5
COORD_WEIGHT = 0.3
SIZE_WEIGHT = 0.3
BALANCE_WEIGHT = 0.01


@dataclass(frozen=True)
class TaskTensors:
    """`PackedTasks` on the device. Labels are lists: N positions with something to foretell, of which some foretell a
    coordinate and some a size. Their places are found on the host, so that no step waits for the device."""

    input_kind: Tensor  # [B, L]
    input_id: Tensor
    input_value: Tensor  # [B, L, 2]
    position: Tensor
    task: Tensor
    sees_image: Tensor
    label_at: Tensor  # [N] places in the flat B·L
    label_id: Tensor
    label_weight: Tensor
    coord_at: Tensor  # places in the N
    coord: Tensor
    size_at: Tensor
    size: Tensor  # [.., 2]

    @classmethod
    def upload(cls, packed: PackedTasks, device: torch.device) -> TaskTensors:
        def move(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(array).to(device, dtype, non_blocking=True)

        at = np.flatnonzero(packed.label_id != NO_LABEL)
        coord, size = packed.label_coord.reshape(-1)[at], packed.label_size.reshape(-1, 2)[at]
        coord_at, size_at = np.flatnonzero(coord >= 0), np.flatnonzero(size[:, 0] >= 0)
        return cls(
            input_kind=move(packed.input_kind, torch.int64),
            input_id=move(packed.input_id, torch.int64),
            input_value=move(packed.input_value, torch.float32),
            position=move(packed.position, torch.int64),
            task=move(packed.task, torch.int64),
            sees_image=move(packed.sees_image, torch.bool),
            label_at=move(at, torch.int64),
            label_id=move(packed.label_id.reshape(-1)[at], torch.int64),
            label_weight=move(label_weights(packed, at), torch.float32),
            coord_at=move(coord_at, torch.int64),
            coord=move(coord[coord_at], torch.float32),
            size_at=move(size_at, torch.int64),
            size=move(size[size_at], torch.float32),
        )

    def tensors(self) -> list[Tensor]:
        return list(self.__dict__.values())


def label_weights(packed: PackedTasks, at: NDArray[np.int64]) -> NDArray[np.float32]:
    """One over the root of the number of labels in a task: long answers count for more than short ones, but not by
    their length. The mean is one."""
    width = packed.task.shape[1]
    task = (at // width) * width + packed.task.reshape(-1)[at]
    _, index, count = np.unique(task, return_inverse=True, return_counts=True)
    weights = count[index] ** -0.5
    return (weights * len(weights) / max(weights.sum(), 1e-9)).astype(np.float32)


@dataclass(frozen=True)
class Losses:
    total: Tensor
    text: Tensor
    coord: Tensor
    size: Tensor
    balance: Tensor
    token_accuracy: Tensor


class PackedAttention:
    """`Attend` for B packed sequences of equal length. The prefix sees itself and nothing else, so it needs no mask;
    the task positions [B, 1, L, S] have one."""

    def __init__(self, mask_B1LS: Tensor) -> None:
        self._mask = mask_B1LS

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        q_THD, k_THD, v_THD = heads.rotated()
        batch, _, length, total = self._mask.shape
        prefix = total - length
        q, k, v = (t.view(batch, total, *t.shape[1:]).transpose(1, 2) for t in (q_THD, k_THD, v_THD.to(q_THD.dtype)))
        seen = F.scaled_dot_product_attention(q[:, :, :prefix], k[:, :, :prefix], v[:, :, :prefix])
        said = F.scaled_dot_product_attention(q[:, :, prefix:], k, v, attn_mask=self._mask)
        return torch.cat([seen, said], dim=2).transpose(1, 2).reshape(len(q_THD), -1)


def embed_pictures(model: MoondreamModel, pixels_BHWC: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, grid², dim] from pictures of one size, cut as at inference."""
    vision, config = model.vision, model.config.vision
    batch, height, width, _ = pixels_BHWC.shape
    if (height, width) == (config.crop_size, config.crop_size):
        patches = normalise_and_patchify(pixels_BHWC, config.enc_patch_size, dtype)
        features = vision.encode_crops(patches)
        joined = torch.cat([features, features], dim=2).flatten(0, 1)  # one crop is its own only tile
        return vision.proj_mlp(joined).view(batch, -1, config.proj_out_dim)
    tiling = TilingParams(config.crop_size, config.enc_patch_size, config.overlap_margin, config.max_crops)
    plan = plan_tiling(height, width, tiling)
    crops = torch.cat([make_crops(pixels_HWC, plan) for pixels_HWC in pixels_BHWC])
    features = vision.encode_crops(normalise_and_patchify(crops, config.enc_patch_size, dtype))
    per_picture = features.view(batch, plan.num_crops, *features.shape[1:])
    return torch.stack([vision.embed_image(one, (plan.rows, plan.cols)) for one in per_picture])


def embed_tasks(model: MoondreamModel, tasks: TaskTensors) -> Tensor:
    """[B, L, dim]: words, coordinates and sizes as they are fed at inference."""
    x = model.text.embed(tasks.input_id)
    values = tasks.input_value.flatten(0, 1)
    coords = model.region.encode_coord(values[:, 0]).view(x.shape).to(x.dtype)
    sizes = model.region.encode_size(values).view(x.shape).to(x.dtype)
    kind = tasks.input_kind[..., None]
    return torch.where(kind == COORD, coords, torch.where(kind == SIZE, sizes, x))


def packed_mask(tasks: TaskTensors, prefix: int) -> Tensor:
    """[B, 1, L, S]: what each task position sees. Padding sees the prefix, so that no row is empty."""
    index = torch.arange(tasks.task.shape[1], device=tasks.task.device)
    same_task = tasks.task[:, :, None] == tasks.task[:, None, :]
    inner = same_task & (index[:, None] >= index[None, :])
    outer = (tasks.sees_image | (tasks.task < 0))[:, :, None].expand(-1, -1, prefix)
    return torch.cat([outer, inner], dim=2)[:, None]


def hidden_states(
    model: MoondreamModel, pictures_BPD: Tensor, tasks: TaskTensors, adapt: Adapt | None = None
) -> Tensor:
    """[B, L, dim]: the stream at every task position."""
    batch, patches, dim = pictures_BPD.shape
    bos = model.text.embed(torch.full((batch, 1), model.config.tokenizer.bos_id, device=pictures_BPD.device))
    x = torch.cat([bos.to(pictures_BPD.dtype), pictures_BPD, embed_tasks(model, tasks).to(pictures_BPD.dtype)], dim=1)
    prefix = 1 + patches
    positions = torch.cat([torch.arange(prefix, device=x.device).expand(batch, -1), tasks.position], dim=1)
    attend = PackedAttention(packed_mask(tasks, prefix))
    hidden = model.text(x.flatten(0, 1), positions.flatten(), attend, adapt)
    return hidden.view(batch, -1, dim)[:, prefix:]


def smoothed_bin_loss(logits_NC: Tensor, target_bin_N: Tensor) -> Tensor:
    """Cross-entropy against a Gaussian around the true bin: a near miss costs little."""
    bins = torch.arange(logits_NC.shape[-1], device=logits_NC.device)
    weight = torch.exp(-0.5 * ((bins[None] - target_bin_N[:, None]) / SMOOTHING_BINS).square())
    weight = weight / weight.sum(-1, keepdim=True)
    return -(weight * F.log_softmax(logits_NC.float(), dim=-1)).sum(-1).mean()


def region_losses(model: MoondreamModel, hidden_ND: Tensor, tasks: TaskTensors) -> tuple[Tensor, Tensor]:
    coord_loss = size_loss = hidden_ND.sum() * 0.0
    if len(tasks.coord_at):
        logits = model.region.decode_coord(hidden_ND[tasks.coord_at])
        bins = (tasks.coord * logits.shape[-1]).clamp(0, logits.shape[-1] - 1)
        coord_loss = smoothed_bin_loss(logits, bins)
    if len(tasks.size_at):
        logits = model.region.decode_size(hidden_ND[tasks.size_at]).flatten(0, 1)
        top = logits.shape[-1] - 1
        bins = (tasks.size.flatten().clamp(min=2**-10).log2() + 10.0) / 10.0 * top
        size_loss = smoothed_bin_loss(logits, bins.clamp(0, top))
    return coord_loss, size_loss


def answer_losses(model: MoondreamModel, hidden_BLD: Tensor, tasks: TaskTensors) -> Losses:
    """What the answers cost, from the stream at every task position."""
    rows = hidden_BLD.flatten(0, 1)[tasks.label_at]
    logits = model.text.logits(rows).float()
    num_labels = max(1, len(rows))  # a batch may be without any, if none of its tasks fit
    text = (F.cross_entropy(logits, tasks.label_id, reduction="none") * tasks.label_weight).sum() / num_labels
    coord, size = region_losses(model, rows, tasks)
    total = text + COORD_WEIGHT * coord + SIZE_WEIGHT * size
    accuracy = (logits.detach().argmax(-1) == tasks.label_id).float().sum() / num_labels
    return Losses(total, text.detach(), coord.detach(), size.detach(), text.detach() * 0.0, accuracy)


def losses(
    model: MoondreamModel, experts: Sequence[AllExpertsMlp], pixels_BHWC: Tensor, tasks: TaskTensors, dtype: torch.dtype
) -> Losses:
    """`experts` are the mixtures of the model, whose balance is part of the loss."""
    found = answer_losses(model, hidden_states(model, embed_pictures(model, pixels_BHWC, dtype), tasks), tasks)
    balances = [each.balance for each in experts if each.balance is not None]
    if not balances:
        return found
    balance = torch.stack(balances).mean()
    return replace(found, total=found.total + BALANCE_WEIGHT * balance, balance=balance.detach())


# ---------------------------------------------------------------------- experts
# In training every token goes through all of them, the unchosen ones with weight zero. The engine sorts tokens by
# expert and reads counts on the host, which would stop the device in every layer; here two large matrix products do the
# same sum, at the price of arithmetic that a small model can afford.


class AllExpertsMlp(Moe):
    """A `Moe` on the same parameters under the same names. `balance` is 1 when experts are used evenly."""

    def __init__(self, routed: Moe) -> None:
        torch.nn.Module.__init__(self)
        self.experts_per_token = routed.experts_per_token
        self.router, self.fc1, self.fc2 = routed.router, routed.fc1, routed.fc2
        self.balance: Tensor | None = None

    def forward(self, x_TD: Tensor) -> Tensor:
        num_experts, inner = self.fc1.weight.shape[0], self.fc2.weight.shape[2]
        logits_TE = self.router(x_TD).float()
        is_chosen_TE = among_top(logits_TE, self.experts_per_token)
        share_E = is_chosen_TE.float().mean(0) / self.experts_per_token
        self.balance = num_experts * (share_E * logits_TE.softmax(-1).mean(0)).sum()
        weights_TE = logits_TE.masked_fill(~is_chosen_TE, -torch.inf).softmax(-1)
        both = F.linear(x_TD, self.fc1.weight.flatten(0, 1)).view(-1, num_experts, 2, inner)
        hidden, gate = both.unbind(2)
        active = F.gelu(hidden) * (gate + 1.0) * weights_TE[:, :, None]
        fc2_DN = self.fc2.weight.permute(1, 0, 2).flatten(1)
        return F.linear(active.flatten(1).to(x_TD.dtype), fc2_DN)


def among_top(logits_TE: Tensor, k: int) -> Tensor:
    """Whether each is one of the k largest of its row; of equals the first wins."""
    other, own = logits_TE[:, None, :], logits_TE[:, :, None]
    index = torch.arange(logits_TE.shape[1], device=logits_TE.device)
    beats = (other > own) | ((other == own) & (index[None, :] < index[:, None]))
    return beats.sum(-1) < k


@contextmanager
def all_experts(model: MoondreamModel) -> Iterator[list[AllExpertsMlp]]:
    """Inside, every mixture of the model computes all its experts; after it they are the engine's again."""
    routed = {block: block.mlp for block in model.text.blocks if isinstance(block.mlp, Moe)}
    swapped = {block: AllExpertsMlp(mlp) for block, mlp in routed.items()}
    for block, mlp in swapped.items():
        block.mlp = mlp
    try:
        yield list(swapped.values())
    finally:
        for block, mlp in routed.items():
            block.mlp = mlp
