"""Response formats compiled over one tokenizer's vocabulary, the recent ones kept.

A format is judged by its text, then compiled in a process with limits, and only then here: by that time it is known to
be cheap.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from llguidance import LLTokenizer

from kestrel.constraints.calls import otherwise_in, schemas_in
from kestrel.constraints.cost_limits import check_pattern, check_schema
from kestrel.constraints.formats import ResponseFormat
from kestrel.constraints.matchers import (
    FIELD,
    Compiled,
    MatcherConstraint,
    compile_format,
    read_vocabulary,
    without_control_names,
)
from kestrel.constraints.trials import Trials

CAPACITY = 64
"""Compiled formats kept."""
CAPACITY_BYTES = 256 * 2**20
"""What they may take together."""


class _Kept(NamedTuple):
    compiled: Compiled
    num_bytes: int


class ConstraintCompiler:
    """For one tokenizer. Any thread may call it; compiling can take long and holds up nobody who finds theirs kept."""

    def __init__(
        self, tokenizer_json: Callable[[], str], eos_id: int, capacity: int = CAPACITY, *, are_tried: bool = True
    ) -> None:
        """Without `are_tried` formats are compiled here right away: for those that come from nobody else."""
        self._tokenizer_json = tokenizer_json
        self._eos_id = eos_id
        self._capacity = capacity
        self._lock = threading.Lock()
        self._is_reading = threading.Lock()
        self._vocabulary_json: str | None = None
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[ResponseFormat, _Kept] = OrderedDict()
        self._num_bytes = 0
        self._trials = Trials(self._read_json, eos_id) if are_tried else None

    def __reduce__(self) -> tuple[type[ConstraintCompiler], tuple[Callable[[], str], int, int]]:
        return type(self), (self._tokenizer_json, self._eos_id, self._capacity)  # a copy keeps formats of its own

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def is_prepared(self) -> bool:
        return self._vocabulary is not None

    def is_kept(self, wanted: ResponseFormat) -> bool:
        return wanted in self._kept

    def prepare(self) -> None:
        """Read the vocabulary now. It holds the interpreter for a while, so better before anybody is served."""
        with self._is_reading:
            if self._vocabulary is None:
                self._vocabulary_json = without_control_names(self._tokenizer_json())
                self._vocabulary = read_vocabulary(self._vocabulary_json, self._eos_id)

    def start(self, wanted: ResponseFormat) -> MatcherConstraint:
        """A constraint for one answer. Raises RequestError when the format is invalid, not supported or too costly."""
        with self._lock:
            kept = self._kept.get(wanted)
        if kept is None:
            kept = self._compile(wanted)
        with self._lock:
            self._keep(wanted, kept)
        return MatcherConstraint(kept.compiled)

    def close(self) -> None:
        """End the process of trials; a format that is new would start it again."""
        if self._trials is not None:
            self._trials.close()

    def _keep(self, wanted: ResponseFormat, kept: _Kept) -> None:
        before = self._kept.pop(wanted, None)
        self._kept[wanted] = kept
        self._num_bytes += kept.num_bytes - (before.num_bytes if before is not None else 0)
        while len(self._kept) > self._capacity or (self._num_bytes > CAPACITY_BYTES and len(self._kept) > 1):
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def _compile(self, wanted: ResponseFormat) -> _Kept:
        if wanted.kind == "regex":
            check_pattern(f"{FIELD}.regex", wanted.text)
        elif wanted.kind == "calls":
            for name, schema in schemas_in(wanted).items():
                check_schema(f"{wanted.field}.{name}.parameters", schema)
            otherwise = otherwise_in(wanted)
            if otherwise is not None:
                self._compile(otherwise)  # alone, so that its faults are not said to be of the tools
        else:
            check_schema(f"{FIELD}.json_schema.schema", json.loads(wanted.text))
        num_bytes = self._trials.run(wanted) if self._trials is not None else 0
        self.prepare()
        assert self._vocabulary is not None
        return _Kept(compile_format(self._vocabulary, wanted), num_bytes)

    def _read_json(self) -> str:
        self.prepare()
        assert self._vocabulary_json is not None
        return self._vocabulary_json
