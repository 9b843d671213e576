"""Fetching published models from the Hugging Face hub.

huggingface_hub does the work and honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. What the cache holds at a revision is
used without asking the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kestrel.errors import CheckpointError
from kestrel.models.weight_files import read_shard_index


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository at a revision: a commit, tag or branch."""

    repo: str
    revision: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.repo} at {self.revision}"


@dataclass(frozen=True, slots=True)
class HubSource:
    """Where a model is published."""

    weights: HubFile
    """The weights file, or the index of its shards."""
    tokenizer: HubFile


def fetch_weights(file: HubFile) -> Path:
    """The local path of a weights file or shard index, with every shard beside it."""
    path = fetch_file(file)
    if path.suffix == ".json":
        # A branch may move between two requests; the cache folder is named after the commit that was resolved.
        commit = path.parent.name
        for shard in sorted(set(read_shard_index(path).values())):
            fetch_file(HubFile(file.repo, commit, shard))
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


def _remedy(file: HubFile, error: Exception) -> str:
    page = f"https://huggingface.co/{file.repo}"
    if isinstance(error, GatedRepoError):
        return f"access is gated; request it at {page}, then run `hf auth login` or set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"{page} does not exist or is private; if you have access, run `hf auth login` or set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"{page} has no revision {file.revision}; download the model yourself and pass --model-path"
    if isinstance(error, LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set and the cache lacks the file; unset it, or pass --model-path"
        return "the hub cannot be reached; check the network, or download the model elsewhere and pass --model-path"
    if isinstance(error, EntryNotFoundError):
        return f"{page} has no such file; download the model yourself and pass --model-path"
    return f"{error}; check the network and HF_TOKEN, or download the model elsewhere and pass --model-path"
