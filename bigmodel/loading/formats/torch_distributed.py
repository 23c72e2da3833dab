"""A folder written by `torch.distributed.checkpoint`: tensors in chunks, one file a rank, and the table of contents `.metadata`.

The table is a pickle; only the records, sizes and dtypes that it consists of are unpickled, everything else in it is refused. Each chunk is
what `torch.save` makes of it, an archive inside the rank's file
(https://docs.pytorch.org/docs/stable/distributed.checkpoint.html).
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final

import torch

from ...errors import CheckpointError, CheckpointNotFoundError
from ...text import kind_text
from ..entry import Entry, Sharded, is_possible_shape
from ..location import CheckpointFile
from .header import Header, Opened, open_local
from .torch_archive import TorchArchive
from .windows import Windows

__all__ = ["TorchDistributedFormat"]

MODULES: Final = ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.sharded_tensor.metadata")
"""Where the table's records have lived."""
RECORDS: Final = frozenset(
    {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    }
)
ENCODINGS: Final = frozenset({"_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"})
PATHS: Final = frozenset({"Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath"})
MAX_TABLE_BYTES: Final = 1 << 28
EDGE_BYTES: Final = 4 << 10
"""Of the archive of one tensor: more than its pickle, at its beginning, and its directory, at its end, take."""
AT_ONCE: Final = 512
"""Chunks whose edges are held together."""
OPERATIONS: Final = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
)
"""Of pickle, which a table consists of."""


class TorchDistributedFormat:
    """Folders of torch.distributed.checkpoint."""

    name = "torch.distributed"
    suffixes = (".metadata",)
    usual_names = ("",)

    def read_header(self, file: Path) -> Header:
        """Entries of all tensors, by their full names. What else was saved (numbers, strings) is passed over.

        Raises `CheckpointError` for a table that holds more than tables need, for chunks that are compressed, are not where the table says,
        or do not make up their tensor.
        """
        with contextlib.ExitStack() as stack:
            table = stack.enter_context(open_local(file))
            return self.header_among(table, lambda name: stack.enter_context(open_local(file.parent / name)))

    def header_among(self, table: Opened, beside: Callable[[str], Opened]) -> Header:
        """See `FolderFormat` and `read_header`."""
        file = table.file
        tensors = _tensors(_table(table), file)
        chunks = _chunks(tensors, file, beside)
        entries = []
        for name, tensor in tensors.items():
            if not is_possible_shape(tensor.shape):
                raise CheckpointError(f"{file}: {name!r} has an impossible shape {list(tensor.shape)}.")
            parts = tuple(chunks[name, number] for number in range(len(tensor.places)))
            _check_cover(file, name, tensor.shape, [(start, part.shape) for start, part in parts])
            nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
            first = parts[0][1].file if parts else file
            entries.append(Entry(name, first, 0, nbytes, tensor.dtype, tensor.shape, contents=Sharded(parts)))
        return Header(tuple(entries))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk lies."""

    start: tuple[int, ...]
    """Its first index in the tensor."""
    file: str
    offset: int
    nbytes: int
    is_transformed: bool
    """Compressed, for example."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What the table says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[tuple[int, ...], tuple[int, ...]]
    """First index → shape."""
    places: list[_Place]


def _tensors(table: Any, file: CheckpointFile) -> dict[str, _Tensor]:
    """The tensors of a table, every field of the type that it should have."""
    try:
        tensors = {}
        for name, found in table.state_dict_metadata.items():
            if found.name == "TensorStorageMetadata":
                chunks = {_sizes(chunk.offsets): _sizes(chunk.sizes) for chunk in found.chunks}
                dtype = found.properties.dtype
                if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
                    raise TypeError(f"{kind_text(name)} as a name, {kind_text(dtype)} as a dtype")
                tensors[name] = _Tensor(_sizes(found.size), dtype, chunks, [])
        for index, place in table.storage_data.items():
            if index.fields.get("offset") is None or index.fqn not in tensors:
                continue
            path, (offset, nbytes) = place.relative_path, _sizes((place.offset, place.length))
            if not isinstance(path, str):
                raise TypeError(f"{kind_text(path)} as the name of a file")
            tensors[index.fqn].places.append(
                _Place(_sizes(index.offset), path, offset, nbytes, bool(place.fields.get("transform_descriptors")))
            )
    # A field that is not there, and one of another type.
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: damaged: not a table of a distributed checkpoint ({str(error)[:200]}).") from error
    return tensors


