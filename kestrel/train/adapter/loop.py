"""The training loop of an adapter: steps of AdamW on its factors, looks at held-out pictures, early stopping.

The base is frozen. A step depends on its number, the factors and the optimiser's state alone, and these are what a
saved state holds; so a resumed run does exactly what an uninterrupted one would have done.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kestrel.adapters import Adapter, AdapterShape, AdapterTarget, LowRankPair
from kestrel.adapters.formats import OWN_FORMAT
from kestrel.errors import ConfigError, NumericalError
from kestrel.layers.adapt import Adapt
from kestrel.models.adapting import SingleAdapter
from kestrel.skills.base import RegionIds
from kestrel.train.adapter.encoding import EmbeddedPictures, RowOrder, TrainingRow
from kestrel.train.loop import adamw, cosine_lr
from kestrel.train.model import MoondreamModel
from kestrel.train.objective import Losses, TaskTensors, answer_losses, hidden_states
from kestrel.train.packing import pack

Ending = Literal["all steps are done", "it no longer got better", "the time is up", "interrupted"]


@dataclass(frozen=True)
class LoopPlan:
    steps: int
    steps_between_looks: int
    batch_size: int
    lr: float
    final_lr: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    patience: int
    max_seconds: float
    log_every: int
    seed: int

    def lr_at(self, step: int) -> float:
        """Depends on the step alone: a stopped and resumed run has the rates of one that was not."""
        return cosine_lr(self.lr, self.final_lr, self.warmup_steps, step, step / max(1, self.steps))


@dataclass(frozen=True)
class StepLine:
    """Means over the steps since the last line; `val_loss` where a look was taken."""

    step: int
    pictures: int
    pictures_per_s: float
    seconds: float
    lr: float
    loss: float
    text: float
    coord: float
    size: float
    token_accuracy: float
    val_loss: float | None
    val_f1: float | None = None
    val_ap50: float | None = None


@dataclass(frozen=True)
class HeldOut:
    """How well the factors locate objects in held-out pictures."""

    f1: float
    ap50: float | None
    """None of points."""


Examiner: TypeAlias = Callable[[Adapter], HeldOut]
"""Asks for objects in held-out pictures through an adapter."""


class LoopWatcher(Protocol):
    """Told what happens; keeps what is to be kept."""

    def on_line(self, line: StepLine) -> None: ...

    def on_better(self, state: TrainingState) -> None:
        """The factors as they are now are the best so far."""
        ...

    def on_state(self, state: TrainingState) -> None: ...


class AdapterTask:
    """A frozen model, its pictures and its rows: what an adapter is trained and judged on."""

    def __init__(self, model: MoondreamModel, shape: AdapterShape, pictures: EmbeddedPictures, ids: RegionIds) -> None:
        self.model = model.requires_grad_(False).eval()
        self.device = model.text.wte.device
        self.dtype = model.text.wte.dtype
        self._shape = shape
        self._pictures = pictures
        self._ids = ids

    def adapt(self, adapter: Adapter) -> Adapt:
        return SingleAdapter(adapter, self._shape, self.device, self.dtype)

    def losses(self, rows: Sequence[TrainingRow], adapt: Adapt) -> tuple[Losses, int]:
        """And the number of labels."""
        length = max(sum(task.num_inputs for task in row.tasks) for row in rows)
        positions = 1 + self.model.config.vision.num_patches
        packed = pack([row.tasks for row in rows], length, self._ids, positions)
        tasks = TaskTensors.upload(packed, self.device)
        pictures = self._pictures.batch([row.picture for row in rows])
        hidden = hidden_states(self.model, pictures, tasks, adapt)
        return answer_losses(self.model, hidden, tasks), len(tasks.label_at)

    @torch.no_grad()
    def judge(self, rows: Sequence[TrainingRow], adapter: Adapter, batch_size: int) -> float:
        """The loss over rows, a label counting the same in every batch."""
        adapt = self.adapt(adapter)
        total, num_labels = 0.0, 0
        with deterministic():
            for first in range(0, len(rows), batch_size):
                found, count = self.losses(rows[first : first + batch_size], adapt)
                total += found.total.item() * count
                num_labels += count
        return total / max(1, num_labels)


def train_adapter(
    task: AdapterTask,
    factors: Factors,
    train: Sequence[TrainingRow],
    val: Sequence[TrainingRow],
    plan: LoopPlan,
    state: TrainingState,
    watcher: LoopWatcher,
    should_stop: Callable[[], bool],
    examine: Examiner | None = None,
) -> Ending:
    """Goes on from `state`, which it brings up to date together with the factors. `examine` is asked at each look."""
    optimiser = adamw(factors.parameters(), lr=plan.lr, weight_decay=plan.weight_decay)
    if state.step:
        factors.assign(state.factors)
        optimiser.load_state_dict(state.optimiser)
    order = RowOrder(len(train), plan.batch_size, plan.seed)
    window = _Window(state.seconds)
    while True:
        ending = _ending(state, plan, window, should_stop)
        if ending is not None:
            break
        lr = plan.lr_at(state.step)
        with deterministic():
            found, _ = task.losses([train[index] for index in order.batch(state.step)], task.adapt(factors.adapter()))
            found.total.backward()
            _step(optimiser, factors, lr, plan.clip_norm)
        state.step += 1
        window.add(found, plan.batch_size)
        look = state.step % plan.steps_between_looks == 0 or state.step == plan.steps
        seen = _look(task, factors, val, plan, state, watcher, examine) if look and val else _Look()
        if look or state.step % plan.log_every == 0:
            watcher.on_line(window.close(state.step, plan.batch_size, lr, seen))
        if look:
            _save(state, factors, optimiser, window, watcher)
    _save(state, factors, optimiser, window, watcher)
    return ending


def _ending(state: TrainingState, plan: LoopPlan, window: _Window, should_stop: Callable[[], bool]) -> Ending | None:
    if state.step >= plan.steps:
        state.has_ended = True
        return "all steps are done"
    if plan.patience and state.looks_since_best >= plan.patience:
        state.has_ended = True
        return "it no longer got better"
    if window.seconds_of_run >= plan.max_seconds:
        return "the time is up"
    return "interrupted" if should_stop() else None


def _step(optimiser: torch.optim.AdamW, factors: Factors, lr: float, clip_norm: float) -> None:
    nn.utils.clip_grad_norm_(factors.parameters(), clip_norm)
    for group in optimiser.param_groups:
        group["lr"] = lr
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class _Look:
    loss: float | None = None
    held_out: HeldOut | None = None


def _look(
    task: AdapterTask,
    factors: Factors,
    val: Sequence[TrainingRow],
    plan: LoopPlan,
    state: TrainingState,
    watcher: LoopWatcher,
    examine: Examiner | None,
) -> _Look:
    loss = _finite(task.judge(val, factors.adapter(), plan.batch_size), state.step)
    held_out = None if examine is None else examine(factors.adapter())
    if state.best_loss is None or loss < state.best_loss:
        state.best_loss, state.best_step, state.looks_since_best = loss, state.step, 0
        state.keep_held_out(held_out)
        watcher.on_better(state)
    else:
        state.looks_since_best += 1
    return _Look(loss, held_out)


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise NumericalError(f"the loss at step {step} is not a finite number; start again with a lower --lr")
    return loss


def _save(
    state: TrainingState, factors: Factors, optimiser: torch.optim.AdamW, window: _Window, watcher: LoopWatcher
) -> None:
    state.factors, state.optimiser, state.seconds = factors.values(), optimiser.state_dict(), window.seconds
    watcher.on_state(state)


class _Window:
    """Means over the steps since the last line, and the time."""

    def __init__(self, seconds_before: float) -> None:
        self._before = seconds_before
        self._start = self._since = time.perf_counter()
        self._found: list[torch.Tensor] = []
        self._pictures = 0

    @property
    def seconds_of_run(self) -> float:
        return time.perf_counter() - self._start

    @property
    def seconds(self) -> float:
        """Of all runs."""
        return self._before + self.seconds_of_run

    def add(self, found: Losses, pictures: int) -> None:
        values = (found.total, found.text, found.coord, found.size, found.token_accuracy)
        self._found.append(torch.stack([value.detach().float() for value in values]))
        self._pictures += pictures

    def close(self, step: int, batch_size: int, lr: float, seen: _Look) -> StepLine:
        means = torch.stack(self._found).mean(0).tolist()
        rate = self._pictures / max(1e-9, time.perf_counter() - self._since)
        self._found, self._pictures, self._since = [], 0, time.perf_counter()
        loss, text, coord, size, accuracy = means
        _finite(loss, step)
        f1, ap50 = (None, None) if seen.held_out is None else (seen.held_out.f1, seen.held_out.ap50)
        return StepLine(
            step, step * batch_size, rate, self.seconds, lr, loss, text, coord, size, accuracy, seen.loss, f1, ap50
        )


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside, equal inputs give equal bits on one machine: no sums in the order in which threads happen to finish."""
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # time for nothing: nobody reads such memory here
    try:
        # The other attention kernels have no deterministic backward pass.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fills


