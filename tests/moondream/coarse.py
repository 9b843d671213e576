"""The golden models and the embedded one with a coarse look: 144 patches a crop instead of 729, three vision layers.

For tests that compare a model with itself and are not about pictures: encoding and prefilling one is most of what they
would wait for. What the reference computed does not hold for these, and the embedded model sees nothing that is there.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from kestrel import default_model
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.random_models import tiny_random_parts

from .goldens import ROOT, Golden, GoldenTokenizer
from .naive import NaiveMoondream

EMBEDDED = default_model.NAME
NUM_LAYERS = 3
GRID, COARSE_GRID = 27, 12
POSITIONS = 1 + COARSE_GRID**2
"""Of a picture in a sequence, with the token before it."""


def _source(name: str) -> Path:
    return default_model.FOLDER if name == EMBEDDED else ROOT / name


def coarse_config_dict(name: str) -> dict[str, Any]:
    given = json.loads((_source(name) / "config.json").read_text())
    look = {
        "crop_size": COARSE_GRID * given["vision"]["enc_patch_size"],
        "enc_n_layers": NUM_LAYERS,
        "overlap_margin": 1,
    }
    return {**given, "vision": given["vision"] | look, "text": given["text"] | {"prefix_attn": POSITIONS}}


@cache
def coarse_tensors(name: str) -> dict[str, Tensor]:
    """Every second position of the grid, the first layers, all else as it is."""
    whole = load_file(_source(name) / "model.safetensors")
    kept = {key: value for key, value in whole.items() if _layer_of(key) < NUM_LAYERS}
    positions = kept["model.vision.pos_emb"].unflatten(1, (GRID, GRID))
    kept["model.vision.pos_emb"] = positions[:, 1:25:2, 1:25:2].flatten(1, 2).contiguous()
    return kept


def _layer_of(key: str) -> int:
    parts = key.removeprefix("model.vision.blocks.").split(".")
    return int(parts[0]) if parts[0].isdigit() else 0


@cache
def coarse(family: str) -> Golden:
    config = MoondreamConfig.from_dict(coarse_config_dict(family))
    model = MoondreamModel(config).eval()
    weights = {key.removeprefix("model."): value.float() for key, value in coarse_tensors(family).items()}
    model.load_state_dict(weights, strict=True)
    tokenizer = GoldenTokenizer(_source(family) / "tokenizer.json")
    return Golden(config, model, tokenizer, NaiveMoondream(model, config, tokenizer), cases={}, onepass={})


@cache
def coarse_folder(name: str) -> Path:
    """The same as a model folder, there as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="kestrel-coarse-")) / name
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(coarse_config_dict(name)))
    shutil.copy(_source(name) / "tokenizer.json", folder)
    save_file(coarse_tensors(name), folder / "model.safetensors")
    return folder


def coarse_tiny_parts() -> tuple[MoondreamConfig, Tokenizer]:
    """`tiny_random_parts`, looking as coarsely."""
    config, tokenizer = tiny_random_parts()
    vision = replace(config.vision, crop_size=COARSE_GRID * config.vision.enc_patch_size, overlap_margin=1)
    return replace(config, vision=vision, text=replace(config.text, prefix_attn=POSITIONS)), tokenizer
