"""What the place of a checkpoint means: something on this machine, a repository on the hub, or a URL."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

from ..errors import CheckpointError
from ..text import kind_text

__all__ = ["CachePlace", "CheckpointFile", "HubRepository", "RemoteFile", "located", "working_folder"]

_SCHEME: Final = r"[A-Za-z][A-Za-z0-9+.-]+"
"""Two letters at least: `C://` is a drive."""
_URL: Final = re.compile(f"(?:{_SCHEME}::)*{_SCHEME}://")
_CHAIN: Final = re.compile(f"((?:{_SCHEME}::)*(?:{_SCHEME}://)?)(.*?)((?:::{_SCHEME}(?:::|://).*)?)", re.DOTALL)
"""Of fsspec: file systems, the path in the one that is named last, and what that one lies in."""
_NAME: Final = r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*"
_HUB_NAME: Final = re.compile(f"({_NAME})(?:@(.+))?", re.ASCII)
_HUB_URL: Final = re.compile(f"hf://({_NAME})(?:@([^/]+))?(/.*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class CachePlace:
    """Where the hub's cache keeps a file."""

    storage: Path
    """The repository's folder in the cache."""
    revision: str
    """As it was asked for."""
    commit: str
    path: str
    """In the repository."""
    etag: str
    """The hash that the hub has recorded: SHA-256 for large files, git's for others."""


@dataclass(frozen=True, slots=True, order=True)
class RemoteFile:
    """A file behind a URL, with as much of a path's interface as a checkpoint's file needs."""

    url: str
    keep: CachePlace | None = field(default=None, compare=False, repr=False)
    """Where it is kept when most of it is read; None where it is not."""

    @property
    def is_web(self) -> bool:
        """Whether it is read over http(s) directly. Everything else is fsspec's."""
        return urlsplit(self.url).scheme.lower() in ("http", "https")

    @property
    def path(self) -> str:
        """Where it lies on its server or in its file system, as it stands in the URL."""
        return urlsplit(self.url).path if self.is_web else self._links[1]

    def with_path(self, path: str) -> RemoteFile:
        """The file at another path; what follows the path (a signature, what fsspec finds it in) is kept."""
        if self.is_web:
            scheme, host, _, query, _ = urlsplit(self.url)
            return RemoteFile(urlunsplit((scheme, host, path, query, "")))
        before, _, behind = self._links
        return RemoteFile(before + path + behind)

    @property
    def name(self) -> str:
        """The last part of the URL's path."""
        return PurePosixPath(unquote(self.path) if self.is_web else self.path).name

    @property
    def _links(self) -> tuple[str, str, str]:
        found = _CHAIN.fullmatch(self.url)
        assert found is not None, self.url  # it fits every text
        return found[1], found[2], found[3]

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return PurePosixPath(self.name).suffix

    def __str__(self) -> str:
        # What follows the path may be a signature, which no message should spread.
        return self.url.partition("?")[0]


CheckpointFile = Path | RemoteFile


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A model's repository on the Hugging Face hub."""

    name: str
    """`owner/name`."""
    revision: str | None = None
    """Branch, tag or commit; None for the default branch."""
    path: str = ""
    """A folder or file in it; empty for its top."""

    def __str__(self) -> str:
        return f"hf://{self.name}" + (f"@{self.revision}" if self.revision else "") + (f"/{self.path}" if self.path else "")


def located(where: str | os.PathLike[str]) -> Path | RemoteFile | HubRepository:
    """What `where` means.

    A `Path`, and a string that names something on this machine, is local. A string with a scheme is a URL
    (`hf://owner/name[@revision][/path]`: a repository on the hub, or something in it; `file://…`: local), also one of fsspec's chains
    (`simplecache::s3://…`). Another string of the form
    `owner/name` or `owner/name@revision` is a repository on the hub. Everything else is local. So `./owner/name` is always local and
    `hf://owner/name` never. Raises `CheckpointError` for an empty string, for a `hf://` that names no repository,
    and for what is neither a string nor a path.
    """
    if not isinstance(where, (str, os.PathLike)) or not isinstance(os.fspath(where), str):
        raise CheckpointError(f"{kind_text(where)} names no checkpoint. Give a path, or a URL or owner/name as a string.")
    if where == "":
        raise CheckpointError("An empty string names no checkpoint. The folder that the program runs in is '.'.")
    if not isinstance(where, str) or os.path.lexists(where):
        return Path(where)
    if where.startswith("hf://"):
        found = _HUB_URL.fullmatch(where)
        if found is None:
            raise CheckpointError(f"{where!r} names no repository on the hub: write hf://owner/name, @revision and /path where needed.")
        return HubRepository(found[1], found[2], (found[3] or "").strip("/"))
    if where.startswith("file://"):
        return Path(unquote(urlsplit(where).path))
    if _URL.match(where):
        return RemoteFile(where)
    found = _HUB_NAME.fullmatch(where)
    return Path(where) if found is None else HubRepository(found[1], found[2])


def working_folder() -> Path:
    """Where relative paths begin now: kept by what reads later, when the program may have gone elsewhere. Empty where it is no more."""
    try:
        return Path.cwd()
    except OSError:
        return Path()
