"""The files of a checkpoint in a repository on the Hugging Face hub: those in its cache from there, the others by ranges."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

from ...errors import BigModelError, CheckpointError, CheckpointNotFoundError
from ..choose import choose
from ..entry import FileIdentity
from ..index import parse_index
from ..local import local_parts
from ..location import CachePlace, CheckpointFile, HubRepository, RemoteFile
from ..parts import Parts
from .headers import read_index
from .retry import ATTEMPTS, TRANSIENT, wait

__all__ = ["explained", "repository_parts"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 30.0
"""Longest wait for the list of a repository's files, where the cache does not have them; else huggingface_hub's `HF_HUB_ETAG_TIMEOUT`."""
ATTEMPTS_BEFORE_CACHE: Final = 2
"""At that list, where the cache has the files."""
TABLE_ENDING: Final = ".metadata"
REFUSALS: Final = (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError, HFValidationError)


def repository_parts(repository: HubRepository, *, keep: bool = False) -> Parts:
    """The files of a repository's checkpoint, all of one commit; with `keep`, remote ones know their place in the cache.

    A hub that does not answer is soon given up where the cache has a whole checkpoint of the revision: then that is used.

    Raises `CheckpointNotFoundError` where there is no such repository, revision or checkpoint, and `CheckpointError` where the hub refuses
    access, or cannot be reached and the cache does not have the repository.
    """
    cached: Parts | CheckpointError
    try:
        cached = _cached_parts(repository)
    except CheckpointError as error:
        cached = error
    # A table of contents alone does not tell whether what it names is there.
    is_cached = isinstance(cached, Parts) and not any(file.name.endswith(TABLE_ENDING) for file in cached.files)
    ask = partial(
        HfApi(endpoint=constants.ENDPOINT).model_info,
        repository.name,
        revision=repository.revision or constants.DEFAULT_REVISION,
        files_metadata=True,
        timeout=constants.HF_HUB_ETAG_TIMEOUT if is_cached else ANSWER_SECONDS,
    )
    attempts = ATTEMPTS_BEFORE_CACHE if is_cached else ATTEMPTS
    said: Exception | None = None
    for failures in range(1, attempts + 1):
        try:
            info = ask()
        except REFUSALS as error:
            raise _explanation(repository.name, repository.revision, error) from error
        # Offline mode and a hub that cannot be reached come as errors of several HTTP libraries.
        except Exception as error:
            said = error
            if getattr(getattr(error, "response", None), "status_code", None) not in TRANSIENT:
                break
            if failures < attempts:
                wait(failures, None, None)
        else:
            return _listed_parts(repository, info, keep)
    if not isinstance(cached, Parts):
        raise cached
    if not isinstance(said, OfflineModeIsEnabled):
        logger.warning(
            "%s: the hub does not answer (%s: %s); what its cache has is used: %s",
            *(repository, type(said).__name__, str(said).partition("\n")[0][:200], cached.location),
        )
    return cached


def _cached_parts(repository: HubRepository) -> Parts:
    """The files that the cache has. What else of the repository it lacks (a README) does not matter."""
    name = repository.name
    fetch = partial(snapshot_download, name, revision=repository.revision, local_files_only=True, allow_patterns=[])
    try:
        return local_parts(Path(explained(name, repository.revision, fetch)) / repository.path)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"The hub cannot be reached (or is not to be), and the model {name!r} is not in its cache, or not all of it: {error}"
        ) from error


def _listed_parts(repository: HubRepository, info: Any, keep: bool) -> Parts:
    commit = str(info.sha)
    found = HubRepository(repository.name, commit, repository.path)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    files: dict[str, CheckpointFile] = {}

    def place_of(path: str) -> CachePlace | None:
        sibling = siblings[path]
        etag = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
        storage = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=found.name, repo_type="model")
        return None if etag is None else CachePlace(storage, repository.revision or constants.DEFAULT_REVISION, commit, path, etag)

    def file_of(path: str) -> CheckpointFile:
        if path not in siblings:
            raise CheckpointNotFoundError(f"{found}: the repository has no file {path!r}.")
        if path not in files:
            cached = try_to_load_from_cache(found.name, path, revision=commit)
            url = hf_hub_url(found.name, path, revision=commit, endpoint=constants.ENDPOINT)
            files[path] = Path(cached) if isinstance(cached, str) else RemoteFile(url, place_of(path) if keep else None)
        return files[path]

    def index_of(path: str) -> dict[str, str]:
        file = file_of(path)
        if keep and isinstance(file, RemoteFile):
            download = partial(hf_hub_download, found.name, path, revision=commit, endpoint=constants.ENDPOINT)
            file = Path(explained(found.name, commit, download))
        return read_index(file) if isinstance(file, RemoteFile) else parse_index(file.read_bytes(), file)

    folder = f"{repository.path}/" if repository.path else ""
    if repository.path in siblings:
        chosen: str | list[str] = repository.path if repository.path.endswith(".json") else [repository.path]
        folder = f"{repository.path.rpartition('/')[0]}/" if "/" in repository.path else ""
    else:
        names = [path.removeprefix(folder) for path in siblings if path.startswith(folder) and "/" not in path.removeprefix(folder)]
        picked = choose(names, str(found))
        chosen = folder + picked if isinstance(picked, str) else [folder + name for name in picked]
    weight_map: dict[str, CheckpointFile] = {}
    if isinstance(chosen, str):
        weight_map = {name: file_of(folder + shard) for name, shard in index_of(chosen).items()}
        ordered = tuple(sorted(set(weight_map.values()), key=lambda file: file.name))
    else:
        ordered = tuple(file_of(path) for path in chosen)
    if any(path.endswith(TABLE_ENDING) for path in chosen):  # it tells what lies in others
        for path in siblings:
            if path.startswith(folder):
                file_of(path)
    sizes = {files[path]: siblings[path].size for path in files}
    # Content under a commit never changes, so the size is all that has to be known.
    identities: dict[CheckpointFile, FileIdentity] = {
        file: FileIdentity(size, 0, 0) for file, size in sizes.items() if isinstance(file, RemoteFile) and size is not None
    }
    return Parts(str(found), ordered, weight_map, identities, lambda name: file_of(folder + name))


def explained(name: str, revision: str | None, call: Callable[[], T]) -> T:
    """Runs a request to the hub about the repository `name`; what goes wrong becomes one of bigmodel's errors, with what to do."""
    try:
        return call()
    except BigModelError:
        raise
    # The hub's client lets errors of several HTTP libraries through.
    except Exception as error:
        raise _explanation(name, revision, error) from error


def _explanation(name: str, revision: str | None, error: Exception) -> CheckpointError:
    if isinstance(error, HFValidationError):
        return CheckpointNotFoundError(f"{name!r} is neither a folder nor the id of a model on the hub ('owner/name').")
    if isinstance(error, GatedRepoError):
        return CheckpointError(f"The model {name!r} is gated: accept its conditions on the hub and log in (`hf auth login`).")
    if isinstance(error, RevisionNotFoundError):
        return CheckpointNotFoundError(f"The model {name!r} has no branch, tag or commit {revision!r}.")
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointNotFoundError(
            f"{name!r} is neither a folder nor a model on the hub. If it is a private model, log in first (`hf auth login`)."
        )
    if isinstance(error, LocalEntryNotFoundError):
        return CheckpointNotFoundError(
            f"The hub cannot be reached (or is not to be), and the model {name!r} is not in its cache, or not all of it: {error}"
        )
    if isinstance(error, EntryNotFoundError):
        return CheckpointNotFoundError(f"The model {name!r} on the hub lacks a file: {error}")
    return CheckpointError(f"The model {name!r} cannot be fetched from the hub: {error!r}")
