"""From a configuration to a running engine, with a progress bar while it loads."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kestrel import default_model
from kestrel.cli.console import note, stderr_console
from kestrel.config import RuntimeConfig, environment_names, runtime_config_from
from kestrel.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from kestrel.engine import InferenceEngine
    from kestrel.skills.base import ModelProfile


def refuse_local_settings(config: RuntimeConfig) -> None:
    """For a command that asks a server: a flag of a model here is a mistake, a variable is meant for other commands
    too."""
    by_variables = runtime_config_from(os.environ)
    for field in fields(RuntimeConfig):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        if value != getattr(by_variables, field.name):
            raise ConfigError(field.name, "is for a model loaded here; leave it or --endpoint out")
        name = next(name for name in environment_names(field) if os.environ.get(name))
        note(f"{name} is for a model loaded here; it has no effect on the server at --endpoint")


def check_model(config: RuntimeConfig) -> None:
    """Refuses a model that nobody knows, and files and folders that are not there, before anything else is loaded."""
    from kestrel.known_models import check_source  # noqa: PLC0415 - help needs none of it

    check_source(config)
    for name, path in (("tokenizer_path", config.tokenizer_file), ("refiner_path", config.refiner_file)):
        if path is not None and not os.path.exists(path):
            raise CheckpointError(f"{path} does not exist; check {name}")
    template = config.chat_template_file
    if template is not None and not os.path.exists(template):
        raise ConfigError("chat_template", f"{template} does not exist; give a file with a template")
    if config.adapter_folder is not None:
        from kestrel.adapters.sources.folder import require_folder  # noqa: PLC0415

        require_folder(config.adapter_folder)


def note_default_model(config: RuntimeConfig) -> None:
    """Say what an answer comes from when nobody chose the model; for when there is an answer, not a refusal."""
    if config.model is None and config.weights is None:
        note(default_model.COMMAND_NOTICE)


def require_skill(profile: ModelProfile, skill: str) -> None:
    """The skill itself would refuse too, and name `embed`, which is no verb."""
    from kestrel.skills.builtin import not_supported, supported_skills  # noqa: PLC0415

    if skill not in supported_skills(profile):
        raise not_supported(profile, skill, hidden=("embed",))


@asynccontextmanager
async def open_engine(config: RuntimeConfig) -> AsyncIterator[InferenceEngine]:
    """An engine that is shut down at the end: drained normally, immediately after an error or Ctrl-C."""
    check_model(config)
    from asyncio import CancelledError  # noqa: PLC0415

    from kestrel.engine import InferenceEngine  # noqa: PLC0415 - it imports torch

    with LoadingBars(stderr_console()) as bars:
        try:
            engine = await InferenceEngine.create(config, progress=bars)
        except CancelledError:
            bars.abandon()
            raise
    async with engine:
        yield engine


class LoadingAbandoned(Exception):
    """Raised inside the loading thread to end it early."""


class LoadingBars:
    """A `Progress` callable that draws one bar per label, only on a terminal, and wipes them at the end."""

    def __init__(self, console: Console) -> None:
        from rich.progress import (  # noqa: PLC0415
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._started = False
        self._abandoned = threading.Event()
        self._tasks: dict[str, Any] = {}

    def __call__(self, label: str, done_bytes: int, total_bytes: int) -> None:
        """Called on the loading thread. The display starts with the first call: downloads draw bars of their own."""
        if self._abandoned.is_set():
            raise LoadingAbandoned
        if not self._started:
            self._started = True
            self._bars.start()
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=total_bytes)
        self._bars.update(self._tasks[label], completed=done_bytes, total=total_bytes)

    def abandon(self) -> None:
        """Nobody waits any more: the next call ends the loading thread."""
        self._abandoned.set()

    def __enter__(self) -> LoadingBars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._started:
            self._bars.stop()
