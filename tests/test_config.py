"""RuntimeConfig refuses what cannot work, naming the field."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", 3),
        ("model_path", 7),
        ("tokenizer_path", ["x"]),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("device", None),
        ("dtype", "int4"),
        ("dtype", torch.int32),
        ("quantization", "int4"),
        ("quantization", None),
        ("quantization", True),
        ("kv_cache_dtype", "int8"),
        ("kv_cache_dtype", torch.bfloat16),
        ("attention_backend", "cudnn"),
        ("attention_backend", "flashinfer"),
        ("max_batch_size", 0),
        ("max_batch_size", 2.0),
        ("max_batch_size", True),
        ("max_seq_length", 1),
        ("page_size", 0),
        ("page_size", "16"),
        ("kv_cache_pages", 1),
        ("kv_cache_memory_fraction", 0.0),
        ("kv_cache_memory_fraction", 1.5),
        ("priority_ageing_s", -1),
        ("enable_prefix_cache", "yes"),
        ("compile", True),
        ("max_prefill_tokens", 0),
        ("max_queue_size", 0),
        ("image_threads", 0),
        ("max_image_pixels", 0),
        ("adapter_dir", 7),
        ("adapter_cache_dir", 7),
        ("max_adapters", 0),
        ("max_adapter_rank", 0),
        ("adapter_memory_bytes", 0),
        ("adapter_url_template", 7),
        ("adapter_url_template", "example.org/{id}"),
        ("adapter_url_template", "ftp://example.org/{id}"),
        ("adapter_url_template", "https://example.org/adapter"),
        ("adapter_url_template", "https://example.org/{step}"),
        ("adapter_url_template", "https://example.org/{id}/{colour}"),
        ("adapter_url_template", "https://example.org/{id.__class__}"),
        ("adapter_url_template", "https://example.org/{id!r}"),
        ("adapter_url_template", "https://example.org/{id:>9}"),
        ("adapter_url_template", "https://example.org/{}"),
        ("adapter_url_template", "https://example.org/{id"),
        ("adapter_url_template", "https://{id}.example.org/{id}"),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_weights_path_is_another_name_for_model_path() -> None:
    assert RuntimeConfig(weights_path="~/m.pt").weights == Path("~/m.pt").expanduser()
    assert RuntimeConfig(model_path="/x").weights == Path("/x")
    with pytest.raises(ConfigError, match="weights_path"):
        RuntimeConfig(model_path="/x", weights_path="/y")


def test_templates_of_adapter_urls_have_an_id_or_a_fine_tune_in_their_path() -> None:
    for path in ("{id}", "{finetune_id}.pt", "{finetune_id}/{step}?x={{1}}"):
        template = f"https://example.org/{path}"
        assert RuntimeConfig(adapter_url_template=template).adapter_url_template == template


@pytest.mark.parametrize(
    ("given", "name"), [("bf16", "bfloat16"), (torch.bfloat16, "bfloat16"), ("fp32", "float32"), ("half", "float16")]
)
def test_dtypes_have_many_spellings(given: Any, name: str) -> None:
    assert RuntimeConfig(dtype=given).dtype_name == name


@pytest.mark.parametrize("quantization", ["fp8", "fp8-experts"])
def test_quantization_needs_the_triton_kernels_and_goes_with_everything_else(quantization: str) -> None:
    with pytest.raises(ConfigError, match=rf"^quantization: '{quantization}' .*sdpa.* leave one of the two out"):
        RuntimeConfig(quantization=quantization, attention_backend="sdpa")
    config = RuntimeConfig(quantization=quantization, adapter_dir="/adapters", refiner_path="/refiner")
    assert config.quantization == quantization


@pytest.mark.parametrize(("given", "name"), [("auto", "auto"), ("bf16", "bfloat16"), ("bfloat16", "bfloat16")])
def test_dtypes_of_the_cache_have_two_spellings(given: str, name: str) -> None:
    assert RuntimeConfig(kv_cache_dtype=given).kv_cache_dtype_name == name


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        RuntimeConfig().model = "moondream2"  # type: ignore[misc]


def test_every_field_says_what_it_is_for() -> None:
    for field in fields(RuntimeConfig):
        assert field.metadata["help"].endswith("."), field.name
