"""What passes by is kept: a file that is streamed from the hub is completed in huggingface_hub's cache.

Layout of the cache: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from pathlib import Path

from ...errors import CheckpointError
from ..location import CachePlace
from ..verify import digits_of
from .source import Source

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)


class Keeper:
    """Writes the parts of a file as they come, in any order and from any thread.

    A cache that cannot be written to is a warning: nobody needs it for loading.
    """

    def __init__(self, place: CachePlace, size_bytes: int) -> None:
        self._place = place
        self._size_bytes = size_bytes
        self._blob = place.storage / "blobs" / place.etag
        self._file = self._blob.with_name(f"{place.etag}.{uuid.uuid4().hex}.incomplete")
        self._ranges: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        try:
            self._blob.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            os.truncate(self._descriptor, size_bytes)
        except OSError as error:
            self._give_up(error)

    def write(self, position: int, part: memoryview | bytes) -> None:
        """Keeps the bytes at `position`."""
        with self._lock:
            if self._descriptor is None or not part:
                return
            try:
                os.lseek(self._descriptor, position, os.SEEK_SET)
                rest = memoryview(part)
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                self._give_up(error)
            else:
                self._ranges.append((position, position + len(part)))

    def finish(self, source: Source) -> None:
        """Fetches what has not passed by, and puts the file into its place.

        Raises `CheckpointError` when it is not the file that the hub has recorded: then what was read is wrong as well.
        """
        for start, end in self._gaps():
            position = start
            for chunk in source.chunks(start, end):
                self.write(position, chunk)
                position += len(chunk)
        with self._lock:
            if self._descriptor is None:
                return
            os.close(self._descriptor)
            self._descriptor = None
        found = digits_of(self._file, len(self._place.etag))
        if found != self._place.etag:
            self._remove()
            raise CheckpointError(
                f"{source.file}: the bytes that were fetched are not those that the hub has recorded: hash {found}, expected "
                f"{self._place.etag}. Load it again."
            )
        try:
            self._put_in_place()
        except OSError as error:
            self._give_up(error)

    def discard(self) -> None:
        """Leaves nothing behind."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
            self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _gaps(self) -> list[tuple[int, int]]:
        gaps = []
        position = 0
        for start, end in [*sorted(self._ranges), (self._size_bytes, self._size_bytes)]:
            if start > position:
                gaps.append((position, start))
            position = max(position, end)
        return gaps

    def _put_in_place(self) -> None:
        place = self._place
        pointer = place.storage / "snapshots" / place.commit / place.path
        pointer.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self._file, self._blob)
        try:
            if not pointer.exists():
                pointer.unlink(missing_ok=True)
                pointer.symlink_to(os.path.relpath(self._blob, pointer.parent))
        except OSError:  # no links here
            os.replace(self._blob, pointer)
        if place.revision != place.commit:
            reference = place.storage / "refs" / place.revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(place.commit)

    def _give_up(self, error: OSError) -> None:
        logger.warning("%s is not kept in the hub's cache: %s", Path(self._place.path).name, error)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._remove()
