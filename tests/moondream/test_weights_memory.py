"""Loading holds the model and little more: the peak of resident memory in a fresh process, measured from outside.

Growth is the process's highest resident size (VmHWM; it includes touched pages of mapped files) during the load, less
its resident size before, against the bytes of the loaded parameters. Files and model are both bfloat16, where a second
copy would weigh most.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.random_weights import write_random_folder

from .weight_sets import ROOT, golden_config

MEASURE = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from kestrel.models.weight_files import open_checkpoint
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.weights import load_moondream
import json

def resident_bytes(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) * 1024

def load(folder):
    config = MoondreamConfig.from_dict(json.loads((Path(folder) / "config.json").read_text()))
    with open_checkpoint(Path(folder)) as checkpoint:
        return load_moondream(checkpoint, config, "cpu", torch.bfloat16)

load(sys.argv[1])
before = resident_bytes("VmRSS")
model = load(sys.argv[2])
weights = sum(p.numel() * p.itemsize for p in model.parameters())
print(resident_bytes("VmHWM") - before, weights)
"""


def large_config() -> MoondreamConfig:
    """About 110 million parameters, most of them in blocks, as in the real models."""
    config = golden_config("md2")
    text = replace(config.text, dim=1024, ff_dim=4096, n_heads=16, n_kv_heads=16, n_layers=8, vocab_size=8192)
    vision = replace(config.vision, proj_out_dim=1024)
    return replace(config, text=text, vision=vision, region=replace(config.region, dim=1024))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(("naming", "shards"), [("hub", 1), ("hub", 3), ("pt", 1)])
def test_peak_memory_stays_within_1_3_of_the_weights(tmp_path: Path, naming: Literal["hub", "pt"], shards: int) -> None:
    write_random_folder(tmp_path, large_config(), 0, "{}", naming=naming, shards=shards)
    # The small golden model is loaded first, so that what torch sets up on first use is not counted.
    command = [sys.executable, "-c", MEASURE, str(ROOT / "md2"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    growth_bytes, weights_bytes = map(int, result.stdout.split())
    assert weights_bytes > 200e6
    assert weights_bytes < growth_bytes * 1.01
    assert growth_bytes <= 1.3 * weights_bytes
