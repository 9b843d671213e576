"""Fetching published models from the Hugging Face hub.

huggingface_hub does the work and honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. Files are fetched by commit, and what
the cache holds of a commit is used without asking the network. What a tag or branch of a registered model meant at its
first fetch is recorded beside the cache and stays.
"""

from __future__ import annotations

import json
import logging
import os
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

RECORD_NAME = "kestrel-revisions.json"
"""In the folder of the cache: commits by repository and revision."""
ASKING_S = 10.0
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository at a revision: a commit, tag or branch."""

    repo: str
    revision: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.repo} at {self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether its revision is a commit, which nobody can move."""
        return _COMMIT.fullmatch(self.revision) is not None


@dataclass(frozen=True, slots=True)
class HubSource:
    """Where a model is published."""

    weights: HubFile
    """The weights file, or the index of its shards."""
    tokenizer: HubFile


def settled(file: HubFile) -> HubFile:
    """The file at the commit that its revision meant when it was first fetched."""
    if file.is_pinned:
        return file
    key = f"{file.repo}@{file.revision}"
    commit = _recorded().get(key) or _cached_commit(file)
    if commit is None:
        commit = _asked_commit(file)
        logger.info("%s is commit %s of %s; it is used from now on", file.revision, commit, file.repo)
    _record(key, commit)
    return replace(file, revision=commit)


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


def _record_file() -> Path:
    return Path(constants.HF_HUB_CACHE) / RECORD_NAME


def _recorded() -> dict[str, str]:
    try:
        content = json.loads(_record_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    items = content.items() if isinstance(content, dict) else ()
    return {key: commit for key, commit in items if isinstance(commit, str) and _COMMIT.fullmatch(commit)}


def _record(key: str, commit: str) -> None:
    known, file = _recorded(), _record_file()
    if known.get(key) == commit:
        return
    written = file.with_name(f".{file.name}-{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps({**known, key: commit}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(written, file)
    except OSError as error:
        logger.warning("commit %s of %s cannot be recorded in %s (%s)", commit, key, file, error.strerror)


def _remedy(file: HubFile, error: Exception) -> str:
    page = f"https://huggingface.co/{file.repo}"
    if isinstance(error, GatedRepoError):
        return f"access is gated; request it at {page}, then run `hf auth login` or set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"{page} does not exist or is private; if you have access, run `hf auth login` or set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"{page} has no revision {file.revision}; give another --revision, or pass a folder as --model-path"
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set and the cache lacks the file; unset it, or pass --model-path"
        return "the hub cannot be reached; check the network, or download the model elsewhere and pass --model-path"
    if isinstance(error, EntryNotFoundError):
        return f"{page} has no such file; download the model yourself and pass --model-path"
    return f"{error}; check the network and HF_TOKEN, or download the model elsewhere and pass --model-path"
