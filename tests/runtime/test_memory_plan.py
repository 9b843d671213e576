"""How many KV pages are planned, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.kernels.paged_attention import as_pages
from kestrel.models.contract import DecoderShape
from kestrel.runtime import memory
from kestrel.runtime.attention import PagedKVCache, bytes_per_page
from kestrel.runtime.memory import MemoryPlan, naming_memory_knobs, picture_bytes, plan_pages
from tests.runtime.paged import usual_limits

SHAPE = DecoderShape(
    num_layers=2,
    num_kv_heads=4,
    head_dim=8,
    hidden_dim=32,
    vocab_size=100,
    max_context=1024,
    num_image_positions=729,
)
CPU = torch.device("cpu")


def plan(working_bytes: int = 0, **config: object) -> int:
    return plan_pages(RuntimeConfig(**config), SHAPE, CPU, torch.float32, working_bytes)  # type: ignore[arg-type]


def test_a_page_holds_keys_and_values_of_every_layer() -> None:
    assert bytes_per_page(SHAPE, 16, torch.float32) == 2 * 2 * 16 * 4 * 8 * 4
    cache = PagedKVCache(SHAPE, 10, 16, torch.bfloat16, CPU)
    k, v = cache.layer(1)
    assert k.shape == v.shape == (10 + 1, 16, 4, 8), "ten pages and the spare one"
    assert k.dtype == torch.bfloat16
    assert not k.any()


def test_a_page_lies_head_by_head_on_a_gpu_and_position_by_position_on_a_cpu() -> None:
    pages_PSHD = torch.empty(3, 16, 4, 8)
    assert as_pages(pages_PSHD).stride() == (16 * 4 * 8, 4 * 8, 8, 1)
    elsewhere = as_pages(pages_PSHD.to("meta"))
    assert elsewhere.shape == pages_PSHD.shape
    assert elsewhere.stride() == (16 * 4 * 8, 8, 16 * 8, 1)


def test_configured_pages_are_taken_as_they_are() -> None:
    assert plan(kv_cache_pages=123) == 123


def test_too_few_pages_name_the_least_that_works() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_pages: 10 pages of 16 .* at least 50"):
        plan(kv_cache_pages=10)


def test_no_more_pages_than_are_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: 2**40)
    assert plan(max_batch_size=2) == 2 * 5 * 64


def test_no_more_memory_than_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    page = bytes_per_page(SHAPE, 16, torch.float32)
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: 1000 * page)
    assert plan() == 250
    assert plan(kv_cache_memory_fraction=0.5) == 500
    with pytest.raises(ConfigError, match="kv_cache_memory_fraction"):
        plan(kv_cache_memory_fraction=0.02)


def test_what_steps_need_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    page = bytes_per_page(SHAPE, 16, torch.float32)
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: 1000 * page)
    assert plan(600 * page) == 100
    assert plan(600 * page, kv_cache_pages=400) == 400
    with pytest.raises(ConfigError, match=r"kv_cache_pages: 401 pages .* use at most 400, or lower max_prefill_tokens"):
        plan(600 * page, kv_cache_pages=401)
    with pytest.raises(
        ConfigError, match=r"kv_cache_pages: 60 pages .*; use a smaller model, or lower max_prefill_tok"
    ):
        plan(960 * page, kv_cache_pages=60)
    with pytest.raises(ConfigError, match=r"device: beside the weights .* lower max_prefill_tokens .* or free memory"):
        plan(1001 * page)
    with pytest.raises(ConfigError, match=r"kv_cache_memory_fraction: .* graphs and activations, .*max_prefill_tok"):
        plan(990 * page)


def test_free_memory_is_a_sensible_number() -> None:
    assert 2**27 < memory.free_memory_bytes(CPU) < 2**46


def test_running_out_of_memory_names_what_to_change() -> None:
    message = r"CUDA out of memory.*kv_cache_memory_fraction, max_batch_size"
    with pytest.raises(ConfigError, match=message), naming_memory_knobs():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nand more")


def test_the_report_says_how_large_the_cache_is() -> None:
    limits = usual_limits(1024, num_pages=8192, page_size=16)
    report = str(MemoryPlan.of(SHAPE, limits, torch.bfloat16, CPU, 0))
    assert "0.03 GiB (8192 pages of 16 positions, bfloat16)" in report


def test_the_plan_of_a_gpu_names_all_its_parts_and_their_sum() -> None:
    gib = 2**30
    plan = MemoryPlan(torch.device("cuda:0"), 3 * gib, "9 pages", 4 * gib, gib // 2)
    assert plan.total_bytes == 7.5 * gib
    assert all(part in str(plan) for part in ("KV cache 3.00", "buffers 4.00", "up to 0.50", "7.50 GiB in all"))


def test_pictures_are_in_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    limits = usual_limits(1024, num_pages=8192, page_size=16)
    config = RuntimeConfig(max_pending_image_bytes=2**32, image_work_bytes=2**31, recent_image_bytes=2**26)
    needed = picture_bytes(config, CPU, torch.float32)
    assert needed > 2**32 + 2**31 + 2**26
    plan = MemoryPlan.of(SHAPE, limits, torch.bfloat16, CPU, 0, needed)
    assert f"pictures up to {needed / 2**30:.2f} GiB" in str(plan)
    MemoryPlan.of(SHAPE, limits, torch.bfloat16, CPU, 0, 2**60).warn_if_short()
    assert "lower max_pending_image_bytes, image_work_bytes" in caplog.text


def test_a_model_that_reads_no_pictures_has_none_in_its_plan(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [MemoryPlan(torch.device(device), 2**30, "9 pages") for device in ("cpu", "cuda")]
    assert all("picture" not in str(plan) for plan in plans)
    monkeypatch.setattr("kestrel.runtime.memory.free_host_bytes", lambda: 0)
    plans[0].warn_if_short()
    assert "the KV cache may take 1.0 GiB; lower kv_cache_pages" in caplog.text