def _sizes(value: Any) -> tuple[int, ...]:
    """Raises ValueError for what is no tuple of sizes or positions."""
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < 1 << 63 for size in value):
        raise ValueError(f"{kind_text(value)} that holds no sizes")
    return value


class _Record:
    """An object of the table, as far as its fields go."""

    name = ""

    def __init__(self, *arguments: Any) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.fields = state
        elif isinstance(state, tuple) and state:  # TensorProperties: the dtype stands first
            self.fields = {"dtype": state[0]}

    def __getattr__(self, field: str) -> Any:
        try:
            return self.__dict__["fields"][field]
        except KeyError:
            raise AttributeError(f"its {self.name} has no {field!r}") from None


class _TableUnpickler(pickle._Unpickler):
    """Knows the names and the operations that a table of contents consists of; nothing it calls does more than hold values.

    The interpreter's own implementation in Python: that in C takes gigabytes for a single number (of a place in its memo).
    """

    dispatch: ClassVar[dict[int, Callable[..., Any]]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in OPERATIONS}

    def find_class(self, module: str, name: str) -> Any:
        if (module in MODULES and name in RECORDS) or (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return type(name, (_Record,), {"name": name})
        if module in MODULES and name in ENCODINGS:
            return _nothing
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _nothing
        if module in ("pathlib", "pathlib._local") and name in PATHS:
            return _nothing
        if (module, name) == ("collections", "OrderedDict"):
            return _empty_dict
        raise pickle.UnpicklingError(f"it asks for {module[:100]}.{name[:100]}")

    def _set_items(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self._put(items[::2], items[1::2])

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()  # type: ignore[attr-defined]
        self._put([key], [value])

    def _put(self, keys: list[Any], values: list[Any]) -> None:
        table = self.stack[-1]  # type: ignore[attr-defined]
        # The hash of tuples within tuples can take for ever.
        if type(table) is not dict or not all(isinstance(key, (str, _Record)) for key in keys):
            raise pickle.UnpicklingError("it holds a mapping of something else than names")
        table.update(zip(keys, values, strict=True))

    dispatch[pickle.SETITEMS[0]] = _set_items
    dispatch[pickle.SETITEM[0]] = _set_item


def _empty_dict() -> dict[str, Any]:
    return {}


def _nothing(*arguments: Any) -> None:
    return None


def _table(opened: Opened) -> Any:
    file = opened.file
    if opened.size_bytes > MAX_TABLE_BYTES:
        raise CheckpointError(f"{file}: a table of contents of {opened.size_bytes} bytes is none.")
    text = opened.read(0, opened.size_bytes)
    try:
        table = _TableUnpickler(io.BytesIO(text)).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file}: holds more than a table of contents, and is not unpickled since that could run foreign code: {str(error)[:300]}."
        ) from error
    # A damaged pickle fails in any way.
    except Exception as error:
        raise CheckpointError(
            f"{file}: damaged: not a table of a distributed checkpoint ({type(error).__name__}: {str(error)[:200]})."
        ) from error
    if not isinstance(table, _Record) or table.name != "Metadata":
        raise CheckpointError(f"{file}: holds no table of a distributed checkpoint.")
    return table


