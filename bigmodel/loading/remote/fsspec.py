"""Ranges of a file behind a URL of any scheme that fsspec knows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final

import fsspec

from ...errors import BigModelError, CheckpointError, CheckpointNotFoundError, MissingPackageError
from ..entry import FileIdentity
from ..location import RemoteFile
from .retry import ATTEMPTS, wait

__all__ = ["FsspecSource", "file_system"]

CHUNK_BYTES: Final = 4 << 20
"""Asked for at once: object stores answer each request with a delay."""


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Raises `MissingPackageError` where a package is missing, and `CheckpointError`."""
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingPackageError(f"{RemoteFile(url)}: fsspec needs another package for this: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{RemoteFile(url)}: no such kind of URL: {error}") from error
    return system, path


class FsspecSource:
    """See `Source`."""

    has_ranges = True

    def __init__(self, file: RemoteFile, identity: FileIdentity | None = None) -> None:
        self.file = file
        self._identity = identity
        self._system, self._path = file_system(file.url)

    @property
    def identity(self) -> FileIdentity:
        """See `Source.identity`."""
        if self._identity is None:
            info = self._retried(lambda: self._system.info(self._path), None)
            size = info.get("size")
            if info.get("type") != "file" or not isinstance(size, int):
                raise CheckpointError(f"{self.file}: is no file, or its size is not known.")
            etag = info.get("ETag") or info.get("etag") or info.get("md5Hash") or info.get("mtime") or info.get("created") or ""
            self._identity = FileIdentity(size, 0, 0, str(etag))
        return self._identity

    def chunks(self, start: int, end: int, stop: threading.Event | None = None) -> Iterator[bytes]:
        """See `Source.chunks`."""
        end = min(end, self.identity.size_bytes)
        while start < end and not (stop is not None and stop.is_set()):
            wanted = min(CHUNK_BYTES, end - start)
            chunk = self._retried(
                lambda start=start, wanted=wanted: self._system.cat_file(self._path, start=start, end=start + wanted), stop
            )
            if len(chunk) != wanted:
                raise CheckpointError(f"{self.file}: asked for {wanted} bytes from {start} on, got {len(chunk)}: the file has changed.")
            start += wanted
            yield chunk

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
