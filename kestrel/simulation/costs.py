"""What the parts of a step take on a GPU and its host, from a file of measured figures, and the limits that follow.

A step takes the sum of its parts:

    vision_step + vision_crop · crops           of the pictures that are new in it
    prefill_step + prefill_position · positions of the prompts in it
    decode(rows) + key · keys                   of the rows that get a token; keys that rows share cost less

Its host needs `host_step + host_row · rows + host_picture · pictures` to prepare it, while the GPU runs the one before.
A request is read in `read_ms` of the host. Its picture is decoded in `jpeg_ms`, on one of a few threads.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kestrel.errors import ConfigError, did_you_mean, shown
from kestrel.runtime.contract import RuntimeLimits

H200 = Path(__file__).with_name("h200.json")
PAGE_SIZE = 16
STREAMING_PREFILL_TOKENS = 768
CACHED_CONTEXTS_PER_ROW = 4


@dataclass(frozen=True, slots=True)
class Work:
    """Of one step."""

    num_crops: int
    num_pictures: int
    num_positions: int
    """Prefilled."""
    num_prompts: int
    num_rows: int
    """Decoded."""
    num_keys: int
    num_shared_keys: int
    """Read again, for another row."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """One model on one kind of GPU."""

    measured_as: str
    """Model and settings, as rows of `kestrel bench engine` name them."""
    num_image_positions: float
    """0: a text model."""
    max_context: float
    kv_bytes: float
    """Of one position, in all layers."""
    kv_gib: float
    """What the GPU has for keys and values."""
    vision_step_ms: float
    vision_crop_ms: float
    prefill_step_ms: float
    prefill_position_us: float
    decode_ms: tuple[tuple[float, float], ...]
    """(rows, milliseconds without the keys), the fewest rows first; straight lines in between and after, which do
    not fall there."""
    key_ns: float
    shared_key_ns: float
    """Of a key that another row of the step reads too."""
    host_step_ms: float
    host_row_us: float
    host_picture_ms: float
    read_ms: float
    jpeg_ms: float

    @property
    def reads_pictures(self) -> bool:
        return self.num_image_positions > 0

    def gpu_s(self, work: Work) -> float:
        took_ms = 0.0
        if work.num_crops:
            took_ms += self.vision_step_ms + self.vision_crop_ms * work.num_crops
        if work.num_positions:
            took_ms += self.prefill_step_ms + self.prefill_position_us / 1e3 * work.num_positions
        if work.num_rows:
            keys_ns = self.key_ns * work.num_keys + self.shared_key_ns * work.num_shared_keys
            took_ms += self._decode_ms(work.num_rows) + keys_ns / 1e6
        return took_ms / 1e3

    def host_s(self, work: Work) -> float:
        rows_ms = self.host_row_us / 1e3 * (work.num_rows + work.num_prompts)
        return (self.host_step_ms + rows_ms + self.host_picture_ms * work.num_pictures) / 1e3

    def _decode_ms(self, rows: int) -> float:
        points = self.decode_ms
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        after = min(bisect_left(points, (rows, 0.0)), len(points) - 1)
        (x0, y0), (x1, y1) = points[after - 1], points[after]
        return y1 + (max(y1 - y0, 0.0) if rows > x1 else y1 - y0) * (rows - x1) / (x1 - x0)

    def limits(self, max_batch_size: int) -> RuntimeLimits:
        """As an engine with default settings plans them on this GPU. But no pictures ahead: they are encoded beside a
        step, and here a step takes the sum of its parts."""
        pages_of_a_context = -(-int(self.max_context) // PAGE_SIZE)
        useful = max_batch_size * (1 + CACHED_CONTEXTS_PER_ROW) * pages_of_a_context
        budget = 2048
        if max_batch_size >= 16:
            budget = 6144 if self.reads_pictures and max_batch_size >= 64 else 4096
        return RuntimeLimits(
            max_batch_size=max_batch_size,
            max_seq_length=int(self.max_context),
            num_pages=min(useful, int(self.kv_gib * 2**30 / self.kv_bytes / PAGE_SIZE)),
            page_size=PAGE_SIZE,
            max_prefill_tokens=min(budget, max_batch_size * int(self.max_context)),
            steps_in_flight=1,
            streaming_prefill_tokens=STREAMING_PREFILL_TOKENS,
        )


def load_costs(path: Path, model: str) -> StepCosts:
    """The figures of one model in a file; refuses a file that lacks some or has others."""
    models = _read(path)
    if model not in models:
        raise ConfigError(
            "model",
            f"{path.name} has no figures of {shown(model)}; it has {', '.join(models)}{did_you_mean(model, models)}",
        )
    entry = models[model]
    known = {field.name for field in fields(StepCosts)}
    odd = sorted(known ^ (set(entry) - {"from"})) if isinstance(entry, dict) else ["all"]
    if odd:
        raise ConfigError("costs", f"{path}: {model} has missing or unknown figures: {', '.join(odd)}; see {H200}")
    costs = {name: entry[name] for name in known}
    for name, value in costs.items():
        if name == "decode_ms":
            costs[name] = _points(path, value)
        elif name != "measured_as" and not _is_figure(value):
            raise ConfigError("costs", f"{path}: {name} of {model} must be a number from 0 on (got {shown(value)})")
    return StepCosts(**costs)


def _read(path: Path) -> dict[str, Any]:
    try:
        models = json.loads(path.read_bytes())["models"]
    except OSError as error:
        raise ConfigError("costs", f"{path} cannot be read: {error.strerror}; name a file like {H200}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("costs", f"{path} is not JSON with an object 'models'; write it like {H200}") from error
    if not isinstance(models, dict):
        raise ConfigError("costs", f"{path}: 'models' is not an object; write it like {H200}")
    return models


def _points(path: Path, value: object) -> tuple[tuple[float, float], ...]:
    pairs = value if isinstance(value, list) else []
    points = [tuple(pair) for pair in pairs if isinstance(pair, list) and len(pair) == 2 and all(map(_is_figure, pair))]
    rows = [point[0] for point in points]
    if not points or len(points) < len(pairs) or rows != sorted(set(rows)):
        raise ConfigError("costs", f"{path}: decode_ms must be pairs [rows, milliseconds], the fewest rows first")
    return tuple(points)


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