def _chunks(
    tensors: Mapping[str, _Tensor], file: CheckpointFile, beside: Callable[[str], Opened]
) -> dict[tuple[str, int], tuple[tuple[int, ...], Entry]]:
    """First index and bytes of each chunk, by the name of its tensor and its number there."""
    held: defaultdict[str, list[tuple[_Place, str, int]]] = defaultdict(list)
    for name, tensor in tensors.items():
        for number, place in enumerate(tensor.places):
            path = PurePosixPath(place.file)
            if path.is_absolute() or ".." in path.parts or "\\" in place.file or "\0" in place.file:
                raise CheckpointError(f"{file}: says that {name!r} lies in {place.file!r}, outside its folder.")
            if place.is_transformed:
                raise CheckpointError(f"{file}: {name!r} is compressed or changed by an extension; save it without.")
            held[place.file].append((place, name, number))
    chunks = {}
    for data, found in held.items():
        try:
            opened = beside(data)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(f"{file}: says that {found[0][1]!r} lies in {data!r}, which cannot be opened: {error}") from error
        for place, name, _ in found:
            end = place.offset + place.nbytes
            if end > opened.size_bytes:
                raise CheckpointError(f"{opened.file}: truncated: expected at least {end} bytes for {name!r}, found {opened.size_bytes}.")
        found.sort(key=lambda item: item[0].offset)
        for first in range(0, len(found), AT_ONCE):
            some = found[first : first + AT_ONCE]
            windows = Windows(opened, [edge for place, _, _ in some for edge in _edges(place)])
            for place, name, number in some:
                chunks[name, number] = place.start, _chunk(opened, windows, name, tensors[name], place)
    return chunks


def _edges(place: _Place) -> list[tuple[int, int]]:
    """The beginning and the end of a chunk's archive, which tell what is between them."""
    end = place.offset + place.nbytes
    return [(place.offset, min(end, place.offset + EDGE_BYTES)), (max(place.offset, end - EDGE_BYTES), end)]


def _chunk(opened: Opened, windows: Windows, name: str, tensor: _Tensor, place: _Place) -> Entry:
    """The bytes of one chunk of a tensor."""
    data, offset, nbytes = opened.file, place.offset, place.nbytes
    try:
        archive = TorchArchive(data, nbytes, lambda start, end: windows.read(offset + start, offset + min(end, nbytes)), EDGE_BYTES)
        found = archive.content
        if not isinstance(found, torch.Tensor):
            raise CheckpointError(f"it holds {kind_text(found)}")
        entry = archive.entry(name, found)
    except CheckpointError as error:
        raise CheckpointError(f"{data}: damaged: no tensor at byte {offset}, where {name!r} is said to be ({error}).") from error
    shape = tensor.chunks.get(place.start)
    if entry.shape != shape or entry.dtype != tensor.dtype:
        raise CheckpointError(
            f"{data}: the chunk of {name!r} at byte {offset} has shape {list(entry.shape)} and dtype {entry.dtype}; "
            f"the table says {list(shape or ())} and {tensor.dtype}."
        )
    return replace(entry, offset=offset + entry.offset)


def _check_cover(file: CheckpointFile, name: str, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Raises `CheckpointError` unless the boxes (first index, shape) fill the shape, each element once."""
    for start, size in boxes:
        if len(start) != len(shape) or any(low < 0 or low + length > whole for low, length, whole in zip(start, size, shape, strict=True)):
            raise CheckpointError(
                f"{file}: a chunk of {name!r} at {list(start)} of shape {list(size)} lies outside its shape {list(shape)}."
            )
    if any(_overlapping(boxes)):
        raise CheckpointError(f"{file}: chunks of {name!r} overlap.")
    held = sum(math.prod(size) for _, size in boxes)
    if held != math.prod(shape):
        raise CheckpointError(f"{file}: {name!r} has {math.prod(shape)} elements, its chunks hold {held} of them.")


def _overlapping(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Iterator[bool]:
    """For pairs of boxes whose first dimension overlaps: whether all others do."""
    filled = sorted((start, size) for start, size in boxes if 0 not in size)
    open_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for start, size in filled:
        if not start:  # numbers without dimensions
            yield bool(open_boxes)
        open_boxes = [(low, length) for low, length in open_boxes if not start or low[0] + length[0] > start[0]]
        for low, length in open_boxes if start else []:
            yield all(a < b + n and b < a + m for a, m, b, n in zip(start, size, low, length, strict=True))
        open_boxes.append((start, size))
