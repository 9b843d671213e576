"""The labelling benchmark labels what it says, with and without a model."""

from __future__ import annotations

from kestrel.bench.engine import load_model
from kestrel.config import RuntimeConfig
from kestrel.labelling.benchmark import _squares, measure, measure_alone
from tests.moondream.coarse import coarse_folder


async def test_figures_are_of_the_same_pictures() -> None:
    config = RuntimeConfig(model_path=coarse_folder("md3"), device="cpu", kv_cache_pages=200, max_batch_size=2)
    found = await measure(load_model(config, None), config, list(_squares(4, 40)), num_rounds=1)
    assert found.share == found.label_per_s / found.flood_per_s
    assert min(found.flood_cpu_ms, found.label_cpu_ms, found.rss_early_mib) > 0
    alone = await measure_alone(_squares(4, 40))
    assert 0 < alone.label_cpu_ms < found.label_cpu_ms
