"""A model of the tiny shape, smaller still, with three by three patches; and a batch of made-up tasks for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kestrel.moondream.config import MoeConfig, MoondreamConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.skills.base import RegionIds
from kestrel.tokens import CoordToken, SizeToken, TextToken
from kestrel.train.model import initialise, tiny_config
from kestrel.train.objective import TaskTensors
from kestrel.train.packing import PackedTasks, pack
from kestrel.train.tasks.example import EncodedTask
from tests.moondream.goldens import config_dict

IDS = RegionIds(5, 6, 7, 9)
SIDE = 42
IMAGE_POSITIONS = 10


def small_model(seed: int = 0) -> MoondreamModel:
    tokenizer = MoondreamConfig.from_dict(config_dict("md3")).tokenizer
    config = tiny_config(320, tokenizer)
    moe = MoeConfig(num_experts=4, start_layer=1, experts_per_token=2, expert_inner_dim=16)
    text = replace(
        config.text, dim=64, ff_dim=96, n_layers=3, n_heads=2, n_kv_heads=2, prefix_attn=IMAGE_POSITIONS, moe=moe
    )
    vision = replace(
        config.vision,
        enc_dim=32,
        enc_ff_dim=48,
        enc_n_layers=2,
        enc_n_heads=2,
        proj_out_dim=64,
        proj_inner_dim=48,
        crop_size=SIDE,
        overlap_margin=1,
    )
    region = replace(config.region, dim=64)
    return initialise(MoondreamModel(replace(config, text=text, vision=vision, region=region)), seed)


def small_packed(rows: int = 2) -> PackedTasks:
    tasks = [
        EncodedTask((TextToken(1), TextToken(30), TextToken(3)), (TextToken(40), TextToken(0))),
        EncodedTask(
            (TextToken(1), CoordToken(0.25), SizeToken(0.3, 0.6), TextToken(3)),
            (CoordToken(0.5), CoordToken(0.75), SizeToken(0.2, 0.4), TextToken(0)),
        ),
        EncodedTask((TextToken(0), TextToken(33)), (TextToken(44), TextToken(45), TextToken(0)), sees_image=False),
    ]
    return pack([tasks] * rows, 16, IDS, IMAGE_POSITIONS)


def small_batch(rows: int = 2) -> tuple[Tensor, TaskTensors]:
    pixels = np.random.default_rng(5).integers(0, 255, (rows, SIDE, SIDE, 3), dtype=np.uint8)
    return torch.from_numpy(pixels), TaskTensors.upload(small_packed(rows), torch.device("cpu"))
