"""A published model, and where it is on the hub: what is known of it before anything is fetched. Without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_BRANCH = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"(?!.*(?:--|\.\.))\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?(?<!\.git)", re.ASCII)


def is_repository(name: str) -> bool:
    """Whether a name has the form `org/name`."""
    return _REPOSITORY.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository at a revision: a commit, tag or branch."""

    repo: str
    revision: str | None
    """None: this release knows no commit of it, so that its user has to name one."""
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.repo} at {self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether its revision is a commit, which nobody can move."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    @property
    def page(self) -> str:
        return f"https://huggingface.co/{self.repo}"


@dataclass(frozen=True, slots=True)
class HubSource:
    """Where a model is published."""

    weights: HubFile
    """The weights file, or the index of its shards."""
    tokenizer: HubFile


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One published model."""

    name: str
    family: str
    description: str
    num_parameters: int
    licence: str
    config: Mapping[str, Any]
    """As config.json would hold it."""
    source: HubSource | None
    """None: its weights are not on the hub in a form this engine reads; `source_note` says what to do."""
    source_note: str = ""
    """What is not certain about the source."""


@dataclass(frozen=True, slots=True)
class ShortName:
    """Another name for a repository of the hub, which is fetched as by its own: main as it is now, or a revision."""

    name: str
    family: str
    repo: str
    num_parameters: int
    licence: str
    description: str
