"""Configuration from the environment is the one that the command line would make of it."""

from __future__ import annotations

import pytest

from kestrel.config import RuntimeConfig, runtime_config_from
from kestrel.errors import ConfigError


def test_nothing_set_is_the_default() -> None:
    assert runtime_config_from({"PATH": "/bin", "KESTREL_PORT": "80", "KESTREL_MODEL": ""}) == RuntimeConfig()


def test_every_kind_of_value_is_read() -> None:
    found = runtime_config_from(
        {
            "KESTREL_MODEL": "moondream2",
            "KESTREL_WEIGHTS": "/weights",
            "KESTREL_DEVICE": "cpu",
            "KESTREL_MAX_BATCH_SIZE": "4",
            "KESTREL_KV_CACHE_MEMORY_FRACTION": "0.5",
            "KESTREL_ENABLE_PREFIX_CACHE": "No",
            "KESTREL_MAX_SEQ_LENGTH": "100",
        }
    )
    assert found == RuntimeConfig(
        model="moondream2",
        model_path="/weights",
        device="cpu",
        max_batch_size=4,
        kv_cache_memory_fraction=0.5,
        enable_prefix_cache=False,
        max_seq_length=100,
    )


def test_the_first_spelling_wins() -> None:
    assert runtime_config_from({"KESTREL_MODEL_PATH": "/a", "KESTREL_WEIGHTS": "/b"}).model_path == "/a"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("KESTREL_MAX_BATCH_SIZE", "four", "a whole number"),
        ("KESTREL_PRIORITY_AGEING_S", "soon", "a number"),
        ("KESTREL_ENABLE_PREFIX_CACHE", "perhaps", "true or false"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_variable(name: str, value: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: must be {wanted} .got '{value}'"):
        runtime_config_from({name: value})


def test_a_value_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_batch_size"):
        runtime_config_from({"KESTREL_MAX_BATCH_SIZE": "0"})
