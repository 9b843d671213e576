"""kestrel tune from the command line, as far as it goes without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .conftest import Kestrel


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_is_missing_and_writes_nothing(
    kestrel: Kestrel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = kestrel("tune")
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("error: tune: torch sees no NVIDIA GPU on this machine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--random", "tiny"), "--random: 'tiny' has no kernels to tune; use one of: MD2, MD3"),
        (("--random", "MD2", "--ops", "layer_norm"), "--ops: --random decides which operations are tuned"),
        (("--ops", ","), "--ops: names no operation"),
        (("--time-limit", "0"), "--time-limit: must be above 0 seconds (got 0)"),
        (("--time-limit", "nan"), "--time-limit: must be above 0 seconds (got nan)"),
        (("--time-limit", "soon"), "Invalid value for '--time-limit'"),
        (("--output", "table.csv"), "--output: table.csv is not a table; name a file that ends in .json"),
        (("--output", "no/such/folder/t.json"), "--output: no/such/folder is not a folder; create it first"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], message: str, kestrel: Kestrel) -> None:
    told = kestrel("tune", *arguments)
    assert told.code == 2
    assert message in told.err
    assert told.err.count("\n") == 1


def test_help_says_what_it_is_for(kestrel: Kestrel) -> None:
    told = kestrel("tune", "--help")
    assert told.code == 0
    assert "fastest block sizes of the Triton kernels on this GPU" in told.out
