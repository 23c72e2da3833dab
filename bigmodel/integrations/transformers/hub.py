"""The folder in which a model's files lie: a local one, or the hub's cache after the files that are needed have come there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from ...constants import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from ...errors import CheckpointError, CheckpointNotFoundError
from ...loading.location import HubRepository
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

    Of a model on the hub only `config.json`, `generation_config.json`, the weights in one format (and code, if it may run) are fetched, all
    of one commit, into huggingface_hub's cache. Endpoint, token, cache folder and offline mode are those of huggingface_hub's environment
    variables (`HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE`).

    Raises:
        CheckpointNotFoundError: neither a folder nor a model on the hub, or one without configuration or weights. CheckpointError: the hub
        refuses access or cannot be reached.
    """
    path = Path(path_or_id)
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.exists():
        raise CheckpointError(f"{os.fspath(path)!r} is a file. Give the folder that holds it and its config.json.")
    name = os.fspath(path_or_id)
    fetch = partial(hf_hub_download, name, revision=revision, local_files_only=local_files_only)
    config = explained(name, revision, partial(fetch, "config.json"))
    folder = Path(config).parent
    # The cache names the folder after the commit: everything else comes from the same one, whatever happens to the branch meanwhile.
    fetch = partial(hf_hub_download, name, revision=folder.name, local_files_only=local_files_only)
    explained(name, revision, partial(_fetch_rest, name, fetch))
    if trust_remote_code:
        code = partial(snapshot_download, name, revision=folder.name, local_files_only=local_files_only, allow_patterns="*.py")
        explained(name, revision, code)
    return folder


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
