"""Fetching published models from the Hugging Face hub.

huggingface_hub does the work and honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. Files are fetched by commit, and what
the cache holds of a commit is used without asking the network.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from huggingface_hub import _CACHED_NO_EXIST, HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kestrel.errors import CheckpointError
from kestrel.models.checkpoint_files import INDEX_NAME, read_shard_index
from kestrel.models.locate import TOKENIZER_NAME
from kestrel.models.published import COMMIT, HubFile

logger = logging.getLogger("kestrel.models")

ASKING_S = 10.0
WEIGHTS_NAMES = ("model.safetensors", INDEX_NAME)
OPTIONAL_NAMES = (
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
"""What a model folder may hold beside config.json, tokenizer and weights."""


# ---------------------------------------------------------------------- which commit


def resolved(file: HubFile) -> HubFile:
    """The file at the commit that its revision means now; where the hub cannot be asked, what the cache knows of it."""
    if file.is_pinned:
        return file
    try:
        commit = _asked_commit(file)
    except CheckpointError as error:
        commit = None if isinstance(error.__cause__, _FINAL_ANSWERS) else _cached_commit(file)
        if commit is None:
            raise
        reason = str(error.__cause__ or error).partition("\n")[0]
        logger.warning("the hub cannot be asked (%s); the commit of %s in the cache is used", reason, file.revision)
    logger.info(
        "%s of %s is commit %s; a branch or tag may move, --revision %s keeps this commit",
        file.revision, file.repo, commit, commit,
    )  # fmt: skip
    return replace(file, revision=commit)


def note_commit(path: Path, revision: str) -> None:
    """Writes into the cache that a revision is the commit of a fetched file, for a start without the hub.

    The library does the same for what is fetched by a branch's name.
    """
    snapshot = path.parent
    if COMMIT.fullmatch(snapshot.name) is None or snapshot.parent.name != "snapshots" or revision == snapshot.name:
        return
    reference = snapshot.parent.parent / "refs" / revision
    with suppress(OSError):  # a cache that may only be read
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(snapshot.name)


_FINAL_ANSWERS = (RepositoryNotFoundError, RevisionNotFoundError)
"""Of a hub that can be asked, whatever the cache holds."""


def _asked_commit(file: HubFile) -> str:
    try:
        commit = HfApi().model_info(file.repo, revision=file.revision, timeout=ASKING_S).sha
    except Exception as error:  # network failures have other types in every version of the library
        raise _failure(file, error) from error
    if commit is None or COMMIT.fullmatch(commit) is None:
        raise CheckpointError(f"could not fetch {file}: the hub names no commit of it; give one with --revision")
    return commit


def _cached_commit(file: HubFile) -> str | None:
    path = _from_cache(file)  # in a folder that is named after the commit
    return path.parent.name if path is not None and COMMIT.fullmatch(path.parent.name) else None


# ---------------------------------------------------------------------- one file, and the weights


def fetch_weights(file: HubFile) -> Path:
    """The local path of a weights file or shard index, with every shard beside it."""
    path = fetch_file(file)
    if path.suffix == ".json":
        for shard in sorted(set(read_shard_index(path).values())):
            fetch_file(replace(file, name=shard))
    return path


def fetch_file(file: HubFile) -> Path:
    try:
        with _one_line_about_retries():
            return _from_cache(file) or Path(hf_hub_download(file.repo, file.name, revision=file.revision))
    except Exception as error:  # as above
        raise _failure(file, error) from error


@contextmanager
def _one_line_about_retries() -> Iterator[None]:
    """The library warns twice at each of its attempts; one line says as much."""
    told: list[str] = []

    def is_passed_on(record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        if not told:
            told.append(record.getMessage())
            logger.warning("the model hub does not answer; trying again")
        return False

    requests = logging.getLogger("huggingface_hub.utils._http")
    requests.addFilter(is_passed_on)
    try:
        yield
    finally:
        requests.removeFilter(is_passed_on)


def fetch_if_there(file: HubFile) -> Path | None:
    """None where the repository has no such file."""
    if try_to_load_from_cache(file.repo, file.name, revision=file.revision) is _CACHED_NO_EXIST:
        return None
    try:
        return fetch_file(file)
    except CheckpointError as error:
        if _says_absent(error.__cause__):
            return None
        raise


def _from_cache(file: HubFile) -> Path | None:
    try:
        return Path(hf_hub_download(file.repo, file.name, revision=file.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


# ---------------------------------------------------------------------- a whole model folder


def fetch_folder(config: HubFile, *, with_tokenizer: bool) -> Path:
    """Everything of a text model that lies beside its config.json, which is given at a commit."""
    folder = fetch_file(config).parent
    if with_tokenizer and fetch_if_there(replace(config, name=TOKENIZER_NAME)) is None:
        raise CheckpointError(
            f"{config.repo} at {config.revision} has no {TOKENIZER_NAME}; save one with transformers "
            "(AutoTokenizer.from_pretrained, then save_pretrained), and pass it with --tokenizer-path"
        )
    try:
        for name in OPTIONAL_NAMES:
            fetch_if_there(replace(config, name=name))
    except CheckpointError as error:
        logger.warning("%s; of %s, what the cache has is used", error, ", ".join(OPTIONAL_NAMES))
    _fetch_safetensors(config)
    return folder


def _fetch_safetensors(config: HubFile) -> None:
    files = [replace(config, name=name) for name in WEIGHTS_NAMES]
    cached = next((file for file in files if _from_cache(file) is not None), None)
    found = cached or next((file for file in files if fetch_if_there(file) is not None), None)
    if found is None:
        raise CheckpointError(
            f"{config.repo} at {config.revision} has no safetensors weights ({' or '.join(WEIGHTS_NAMES)}), and no "
            "others are fetched by name; download its files and pass them with --model-path, or save it again as "
            "safetensors with transformers (save_pretrained)"
        )
    fetch_weights(found)


# ---------------------------------------------------------------------- why not


def _failure(file: HubFile, error: Exception) -> CheckpointError:
    return CheckpointError(f"could not fetch {file}: {_remedy(file, error)}")


def _says_absent(error: BaseException | None) -> bool:
    """Whether the hub itself said that a file is not there."""
    return isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)


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
