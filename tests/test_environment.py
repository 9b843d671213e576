"""Configuration from the environment is the one that the command line would make of it."""

from __future__ import annotations

import os
import subprocess
import sys

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


SHOW_SPINS = """
import os, sys
import kestrel.main
num_cores = int(sys.argv[1])
os.cpu_count = lambda: num_cores
sys.argv = ["kestrel", "--version"]
try:
    kestrel.main.main()
finally:
    print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("given", "cores", "spins"),
    [
        ({}, 2, "1000"),
        ({}, 64, None),
        ({"GOMP_SPINCOUNT": "7"}, 2, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 2, None),
    ],
)
def test_the_command_line_lets_threads_spin_briefly_unless_it_is_told_otherwise(
    given: dict[str, str], cores: int, spins: str | None
) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", SHOW_SPINS, str(cores)],
        env={**kept, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"{spins} False"
