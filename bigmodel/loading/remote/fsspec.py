"""Ranges of a file behind a URL of any scheme that fsspec knows."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import fsspec

from ...errors import BigModelError, CheckpointError, CheckpointNotFoundError, MissingPackageError
from ..entry import FileIdentity
from ..location import RemoteFile
from .retry import ATTEMPTS, wait

__all__ = ["FsspecSource", "file_system"]

CHUNK_BYTES: Final = 4 << 20
"""Asked for at once: object stores answer each request with a delay."""
STATES: Final = (
    *("ETag", "etag", "md5Hash", "md5Checksum", "checksum", "sha", "blob_id", "generation", "version_id", "CRC"),
    *("LastModified", "last_modified", "last_write_time", "mtime", "modified", "modify", "modifiedTime", "modificationTime", "updated"),
)
"""What file systems tell of a file that becomes another when it is written to."""

_systems: dict[tuple[str, int], tuple[Any, str]] = {}
"""By URL and process, for all its threads: fsspec has one for each thread, and those that keep whole files would fetch them again."""


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Raises `MissingPackageError` where a package is missing, and `CheckpointError`."""
    key = url, os.getpid()
    if key in _systems:
        return _systems[key]
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingPackageError(f"{RemoteFile(url)}: fsspec needs another package for this: {error}") from error
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{RemoteFile(url)}: there is no such file: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{RemoteFile(url)}: no such kind of URL: {error}") from error
    if system.cachable:
        _systems[key] = system, path
    return system, path


class FsspecSource:
    """See `Source`."""

    has_ranges = True

    def __init__(self, file: RemoteFile, identity: FileIdentity | None = None) -> None:
        self.file = file
        self._identity = identity
        self._system, self._path = file_system(file.url)
        self._first = threading.Lock()
        self._is_begun = False

    @property
    def identity(self) -> FileIdentity:
        """See `Source.identity`."""
        if self._identity is None:
            self._identity = self._retried(self._now, None)
        return self._identity

    def chunks(self, start: int, end: int, stop: threading.Event | None = None) -> Iterator[bytes]:
        """See `Source.chunks`."""
        end = min(end, self.identity.size_bytes)
        while start < end and not (stop is not None and stop.is_set()):
            wanted = min(CHUNK_BYTES, end - start)
            chunk = self._retried(lambda start=start, wanted=wanted: self._read(start, start + wanted), stop)
            start += wanted
            # A file that is what it was after its bytes were read was so before.
            if start == end or len(chunk) != wanted:
                self.identity.check(self._retried(self._now, stop), self.file)
            if len(chunk) != wanted:
                raise CheckpointError(f"{self.file}: asked for {wanted} bytes from {start - wanted} on, got {len(chunk)}. Get it again.")
            yield chunk

    def _read(self, start: int, end: int) -> Any:
        # File systems that keep whole files here fetch them with the first read, and others would find half of one meanwhile.
        if not self._is_begun:
            with self._first:
                if not self._is_begun:
                    data = self._system.cat_file(self._path, start=start, end=end)
                    self._is_begun = True
                    return data
        return self._system.cat_file(self._path, start=start, end=end)

    def _now(self) -> FileIdentity:
        """The file as it is, whatever lists of files have told."""
        self._system.invalidate_cache(self._system._parent(self._path))
        info = self._system.info(self._path)
        size = info.get("size")
        if info.get("type") != "file" or not isinstance(size, int):
            raise CheckpointError(f"{self.file}: is no file, or its size is not known.")
        return FileIdentity(size, 0, 0, self._state(info))

    def _state(self, info: Mapping[str, Any]) -> str:
        told = [str(info[name]) for name in STATES if info.get(name)]
        if not told:
            try:
                told = [str(self._system.modified(self._path))]
            except (NotImplementedError, AttributeError):
                told = [str(info["created"])] if info.get("created") else []
        return ", ".join(told)

    def _retried(self, call: Any, stop: threading.Event | None) -> Any:
        failures = 0
        while True:
            try:
                return call()
            except FileNotFoundError as error:
                raise CheckpointNotFoundError(f"{self.file}: there is no such file.") from error
            except (BigModelError, PermissionError, NotImplementedError) as error:
                raise CheckpointError(f"{self.file}: cannot be read: {error}") from error
            # Every file system has errors of its own.
            except Exception as error:
                failures += 1
                if failures >= ATTEMPTS or (stop is not None and stop.is_set()):
                    raise CheckpointError(
                        f"{self.file}: cannot be read; gave up after {failures} attempts ({type(error).__name__}: {str(error)[:300]})."
                    ) from error
                wait(failures, None, stop)
