"""All weights of one Moondream: text, vision and region. No generation."""

from __future__ import annotations

import torch
from torch import nn

from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.region import RegionModel
from kestrel.moondream.text import TextModel
from kestrel.moondream.vision import VisionModel


class MoondreamModel(nn.Module):
    """`state_dict` names equal the published ones after `model.`.

    Built under `torch.device("meta")` it takes no memory; after `load_state_dict(assign=True)` call `reset_buffers`.
    """

    def __init__(self, config: MoondreamConfig) -> None:
        super().__init__()
        self.config = config
        self.text = TextModel(config.text)
        self.vision = VisionModel(config.vision)
        self.region = RegionModel(config.region)

    def reset_buffers(self, device: torch.device | str) -> None:
        """Computes what no checkpoint holds (rotary tables) on `device`."""
        self.text.reset_buffers(device)
