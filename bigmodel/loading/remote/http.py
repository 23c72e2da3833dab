"""Ranges of a file behind an http(s) URL, through the client, endpoint and token of huggingface_hub."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from huggingface_hub import constants, get_session
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from ...errors import BigModelError, CheckpointError, CheckpointNotFoundError
from ..entry import FileIdentity
from ..location import RemoteFile
from .retry import ATTEMPTS, TRANSIENT, wait

__all__ = ["HttpSource"]

SILENCE_SECONDS: Final = 30.0
"""Longest wait for a connection or for the next bytes. However slow the bytes come, they may."""
_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class _Transient(Exception):
    """Worth another attempt."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass(slots=True)
class _Route:
    """What the answers to earlier requests have told of the way to a file."""

    redirected: str | None = None
    """Where the hub keeps it: asked from the second request on, until its signature expires."""
    has_ranges: bool = True


_routes: dict[str, _Route] = {}
"""By URL, for the whole process, so that reading weights starts from what reading headers has found."""


class HttpSource:
    """See `Source`."""

    def __init__(self, file: RemoteFile, identity: FileIdentity | None = None) -> None:
        self.file = file
        self._identity = identity
        self._route = _routes.setdefault(file.url, _Route())

    @property
    def has_ranges(self) -> bool:
        """See `Source.has_ranges`."""
        return self._route.has_ranges

    @property
    def identity(self) -> FileIdentity:
        """See `Source.identity`."""
        if self._identity is None:
            for _ in self.chunks(0, 1):
                pass
        if self._identity is None:
            raise CheckpointError(f"{self.file}: the server does not say how long it is.")
        return self._identity

    def chunks(self, start: int, end: int, stop: threading.Event | None = None) -> Iterator[bytes]:
        """See `Source.chunks`."""
        position, failures = start, 0
        while position < end:
            try:
                with self._response(position, end) as (response, first, answer_end, total):
                    end = min(end, total)
                    skip = position - first
                    for chunk in response.iter_raw():
                        if stop is not None and stop.is_set():
                            return
                        part = chunk[skip : skip + end - position]
                        skip -= min(skip, len(chunk))
                        position += len(part)
                        if part:
                            failures = 0  # what is only skipped has come before
                            yield part
                        if position == end:
                            break
                # Servers may send less than was asked for, and say so; the rest is theirs to give as well.
                if position < end and not first < position == answer_end:
                    raise _Transient(f"the server stopped at byte {position} of {end}")
            except BigModelError:
                raise
            # What the client raises for a broken connection depends on its version and on what the user has put in its place.
            except Exception as error:
                failures += 1
                if failures >= ATTEMPTS:
                    raise CheckpointError(
                        f"{self.file}: cannot be read from byte {position} on; gave up after {failures} attempts in a row "
                        f"({type(error).__name__.lstrip('_')}: {str(error)[:300]}). Try again later, or download it first."
                    ) from error
                wait(failures, getattr(error, "retry_after_seconds", None), stop)
                if stop is not None and stop.is_set():
                    return

    @contextlib.contextmanager
    def _response(self, start: int, end: int) -> Iterator[tuple[Any, int, int, int]]:
        """The answer to the request of a range, the positions of its first byte and behind its last, and the size of the whole file."""
        redirected = self._route.redirected
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        if _is_hub(redirected or self.file.url):
            headers |= build_hf_headers(library_name="bigmodel")
        with get_session().stream(
            "GET", redirected or self.file.url, headers=headers, timeout=SILENCE_SECONDS, follow_redirects=True
        ) as response:
            status = response.status_code
            if status not in (200, 206):
                if redirected is not None:
                    # Its signature has expired, or its server is gone: ask the first one again, unless another thread has done so.
                    if self._route.redirected == redirected:
                        self._route.redirected = None
                    raise _Transient(f"the server that keeps it answered {status}", 0.0)
                self._refuse(status, response.headers, start)
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise CheckpointError(f"{self.file}: the server compresses it on the way, so its ranges mean nothing. Download it first.")
            first, answer_end, total = self._extent(response, start)
            self._check(FileIdentity(total, 0, 0, _etag(response.headers)))
            # Answers that were under way when another thread found the signature expired tell nothing new.
            if redirected is None and str(response.url) != self.file.url:
                self._route.redirected = str(response.url)
            yield response, first, answer_end, total

    def _refuse(self, status: int, headers: Any, start: int) -> None:
        if status in TRANSIENT:
            after = headers.get("Retry-After", "")
            raise _Transient(f"the server answered {status}", float(after) if after.isdigit() else None)
        if status in (404, 410):
            raise CheckpointNotFoundError(f"{self.file}: there is no such file (the server answered {status}).")
        if status in (401, 403):
            raise CheckpointError(
                f"{self.file}: the server refuses access ({status}). For a private or gated model of the hub, log in (`hf auth login`) and "
                "accept its conditions."
            )
        if status == 416:
            raise CheckpointError(f"{self.file}: the server has no bytes from {start} on: the file is shorter than its header says.")
        raise CheckpointError(f"{self.file}: the server answered {status}.")

    def _extent(self, response: Any, start: int) -> tuple[int, int, int]:
        """Positions of the answer's first byte and behind its last, and the size of the whole file."""
        if response.status_code == 206:
            said = response.headers.get("Content-Range", "")
            found = _CONTENT_RANGE.fullmatch(said)
            if found is None or int(found[1]) != start or found[3] == "*":
                raise CheckpointError(
                    f"{self.file}: asked for bytes from {start} on, the server sends {said or 'it does not say which'!r}."
                )
            return start, int(found[2]) + 1, int(found[3])
        self._route.has_ranges = False
        length = response.headers.get("Content-Length", "")
        if not length.isdigit():
            raise CheckpointError(f"{self.file}: the server does not say how long it is, so it cannot be read in parts. Download it first.")
        return 0, int(length), int(length)

    def _check(self, now: FileIdentity) -> None:
        if self._identity is None:
            self._identity = now
        # An identity without an ETag is one that the hub has told: content under a commit does not change, its servers' names for it may.
        elif not (self._identity.size_bytes == now.size_bytes and "" in (self._identity.etag, now.etag)):
            self._identity.check(now, self.file)


def _etag(headers: Any) -> str:
    etag = str(headers.get("ETag", ""))
    return "" if etag.startswith("W/") else etag  # a weak one does not tell equal bytes


def _is_hub(url: str) -> bool:
    """Whether the user's token for the hub may go there."""
    hub, asked = urlsplit(constants.ENDPOINT), urlsplit(url)
    return (hub.scheme, hub.netloc) == (asked.scheme, asked.netloc)
