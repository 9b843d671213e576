"""The streaming writer makes files that the safetensors library reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kestrel.models.checkpoint_files import TensorInfo, write_safetensors

TENSORS = {
    "b": torch.randn(3, 5).bfloat16(),
    "a": torch.randn(2, 2, 2),
    "half": torch.randn(7).half(),
    "fp8": torch.randn(3).to(torch.float8_e4m3fn),
    "transposed": torch.randn(4, 2).T,
    "none": torch.zeros(0, 2),
}
INFOS = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in TENSORS.items()}


def test_written_files_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_safetensors(path, INFOS, iter(TENSORS.items()))
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].float(), tensor.float())


@pytest.mark.parametrize("tensors", [[("a", TENSORS["a"])], [("b", TENSORS["b"].float())], list(TENSORS.items())[:-1]])
def test_what_was_not_announced_is_refused(tmp_path: Path, tensors: list[tuple[str, torch.Tensor]]) -> None:
    with pytest.raises(ValueError, match="announced"):
        write_safetensors(tmp_path / "w.safetensors", INFOS, tensors)