# ---------------------------------------------------------------------- the factors
# The trainable part: a pair beside each chosen matrix of the text model, and nothing else.


class Factors:
    """Factors in fp32. `a` starts small and by chance, `b` at zero: at first the adapter changes nothing."""

    def __init__(
        self,
        shape: AdapterShape,
        matrices: Sequence[str],
        rank: int,
        alpha: float,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        targets = [AdapterTarget(layer, matrix) for layer in range(shape.num_layers) for matrix in matrices]
        if rank % (each := shape.rank_step(targets)):
            raise ConfigError("rank", f"must be a multiple of {each}: a token's {each} experts share it (got {rank})")
        self.rank, self.alpha = rank, alpha
        chance = torch.Generator().manual_seed(seed)
        self._pairs: dict[AdapterTarget, LowRankPair] = {}
        for target in targets:
            a_shape, b_shape = (shape.tensor_shape(target, side, rank) for side in ("a", "b"))
            a = torch.randn(a_shape, generator=chance) * a_shape[-1] ** -0.5
            self._pairs[target] = LowRankPair(
                a.to(device).requires_grad_(True), torch.zeros(b_shape, device=device).requires_grad_(True)
            )

    def parameters(self) -> list[Tensor]:
        return [factor for pair in self._pairs.values() for factor in (pair.a, pair.b)]

    @property
    def num_parameters(self) -> int:
        return sum(factor.numel() for factor in self.parameters())

    def adapter(self, base_model: str | None = None, metadata: Mapping[str, str] | None = None) -> Adapter:
        """On the very factors: what is learnt later shows in it."""
        return Adapter(
            OWN_FORMAT, self.rank, self._pairs, self.alpha, base_model=base_model, metadata=dict(metadata or {})
        )

    def values(self) -> list[Tensor]:
        """A copy on the CPU."""
        return [factor.detach().to("cpu", copy=True) for factor in self.parameters()]

    @torch.no_grad()
    def assign(self, values: Sequence[Tensor]) -> None:
        for factor, value in zip(self.parameters(), values, strict=True):
            factor.copy_(value)


# ---------------------------------------------------------------------- where a run stands
# One file holds enough to go on as if the run had never stopped.

VERSION = 1


@dataclass
class TrainingState:
    """`factors` and `optimiser` are those after `step` steps; `best` are the factors of the best look so far."""

    step: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    best_step: int = 0
    looks_since_best: int = 0
    best_f1: float | None = None
    best_ap50: float | None = None
    """In held-out pictures, of the factors with the best loss; None where nobody looked."""
    has_ended: bool = False
    """Whether all steps are done, or training ended early because it no longer helped."""
    factors: list[Tensor] = field(default_factory=list)
    optimiser: dict[str, Any] = field(default_factory=dict)

    def keep_held_out(self, held_out: HeldOut | None) -> None:
        self.best_f1, self.best_ap50 = (None, None) if held_out is None else (held_out.f1, held_out.ap50)


def write_state(state: TrainingState, made_with: Mapping[str, Any], path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        torch.save({"version": VERSION, "made_with": dict(made_with), "state": vars(state)}, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_state(path: Path, made_with: Mapping[str, Any]) -> TrainingState:
    """Refuses a run that was started with other options, naming the first that differs."""
    if not path.is_file():
        raise ConfigError("resume", f"there is nothing to continue from at {path}; leave --resume out to start")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        stored, state = content["made_with"], TrainingState(**content["state"])
        is_known = content["version"] == VERSION
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, ValueError, OSError) as error:
        raise ConfigError("resume", f"{path} is damaged ({error!r:.200}); give --overwrite to start again") from error
    if not is_known:
        raise ConfigError("resume", f"{path} was written by another version; give --overwrite to start again")
    for name, value in made_with.items():
        if stored.get(name) != value:
            raise ConfigError(
                name,
                f"is {value!r}, the run to resume has {stored.get(name)!r}; give the same, or --overwrite this run",
            )
    return state
