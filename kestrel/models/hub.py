"""Fetching published models from the Hugging Face hub.

huggingface_hub does the work and honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. Files are fetched by commit, and what
the cache holds of a commit is used without asking the network.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kestrel.errors import CheckpointError
from kestrel.models.checkpoint_files import read_shard_index

logger = logging.getLogger("kestrel.models")

ASKING_S = 10.0
_COMMIT = re.compile(r"[0-9a-f]{40}")


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
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    @property
    def page(self) -> str:
        return f"https://huggingface.co/{self.repo}"


@dataclass(frozen=True, slots=True)
class HubSource:
    """Where a model is published."""

    weights: HubFile
    """The weights file, or the index of its shards."""
    tokenizer: HubFile


def resolved(file: HubFile) -> HubFile:
    """The file at the commit that its revision means now; where the hub cannot be asked, what the cache knows of it."""
    if file.is_pinned:
        return file
    try:
        commit = _asked_commit(file)
    except CheckpointError as error:
        commit = _cached_commit(file)
        if commit is None:
            raise
        logger.warning("%s; the commit of %s in the cache is used", error, file.revision)
    logger.info("%s is commit %s of %s", file.revision, commit, file.repo)
    return replace(file, revision=commit)


def fetch_weights(file: HubFile) -> Path:
    """The local path of a weights file or shard index, with every shard beside it."""
    path = fetch_file(file)
    if path.suffix == ".json":
        for shard in sorted(set(read_shard_index(path).values())):
            fetch_file(replace(file, name=shard))
    return path


def fetch_file(file: HubFile) -> Path:
    try:
        return _from_cache(file) or Path(hf_hub_download(file.repo, file.name, revision=file.revision))
    except Exception as error:  # network failures have other types in every version of the library
        raise CheckpointError(f"could not fetch {file}: {_remedy(file, error)}") from error


def _from_cache(file: HubFile) -> Path | None:
    try:
        return Path(hf_hub_download(file.repo, file.name, revision=file.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _asked_commit(file: HubFile) -> str:
    try:
        commit = HfApi().model_info(file.repo, revision=file.revision, timeout=ASKING_S).sha
    except Exception as error:  # as above
        raise CheckpointError(f"could not fetch {file}: {_remedy(file, error)}") from error
    if commit is None or _COMMIT.fullmatch(commit) is None:
        raise CheckpointError(f"could not fetch {file}: the hub names no commit of it; give one with --revision")
    return commit


def _cached_commit(file: HubFile) -> str | None:
    path = _from_cache(file)  # in a folder that is named after the commit
    return path.parent.name if path is not None and _COMMIT.fullmatch(path.parent.name) else None


def _remedy(file: HubFile, error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return f"access is gated; request it at {file.page}, then run `hf auth login` or set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"{file.page} does not exist or is private; if you have access, run `hf auth login` or set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"{file.page} has no revision {file.revision}; give another --revision, or pass a folder as --model-path"
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set and the cache lacks the file; unset it, or pass --model-path"
        return "the hub cannot be reached; check the network, or download the model elsewhere and pass --model-path"
    if isinstance(error, EntryNotFoundError):
        return f"{file.page} has no such file; download the model yourself and pass --model-path"
    return f"{error}; check the network and HF_TOKEN, or download the model elsewhere and pass --model-path"
