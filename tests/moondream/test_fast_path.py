"""Which operations and numbers are chosen on which device, and what is refused there."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.families import ready_model
from kestrel.kernels.ops import PLAIN
from kestrel.moondream.decoder import MoondreamRuntime
from kestrel.runtime.bring_up import Abilities, FastPath, choose_fast_path
from tests.moondream.goldens import golden

CPU = Abilities("the CPU", None)
VOLTA = Abilities("V100", (7, 0))
AMPERE = Abilities("A100", (8, 0))
HOPPER = Abilities("H200", (9, 0))
WITHOUT_TRITON = Abilities("H200", (9, 0), triton_fault="No module named 'triton'")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def chosen(abilities: Abilities, dtype: torch.dtype = BF16, **settings: Any) -> FastPath:
    return choose_fast_path(RuntimeConfig(**settings), abilities, dtype)


@pytest.mark.parametrize("abilities", [AMPERE, HOPPER])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_gpu_that_can_runs_triton_kernels(abilities: Abilities, backend: str) -> None:
    assert chosen(abilities, attention_backend=backend) == FastPath(True, "none", BF16)


@pytest.mark.parametrize(
    ("abilities", "reason"),
    [
        (CPU, "they need an NVIDIA GPU, and the model runs on the CPU"),
        (VOLTA, "they need compute capability 8.0, and V100 has 7.0"),
        (WITHOUT_TRITON, "Triton cannot be imported (No module named 'triton')"),
    ],
)
def test_where_triton_cannot_run_auto_says_why_and_triton_is_refused(abilities: Abilities, reason: str) -> None:
    path = chosen(abilities)
    assert (path.is_fused, path.make_ops(abilities)) == (False, PLAIN)
    assert path.note == f"attention runs without the Triton kernels (sdpa): {reason}"
    with pytest.raises(ConfigError) as caught:
        chosen(abilities, attention_backend="triton")
    assert str(caught.value) == f"attention_backend: the Triton kernels cannot run: {reason}; use auto or sdpa"


def test_sdpa_is_taken_without_a_word() -> None:
    assert chosen(HOPPER, attention_backend="sdpa") == FastPath(False, "none", BF16, note=None)


@pytest.mark.parametrize(
    ("settings", "kv_dtype"),
    [
        ({}, torch.float16),
        ({"kv_cache_dtype": "bf16"}, BF16),
        ({"kv_cache_dtype": "bfloat16"}, BF16),
        ({"kv_cache_dtype": "fp8"}, FP8),
    ],
)
def test_the_cache_has_the_dtype_of_the_model_unless_another_is_asked_for(
    settings: dict[str, str], kv_dtype: torch.dtype
) -> None:
    assert chosen(HOPPER, torch.float16, **settings).kv_dtype == kv_dtype


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [("quantization", "fp8", "none"), ("quantization", "fp8-experts", "none"), ("kv_cache_dtype", "fp8", "auto")],
)
@pytest.mark.parametrize(
    ("abilities", "reason"),
    [
        (CPU, "float8 needs an NVIDIA GPU"),
        (AMPERE, "float8 needs compute capability 8.9, and A100 has 8.0"),
        (WITHOUT_TRITON, "float8 needs the Triton kernels, which cannot run"),
    ],
)
def test_float8_is_refused_where_it_cannot_be_computed_with(
    field: str, value: str, remedy: str, abilities: Abilities, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(abilities, **{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: '{value}' cannot be used: {reason}")
    assert str(caught.value).endswith(f"; use {remedy}")
    assert chosen(HOPPER, **{field: value}).is_fused


def test_a_cache_of_float8_needs_the_kernels_that_sdpa_forbids() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: .*attention_backend='sdpa'.*use auto"):
        chosen(HOPPER, kv_cache_dtype="fp8", attention_backend="sdpa")


def test_float8_matrices_need_bfloat16_beside_them() -> None:
    with pytest.raises(ConfigError, match=r"quantization: 'fp8' needs dtype bfloat16 .*float32"):
        chosen(HOPPER, torch.float32, quantization="fp8")
    assert chosen(HOPPER, torch.float32, quantization="fp8-experts").quantization == "fp8-experts"


@pytest.mark.parametrize("settings", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_on_a_cpu_a_model_is_not_even_looked_for(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="the model runs on the CPU"):
        ready_model(RuntimeConfig(device="cpu", model_path="/nowhere", **settings))  # pyright: ignore[reportArgumentType]


def test_a_runtime_logs_once_why_it_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kestrel")
    runtime = MoondreamRuntime(golden("md2").model, RuntimeConfig(device="cpu", kv_cache_pages=60))
    told = [record.message for record in caplog.records if not record.message.startswith("memory")]
    assert told == [chosen(CPU).note]
    assert runtime.kv_cache.layer(0)[0].dtype == torch.float32
    MoondreamRuntime(golden("md2").model, RuntimeConfig(device="cpu", kv_cache_pages=60, attention_backend="sdpa"))
    assert [record.message for record in caplog.records].count(told[0]) == 1


def test_a_cache_of_bfloat16_beside_a_model_of_float32() -> None:
    config = RuntimeConfig(device="cpu", kv_cache_pages=60, kv_cache_dtype="bf16")
    assert MoondreamRuntime(golden("md2").model, config).kv_cache.layer(0)[0].dtype == BF16
