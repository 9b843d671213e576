"""The golden models with a coarse look: 144 patches a crop instead of 729, three vision layers instead of 27.

For tests that compare a model with itself and are not about pictures: encoding and prefilling one is most of what they
would wait for. What the reference computed does not hold for these.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.model import MoondreamModel

from .goldens import ROOT, Golden, GoldenTokenizer, config_dict, tensors
from .naive import NaiveMoondream

NUM_LAYERS = 3
GRID, COARSE_GRID = 27, 12
POSITIONS = 1 + COARSE_GRID**2
"""Of a picture in a sequence, with the token before it."""


def coarse_config_dict(family: str) -> dict[str, Any]:
    given = config_dict(family)
    look = {
        "crop_size": COARSE_GRID * given["vision"]["enc_patch_size"],
        "enc_n_layers": NUM_LAYERS,
        "overlap_margin": 1,
    }
    return {**given, "vision": given["vision"] | look, "text": given["text"] | {"prefix_attn": POSITIONS}}


@cache
def coarse_tensors(family: str) -> dict[str, Tensor]:
    """Every second position of the grid, the first layers, all else as it is."""
    kept = {name: value for name, value in tensors(family, "model").items() if _layer_of(name) < NUM_LAYERS}
    positions = kept["model.vision.pos_emb"].unflatten(1, (GRID, GRID))
    kept["model.vision.pos_emb"] = positions[:, 1:25:2, 1:25:2].flatten(1, 2).contiguous()
    return kept


def _layer_of(name: str) -> int:
    parts = name.removeprefix("model.vision.blocks.").split(".")
    return int(parts[0]) if parts[0].isdigit() else 0


@cache
def coarse(family: str) -> Golden:
    config = MoondreamConfig.from_dict(coarse_config_dict(family))
    model = MoondreamModel(config).eval()
    weights = {name.removeprefix("model."): value.float() for name, value in coarse_tensors(family).items()}
    model.load_state_dict(weights, strict=True)
    tokenizer = GoldenTokenizer(ROOT / family / "tokenizer.json")
    return Golden(config, model, tokenizer, NaiveMoondream(model, config, tokenizer), cases={}, onepass={})


@cache
def coarse_folder(family: str) -> Path:
    """The same as a model folder, there as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="kestrel-coarse-")) / family
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(coarse_config_dict(family)))
    shutil.copy(ROOT / family / "tokenizer.json", folder)
    save_file(coarse_tensors(family), folder / "model.safetensors")
    return folder
