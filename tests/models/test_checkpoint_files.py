"""Weights files: listing without data, reading, and every way a file can be wrong."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kestrel.errors import CheckpointError
from kestrel.models.checkpoint_files import Checkpoint, TensorInfo, open_tensor_file

TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "fp8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
    "bytes": torch.tensor([1, 2], dtype=torch.uint8),
}


def write(path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file(TENSORS, path)
    else:
        torch.save(TENSORS, path)
    return path


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.pth"])
def test_headers_and_data_equal_what_was_saved(tmp_path: Path, name: str) -> None:
    file = open_tensor_file(write(tmp_path / name))
    assert dict(file.tensors) == {key: TensorInfo(tuple(t.shape), t.dtype) for key, t in TENSORS.items()}
    for key, expected in TENSORS.items():
        assert torch.equal(file.read(key).float(), expected.float())


def test_num_bytes_counts_elements_times_size() -> None:
    assert TensorInfo((2, 3), torch.bfloat16).num_bytes == 12
    assert TensorInfo((), torch.float32).num_bytes == 4


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_read_works_again_after_close_and_tensors_outlive_it(tmp_path: Path, name: str) -> None:
    file = open_tensor_file(write(tmp_path / name))
    before = file.read("a")
    file.close()
    assert torch.equal(before, TENSORS["a"])
    assert torch.equal(file.read("a"), TENSORS["a"])


def test_checkpoint_maps_at_most_one_file_at_a_time(tmp_path: Path) -> None:
    files = []
    for index in range(2):
        save_file({f"t{index}": torch.full((3,), float(index))}, tmp_path / f"{index}.safetensors")
        files.append(open_tensor_file(tmp_path / f"{index}.safetensors"))
    with Checkpoint(tmp_path, files) as checkpoint:
        assert list(checkpoint.tensors) == ["t0", "t1"]
        assert torch.equal(checkpoint.read("t0"), torch.zeros(3))
        assert torch.equal(checkpoint.read("t1"), torch.ones(3))
        assert [file._handle is not None for file in files] == [False, True]
    assert [file._handle is not None for file in files] == [False, False]


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
@pytest.mark.parametrize("keep", [0, 7, 0.5, -1])
def test_a_truncated_file_names_itself_and_the_remedy(tmp_path: Path, name: str, keep: float) -> None:
    path = write(tmp_path / name)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if 0 < keep < 1 else int(keep)])
    with pytest.raises(CheckpointError, match=rf"(?s){name} is .*download"):
        open_tensor_file(path)


def test_a_damaged_pt_pickle_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "w.pt")
    data = bytearray(path.read_bytes())
    start = data.find(b"data.pkl") + 40
    data[start : start + 20] = b"\xff" * 20
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"w\.pt"):
        open_tensor_file(path)


def test_pickled_objects_are_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"a": Fraction(1, 2)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt holds pickled objects.*safetensors"):
        open_tensor_file(tmp_path / "w.pt")


def test_the_old_torch_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"old torch format.*torch\.save"):
        open_tensor_file(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [([torch.ones(1)], "holds a list"), ({"state": {"a": torch.ones(1)}}, "dict under 'state'"), ({"n": 3}, "int")],
)
def test_a_pt_file_must_be_one_flat_dictionary(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=message):
        open_tensor_file(tmp_path / "w.pt")


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        open_tensor_file(path)


def test_missing_file_and_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_tensor_file(tmp_path / "w.safetensors")
    (tmp_path / "w.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"w\.bin is not a weights file.*\.safetensors"):
        open_tensor_file(tmp_path / "w.bin")
