"""The header of a GGUF file: its metadata, and where each tensor lies. Weights are not read.

The `gguf` package has a reader too. It makes several arrays for every element of a list, which takes seconds for the
vocabulary of a current model, and a file that is cut off fails there with an error of numpy.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kestrel.errors import CheckpointError, shown

if TYPE_CHECKING:  # it takes 50 ms to import, and most models need none of it
    from gguf import GGMLQuantizationType

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 4
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Codes of `struct` by the number that the format gives a type."""

T = TypeVar("T")


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies in its file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """As torch has it: the last size is the one of a row."""
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    """In the order of the file, under its own names."""

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist; check the path, or download the file")
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file; download or copy it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Parser(path, content).header()

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, default, lambda value: isinstance(value, str), "a text")

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, default, lambda value: isinstance(value, bool), "true or false")

    def count(self, key: str, default: int | None = None) -> int:
        return self._typed(key, default, lambda value: type(value) is int and value >= 0, "a whole number")

    def number(self, key: str, default: float | None = None) -> float:
        value = self._typed(key, default, lambda value: type(value) in (int, float), "a number")
        import numpy as np  # noqa: PLC0415 - the name of a file is judged without it

        return float(str(np.float32(value)))  # the decimal that somebody wrote: 1e-05, not 9.999999747e-06

    def texts(self, key: str) -> list[str]:
        return self._typed(key, None, lambda value: _is_list(value, str), "a list of texts")

    def counts(self, key: str) -> list[int]:
        return self._typed(key, None, lambda value: _is_list(value, int), "a list of whole numbers")

    def numbers(self, key: str) -> list[float]:
        return self._typed(key, None, lambda value: _is_list(value, float), "a list of numbers")

    def refusal(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key} is {shown(self.values.get(key))}; {problem}")

    def _typed(self, key: str, default: T | None, fits: Callable[[Any], bool], expected: str) -> T:
        value = self.values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: the key {key} is missing; convert the model to GGUF again")
        if not fits(value):
            raise self.refusal(key, f"expected {expected}; convert the model to GGUF again")
        return value


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and (not value or type(value[0]) is kind)  # all entries have one type


class _Parser:
    """Walks through the mapped header. All numbers are little-endian."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.content = content
        self.size = len(content)
        self.at = len(_MAGIC)
        self.reading = "its first bytes"

    def header(self) -> GgufHeader:
        version = self.scalar("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self.path} is GGUF of version {version} or of another byte order; supported are the versions 2 and "
                "3, little-endian: convert the model again"
            )
        num_tensors, num_values = self.scalar("Q"), self.scalar("Q")
        values = self.distinct(self.value_entries(num_values))
        entries = self.distinct(self.tensor_entries(num_tensors))
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise self.damaged(f"general.alignment is {shown(alignment)}")
        start = -(-self.at // alignment) * alignment
        return GgufHeader(
            self.path, values, {name: self.placed(name, start, *entry) for name, entry in entries.items()}
        )

    def value_entries(self, count: int) -> Iterator[tuple[str, Any]]:
        for _ in range(count):
            key = self.reading = self.string()
            yield key, self.value(self.scalar("I"))

    def tensor_entries(self, count: int) -> Iterator[tuple[str, tuple[tuple[int, ...], int, int]]]:
        for _ in range(count):
            name = self.reading = self.string()
            num_dimensions = self.scalar("I")
            if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
                raise self.damaged(f"the tensor {name} has {num_dimensions} dimensions")
            shape = self.scalars("Q", num_dimensions)[::-1]
            yield name, (shape, self.scalar("I"), self.scalar("Q"))

    def placed(self, name: str, start: int, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415

        try:
            found = GGMLQuantizationType(kind)
        except ValueError:
            raise CheckpointError(
                f"{self.path}: the tensor {name} has the unknown type {kind}; install a newer release of the package "
                "gguf, or use a file with another quantisation"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[found]
        if shape[-1] % block:
            raise self.damaged(f"rows of the tensor {name} have {shape[-1]} numbers, not whole blocks of {block}")
        num_bytes = shape[-1] // block * block_bytes
        for size in shape[:-1]:
            num_bytes *= size
        if start + offset + num_bytes > self.size:
            raise self.damaged(f"it ends before the tensor {name} does")
        return GgufTensor(found, shape, start + offset, num_bytes)

    def distinct(self, entries: Iterator[tuple[str, T]]) -> dict[str, T]:
        found: dict[str, T] = {}
        for name, entry in entries:
            if name in found:
                raise self.damaged(f"{name} is in it twice")
            found[name] = entry
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"))
        if kind not in _SCALARS:
            raise self.damaged(f"{self.reading} has the unknown type {kind}")
        value = self.scalar(_SCALARS[kind])
        return bool(value) if kind == _BOOL else value

    def array(self, kind: int, count: int) -> list[Any]:
        if kind in _SCALARS:
            values = self.scalars(_SCALARS[kind], count)
            return [bool(value) for value in values] if kind == _BOOL else list(values)
        if kind == _ARRAY:
            raise self.damaged(f"{self.reading} is a list of lists")
        if count > self.size:  # each entry takes bytes
            raise self.cut_off()
        return [self.value(kind) for _ in range(count)]

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        num_bytes = struct.calcsize(code) * count
        if self.at + num_bytes > self.size:
            raise self.cut_off()
        found = struct.unpack_from(f"<{count}{code}", self.content, self.at)
        self.at += num_bytes
        return found

    def string(self) -> str:
        start = self.at + 8
        if start > self.size:
            raise self.cut_off()
        self.at = start + int.from_bytes(self.content[start - 8 : start], "little")
        if self.at > self.size:
            raise self.cut_off()
        # Some vocabularies hold pieces of characters.
        return self.content[start : self.at].decode("utf-8", errors="surrogateescape")

    def cut_off(self) -> CheckpointError:
        return self.damaged(f"it ends within {self.reading}")

    def damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {problem}; download or copy it again")
