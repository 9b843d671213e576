"""Loading holds the model and little more: the peak of resident memory in a fresh process.

Growth is the highest resident size of a forked child (VmHWM; it includes touched pages of mapped files) less its size
before the load, against the bytes of the loaded parameters. Files and model are both bfloat16, where a second copy
would weigh most. One file holds it all, which is the hardest case: shards are mapped one after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.weights import build_on_meta

from .weight_sets import ROOT, checkpoint_of, golden_config

MEASURE = """
import json, os, sys
from pathlib import Path

import torch

from kestrel.models.checkpoint_files import open_checkpoint
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.weights import load_moondream


def resident_bytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def load(folder):
    config = MoondreamConfig.from_dict(json.loads((Path(folder) / "config.json").read_text()))
    with open_checkpoint(Path(folder)) as checkpoint:
        return load_moondream(checkpoint, config, "cpu", torch.bfloat16)


torch.set_num_threads(1)
warm_up, *folders = sys.argv[1:]
load(warm_up)
for folder in folders:
    child = os.fork()
    if child == 0:
        before = resident_bytes("VmRSS")
        model = load(folder)
        weights = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
        print(resident_bytes("VmHWM") - before, weights, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def large_config() -> MoondreamConfig:
    """About 110 million parameters, most of them in blocks, as in the real models."""
    config = golden_config("md2")
    text = replace(config.text, dim=1024, ff_dim=4096, n_heads=16, n_kv_heads=16, n_layers=8, vocab_size=8192)
    vision = replace(config.vision, proj_out_dim=1024)
    return replace(config, text=text, vision=vision, region=replace(config.region, dim=1024))


def write_large_model(folder: Path, suffix: str) -> None:
    folder.mkdir()
    config = large_config()
    shapes = {f"model.{name}": parameter.shape for name, parameter in build_on_meta(config).named_parameters()}
    tensors = {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in shapes.items()}
    checkpoint_of(tensors, folder, suffix).close()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_peak_memory_stays_within_1_3_of_the_weights_in_either_format(tmp_path: Path) -> None:
    folders = [tmp_path / "safetensors", tmp_path / "pt"]
    for folder in folders:
        write_large_model(folder, f".{folder.name}")
    # The small golden model is loaded first, so that what torch sets up on first use is not counted.
    command = [sys.executable, "-c", MEASURE, str(ROOT / "md2"), *map(str, folders)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    measured = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert len(measured) == 2
    for growth_bytes, weights_bytes in measured:
        assert weights_bytes > 200e6
        assert 0.95 * weights_bytes < growth_bytes <= 1.3 * weights_bytes
