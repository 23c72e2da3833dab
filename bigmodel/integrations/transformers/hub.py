"""The folder in which a model's files lie: a local one, or the hub's cache after the files that are needed have come there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from ...constants import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from ...errors import CheckpointError, CheckpointNotFoundError
from ...loading.location import HubRepository, located
from ...loading.remote import explained
from ...loading.workers import in_order

__all__ = ["config_folder", "resolve"]

_WEIGHTS: Final = (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME)
"""What a checkpoint can begin with; the first one that the repository has is taken, the others are not fetched."""
_DOWNLOADS: Final = 8
"""Shards fetched at once."""


def resolve(
    path_or_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """The folder with the configuration and the weights of a model, or the GGUF file that has both.

    A model on the hub is `owner/name`, also as `owner/name@revision` or `hf://owner/name`. Of one in GGUF files alone the only file is
    fetched, or the one that `hf://owner/name/file.gguf` names; of others only `config.json`, `generation_config.json`, the weights in one
    format (and code, if it may run), all of one commit, into huggingface_hub's cache. Endpoint, token, cache folder and offline mode are
    those of huggingface_hub's environment variables (`HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE`).

    Raises:
        CheckpointNotFoundError: neither a folder nor a model on the hub, or one without configuration or weights. CheckpointError: the hub
        refuses access or cannot be reached, or has several GGUF files, which are listed.
    """
    path = Path(path_or_id)
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.exists():
        raise CheckpointError(f"{os.fspath(path)!r} is a file. Give the folder that holds it and its config.json.")
    repository = _repository(os.fspath(path_or_id), revision)
    return explained(repository.name, repository.revision, partial(_fetched, repository, local_files_only, trust_remote_code))


def _repository(name: str, revision: str | None) -> HubRepository:
    place = located(name)
    if not isinstance(place, HubRepository):
        return HubRepository(name, revision)  # the hub's client says what is wrong with it
    if place.path and not place.path.endswith(".gguf"):
        raise CheckpointError(f"{place}: give the model's repository alone, {place.name!r}, or a GGUF file in it.")
    return replace(place, revision=revision or place.revision)


def _fetched(repository: HubRepository, local_files_only: bool, trust_remote_code: bool) -> Path:
    name = repository.name
    fetch = partial(hf_hub_download, name, revision=repository.revision, local_files_only=local_files_only)
    if repository.path:
        return Path(fetch(repository.path))
    try:
        folder = Path(fetch("config.json")).parent
        # The cache names the folder after the commit: everything else comes from the same one, whatever happens to the branch meanwhile.
        fetch = partial(hf_hub_download, name, revision=folder.name, local_files_only=local_files_only)
        _fetch_rest(name, fetch)
    except (EntryNotFoundError, CheckpointNotFoundError) as error:
        is_offline = local_files_only or isinstance(error, LocalEntryNotFoundError)
        gguf = _only_gguf(repository, is_offline)
        if gguf is None:
            raise
        return Path(fetch(gguf))
    if trust_remote_code:
        snapshot_download(name, revision=folder.name, local_files_only=local_files_only, allow_patterns="*.py")
    return folder


def _only_gguf(repository: HubRepository, is_offline: bool) -> str | None:
    """The GGUF file of a repository, or of what the cache has of it; None where there is none. Raises `CheckpointError` for several."""
    if is_offline:
        try:
            folder = Path(snapshot_download(repository.name, revision=repository.revision, local_files_only=True))
        except LocalEntryNotFoundError:
            return None
        names = [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")]
    else:
        names = [name for name in HfApi().list_repo_files(repository.name, revision=repository.revision) if name.endswith(".gguf")]
    if len(names) > 1:
        listed = ", ".join(sorted(names)[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        example = replace(repository, path=min(names))
        raise CheckpointError(f"The model {repository.name!r} has several GGUF files: {listed}. Name the one that is meant: '{example}'.")
    return names[0] if names else None


def config_folder(repository: HubRepository, *, trust_remote_code: bool = False) -> Path | None:
    """The folder in the hub's cache with a model's `config.json`, which is fetched (and code, if it may run), but no weights.

    None where the repository has none. Raises `CheckpointNotFoundError` and `CheckpointError` as `resolve` does.
    """
    name, subfolder = repository.name, f"{repository.path}/" if repository.path else ""

    def fetch() -> str | None:
        try:
            return hf_hub_download(name, f"{subfolder}config.json", revision=repository.revision)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            return None

    config = explained(name, repository.revision, fetch)
    if config is None:
        return None
    if trust_remote_code:
        explained(name, repository.revision, partial(snapshot_download, name, revision=repository.revision, allow_patterns="*.py"))
    return Path(config).parent


def _fetch_rest(name: str, fetch: Callable[[str], str]) -> None:
    """Fetches the weights and the generation configuration. Raises `CheckpointNotFoundError` where there are no weights."""
    unreachable = None
    start = None
    for file in ("generation_config.json", *_WEIGHTS):
        try:
            found = fetch(file)
        except LocalEntryNotFoundError as error:
            # Without a connection: not in the cache, perhaps because the repository lacks it.
            unreachable = error
        except EntryNotFoundError:
            continue
        else:
            if file in _WEIGHTS:
                start = found
                break
    if start is None:
        missing = CheckpointNotFoundError(f"The model {name!r} has a configuration but no weights: none of {', '.join(_WEIGHTS)} is there.")
        raise unreachable or missing
    if not start.endswith(".json"):
        return
    try:
        shards = sorted(set(json.loads(Path(start).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{start} of the model {name!r} is not an index of shards: {error!r}") from error
    in_order(fetch, shards, _DOWNLOADS)
