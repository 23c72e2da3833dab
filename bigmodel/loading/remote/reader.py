"""How bytes of remote files become tensors: several requests at once, each streamed through bounded memory straight into place."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ...errors import CheckpointError
from ...progress import Progress
from ...waiting import LOOK_UP_SECONDS, not_awaited, start_daemon
from ..copying import put_range
from ..entry import FileIdentity
from ..location import CheckpointFile, RemoteFile
from ..ranges import STAGED_BYTES, Batch, Range
from .keeping import Keeper
from .source import Source, source_of

__all__ = ["RemoteReader"]

IN_FLIGHT: Final = 16
"""Requests at once: one connection to a distant server carries a fraction of the line."""
LONGEST_REQUEST_BYTES: Final = 64 << 20
SHORTEST_REQUEST_BYTES: Final = 1 << 20
KEPT_SHARE: Final = 0.5
"""Of a file's bytes that have to be read at once for the rest to be fetched into the hub's cache."""
GAP_BYTES: Final = 1 << 20
"""Bytes that are received and thrown away rather than asked around: about what passes in the time that a request takes to be answered."""


@dataclass(slots=True)
class _Request:
    """Batches that one request brings, in file order."""

    file: RemoteFile
    batches: list[Batch]
    start: int
    end: int


class RemoteReader:
    """Reads batches of ranges of remote files. Safe to be used by several threads at once.

    `identities` are the files as they were when the checkpoint was opened.
    """

    def __init__(self, identities: Mapping[CheckpointFile, FileIdentity] | None = None) -> None:
        self._identities = {file: identity for file, identity in (identities or {}).items() if isinstance(file, RemoteFile)}
        self._sources: dict[RemoteFile, Source] = {}

    def read(self, batches: Sequence[Batch], destinations: Sequence[torch.Tensor], progress: Progress | None = None) -> None:
        """Fills the flat destinations from the batches. Beside them it holds a few MiB for each of `IN_FLIGHT` requests.

        Raises `CheckpointError` when a file cannot be had or has changed. Nothing is written into the destinations once this has returned
        or raised, after Ctrl-C as well.
        """
        requests = list(self._requests(batches))
        keepers = self._keepers(requests)
        run = _Run(iter(requests), destinations, self._source, progress, keepers)
        try:
            if len(requests) == 1:
                _Worker(run).carry_out_all()
            else:
                _in_threads([_Worker(run) for _ in range(min(IN_FLIGHT, len(requests)))], run.stop)
            for file, keeper in keepers.items():
                keeper.finish(self._source(file))
        finally:
            for keeper in keepers.values():
                keeper.discard()

    def __getstate__(self) -> Mapping[RemoteFile, FileIdentity]:
        return self._identities

    def __setstate__(self, state: Mapping[CheckpointFile, FileIdentity]) -> None:
        self.__init__(state)  # type: ignore[misc]

    def _source(self, file: RemoteFile) -> Source:
        return self._sources.setdefault(file, source_of(file, self._identities.get(file)))

    def _keepers(self, requests: Sequence[_Request]) -> dict[RemoteFile, Keeper]:
        """For files that are to be kept, and of which enough is read now that the rest is fetched as well."""
        read_bytes: Counter[RemoteFile] = Counter()
        for request in requests:
            read_bytes[request.file] += request.end - request.start
        return {
            file: Keeper(file.keep, size_bytes)
            for file, nbytes in read_bytes.items()
            if file.keep is not None and nbytes >= KEPT_SHARE * (size_bytes := self._source(file).identity.size_bytes)
        }

    def _requests(self, batches: Sequence[Batch]) -> Iterator[_Request]:
        """Neighbours in a file together; all of a file whose server cannot send a part alone."""
        limit = sum(batch.nbytes for batch in batches) // (4 * IN_FLIGHT)
        limit = min(max(limit, SHORTEST_REQUEST_BYTES), LONGEST_REQUEST_BYTES)
        request: _Request | None = None
        for batch in batches:
            assert isinstance(batch.file, RemoteFile)
            start = batch.ranges[0].offset
            end = start + batch.nbytes
            if request is not None and request.file == batch.file and start >= request.end:
                joins = start - request.end <= GAP_BYTES and end - request.start <= limit
                if joins or not self._source(batch.file).has_ranges:
                    request.batches.append(batch)
                    request.end = end
                    continue
            if request is not None:
                yield request
            request = _Request(batch.file, [batch], start, end)
        if request is not None:
            yield request


class _Run:
    """What the threads of one read share. They take requests from it."""

    def __init__(
        self,
        requests: Iterator[_Request],
        destinations: Sequence[torch.Tensor],
        source: Callable[[RemoteFile], Source],
        progress: Progress | None,
        keepers: Mapping[RemoteFile, Keeper],
    ) -> None:
        self.destinations = destinations
        self.keepers = keepers
        self.source = source
        self.progress = progress
        self.stop = threading.Event()
        self._requests = requests
        self._lock = threading.Lock()

    def next(self) -> _Request | None:
        """A request that nobody has taken yet."""
        with self._lock:
            return next(self._requests, None)


def _in_threads(workers: Sequence[_Worker], stop: threading.Event) -> None:
    """Lets every worker run in a thread of its own, and raises what one of them raised."""
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    ready = threading.Semaphore(0)

    def work(worker: _Worker) -> None:
        try:
            torch.get_num_threads()  # torch's own first-use initialisation would undo the next line later
            torch.set_num_threads(1)
            ready.release()
            worker.carry_out_all()
        except BaseException as error:
            stop.set()
            done.put(error)
        else:
            done.put(None)

    threads: list[threading.Thread] = []
    threads_before = torch.get_num_threads()
    try:
        for worker in workers:
            threads.append(start_daemon(functools.partial(work, worker), "bigmodel-fetch"))
        for _ in threads:
            ready.acquire()
        torch.set_num_threads(threads_before)  # the number last set anywhere is that of threads to come
        for _ in threads:
            if (error := _next(done)) is not None:
                raise error
    finally:
        # Ctrl-C comes at any time, also while threads start.
        stop.set()
        for worker in workers:
            with worker.writing:  # from here on it sees `stop` before it writes
                pass
    for thread in threads:
        thread.join()  # it holds on to the destinations


def _next(done: queue.SimpleQueue[BaseException | None]) -> BaseException | None:
    while True:
        with contextlib.suppress(queue.Empty):
            return done.get(timeout=LOOK_UP_SECONDS)


class _Worker:
    """Carries out requests one after the other."""

    def __init__(self, run: _Run) -> None:
        self.writing = threading.Lock()
        """Held while bytes are put into a destination."""
        self._run = run
        self._staging = torch.empty(0, dtype=torch.uint8)

    def carry_out_all(self) -> None:
        """Takes requests until there are none, or the run is to stop."""
        # Destinations may be tensors made in inference mode, which no other mode may write to.
        with torch.inference_mode():
            while not self._run.stop.is_set() and (request := self._run.next()) is not None:
                chunks = self._run.source(request.file).chunks(request.start, request.end, self._run.stop)
                stream = _Stream(chunks, request.start, self._run.keepers.get(request.file))
                for batch in request.batches:
                    if not self._fill(batch, stream):
                        return
                    if self._run.progress is not None:
                        self._run.progress.advance(batch.filled_bytes)

    def _fill(self, batch: Batch, stream: _Stream) -> bool:
        """Puts a batch into place. False where the run is to stop."""
        for each in batch.ranges:
            destination = self._run.destinations[each.job]
            if each.dims is None:
                first = each.first * each.dtype.itemsize
                place = destination.view(torch.uint8)[first : first + each.nbytes]
                filled = self._receive(stream, each, place)
            else:
                if self._staging.numel() < each.nbytes:
                    self._staging = torch.empty(max(each.nbytes, STAGED_BYTES), dtype=torch.uint8, device="cpu")
                place = self._staging[: each.nbytes]
                filled = self._receive(stream, each, place) and self._copy(each, place, destination)
            if not filled:
                return False
        return True

    def _receive(self, stream: _Stream, each: Range, place: torch.Tensor) -> bool:
        memory = memoryview(place.numpy().data)
        position = 0
        stream.skip_to(each.offset)
        while position < len(memory):
            part = stream.take(len(memory) - position)
            if not part and not self._run.stop.is_set():
                raise CheckpointError(f"{each.file}: truncated: it ends before byte {each.offset + each.nbytes}. Get it again.")
            with self.writing:
                if self._run.stop.is_set():
                    return False
                memory[position : position + len(part)] = part
            position += len(part)
        return True

    def _copy(self, each: Range, staged: torch.Tensor, destination: torch.Tensor) -> bool:
        with self.writing:
            if self._run.stop.is_set():
                return False
            put_range(each, staged, destination)
            return True


class _Stream:
    """Bytes as they come, from which parts of any length are taken."""

    def __init__(self, chunks: Iterator[bytes], position: int, keeper: Keeper | None) -> None:
        self._chunks = chunks
        self._keeper = keeper
        self._position = position
        self._rest = memoryview(b"")

    def take(self, most: int) -> memoryview:
        """Between one and `most` bytes; none where the stream was told to stop."""
        while not self._rest:
            with not_awaited():
                chunk = next(self._chunks, None)
            if chunk is None:
                return self._rest
            self._rest = memoryview(chunk)
            if self._keeper is not None:
                self._keeper.write(self._position, chunk)
        part, self._rest = self._rest[:most], self._rest[most:]
        self._position += len(part)
        return part

    def skip_to(self, position: int) -> None:
        """Throws away what lies before `position` in the file."""
        while self._position < position and self.take(position - self._position):
            pass
