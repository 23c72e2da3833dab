"""Headers as a stranger may have written them: structured damage is refused by name or read as other readers read it, in bounded memory."""

from __future__ import annotations

import copy
import io
import json
import pickle
import struct
import tempfile
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from torch.distributed.checkpoint import FileSystemReader

from bigmodel.errors import CheckpointError
from bigmodel.loading import Checkpoint, Reader, Whole
from bigmodel.loading.formats.gguf import GgufFormat
from bigmodel.loading.formats.safetensors import SafetensorsFormat
from bigmodel.loading.index import parse_index
from bigmodel.loading.transfer import lower

FILE = Path("stranger")
SIZES = {"F32": 4, "BF16": 2, "U8": 1, "I64": 8, "BOOL": 1, "F8_E4M3": 1}
HUGE = st.sampled_from([2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**40])
ODD = (
    st.integers(-3, 3)
    | HUGE
    | HUGE.map(lambda number: -number)
    | st.floats()
    | st.booleans()
    | st.none()
    | st.text(max_size=3)
    | st.lists(st.integers(-1, 3), max_size=3)
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A right safetensors header, and the number of bytes behind it."""
    position = 0
    header: dict[str, Any] = {}
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
    for name in draw(st.lists(st.text(min_size=1, max_size=4).filter(lambda name: name != "__metadata__"), max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(SIZES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = SIZES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    return header, position


def damage(header: dict[str, Any], draw: st.DrawFn) -> None:
    """One thing in the header becomes another."""
    names = [name for name in header if name != "__metadata__"]
    kind = draw(st.sampled_from(["offset", "shape", "dtype", "drop", "add", "whole", "swap", "metadata"]))
    if kind == "metadata":
        header["__metadata__"] = draw(ODD | st.dictionaries(st.text(max_size=2), ODD, max_size=2))
        return
    if not names:
        header[draw(st.text(max_size=3))] = draw(ODD)
        return
    name = draw(st.sampled_from(names))
    entry = header[name]
    if kind == "whole" or not isinstance(entry, dict):
        header[name] = draw(ODD)
    elif kind == "offset" and isinstance(entry.get("data_offsets"), list) and entry["data_offsets"]:
        place = draw(st.integers(0, len(entry["data_offsets"]) - 1))
        entry["data_offsets"][place] = draw(ODD)
    elif kind == "shape" and isinstance(entry.get("shape"), list):
        entry["shape"].insert(draw(st.integers(0, len(entry["shape"]))), draw(ODD))
    elif kind == "dtype":
        entry["dtype"] = draw(st.sampled_from([*SIZES, "F4", "f32", ""]) | ODD)
    elif kind == "drop" and entry:
        del entry[draw(st.sampled_from(sorted(entry)))]
    elif kind == "add":
        entry[draw(st.text(max_size=3))] = draw(ODD)
    elif kind == "swap":
        other = draw(st.sampled_from(names))
        header[name], header[other] = header[other], header[name]


def check_named(error: CheckpointError, file: object) -> None:
    assert str(file) in str(error)


def safetensors_header(data: bytes) -> set[str]:
    header = SafetensorsFormat().header_from(FILE, len(data), lambda start, end: data[start:end])
    for entry in header.entries:
        assert 8 <= entry.offset <= entry.offset + entry.nbytes <= len(data)
        assert entry.nbytes == entry.numel * entry.dtype.itemsize
    return {entry.name for entry in header.entries}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layout=layouts(), damages=st.integers(0, 3), data=st.data())
def test_a_safetensors_header_is_read_as_the_library_reads_it_or_refused(
    layout: tuple[dict[str, Any], int], damages: int, data: st.DataObject
) -> None:
    header, behind = copy.deepcopy(layout)
    for _ in range(damages):
        damage(header, data.draw)
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(behind)
    try:
        library: set[str] | None = {name for name, _ in deserialize(content)}
    except SafetensorError:
        library = None
    try:
        found: set[str] | None = safetensors_header(content)
    except CheckpointError as error:
        check_named(error, FILE)
        found = None
    assert found is None or found == library
    if damages == 0:
        assert found == set(layout[0]) - {"__metadata__"}


@settings(max_examples=200, deadline=None)
@given(layout=layouts(), cut=st.integers(-5, 5), key=st.text(max_size=3))
@example(({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, 1), 0, "a")
def test_keys_that_stand_twice_and_bytes_too_many_or_too_few_are_refused(layout: tuple[dict[str, Any], int], cut: int, key: str) -> None:
    header, behind = layout
    names = [name for name in header if name != "__metadata__"]
    twice = {"first": header, "more": header}
    text = json.dumps(header).encode()
    wrong_size = struct.pack("<Q", len(text)) + text + bytes(max(0, behind + cut))
    if max(0, behind + cut) != behind:
        with pytest.raises(CheckpointError, match="expected"):
            safetensors_header(wrong_size)
    if names:
        body = json.dumps(twice["first"])[:-1] + ", " + json.dumps(twice["more"])[1:]
        with pytest.raises(CheckpointError, match="twice"):
            safetensors_header(struct.pack("<Q", len(body.encode())) + body.encode() + bytes(behind))


BOMBS: dict[str, Callable[[int], bytes]] = {
    "empty lists": lambda size: b'{"a":[' + b"[]," * (size // 3) + b"[]]}",
    "numbers": lambda size: b'{"a":[' + b"1," * (size // 2) + b"1]}",
    "long numbers": lambda size: b'{"a":[' + b"12345," * (size // 6) + b"1]}",
    "empty objects": lambda size: b"{" + b",".join(b'"%x":{}' % number for number in range(size // 11)) + b"}",
    "one object": lambda size: b"{" + b",".join(b'"%x":1' % number for number in range(size // 10)) + b"}",
    "nested lists": lambda size: b'{"a":' + b"[" * size,
    "nested objects": lambda size: b'{"a":' * (size // 5),
    "a long number": lambda size: b'{"a":' + b"9" * size + b"}",
}


@pytest.mark.parametrize("kind", sorted(BOMBS))
@pytest.mark.parametrize("parse", ["safetensors", "index"])
def test_bombs_are_refused_before_they_fill_the_memory(kind: str, parse: str) -> None:
    text = BOMBS[kind](40 << 20)
    content = struct.pack("<Q", len(text)) + text
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            parse_index(text, FILE) if parse == "index" else safetensors_header(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(text)


def test_a_large_header_with_wordy_metadata_is_no_bomb() -> None:
    tensors = {
        f"model.layers.{number}.mlp.experts.{number % 61}.weight": {"dtype": "U8", "shape": [1, 1, 1], "data_offsets": [number, number + 1]}
        for number in range(20_000)
    }
    metadata = {"log": json.dumps([[number, {"a": []}] for number in range(20_000)])}
    text = json.dumps({"__metadata__": metadata} | tensors).encode()
    assert len(safetensors_header(struct.pack("<Q", len(text)) + text + bytes(20_000))) == 20_000


values = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6
)
names = st.text(max_size=6) | st.sampled_from(["../x", "/etc/passwd", "a/../../b", "C:\\x", "a\0b", "", ".", "sub/x.safetensors"])


@settings(max_examples=300, deadline=None)
@given(index=st.dictionaries(st.text(max_size=4), names | values, max_size=3), wrapped=st.booleans())
def test_an_index_names_files_inside_its_folder_or_is_refused(index: dict[str, Any], wrapped: bool) -> None:
    text = json.dumps({"weight_map": index} if wrapped else index).encode()
    try:
        found = parse_index(text, FILE)
    except CheckpointError as error:
        check_named(error, FILE)
        return
    root = Path("/folder")
    for file in found.values():
        inside = Path(root, file)
        assert ".." not in inside.parts
        assert inside.is_relative_to(root)


def text_bytes(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


@st.composite
def gguf_files(draw: st.DrawFn) -> bytes:
    """A GGUF file of a few pairs and tensors, with a few numbers that are wrong."""
    wrong = draw(st.integers(0, 2))
    counts = [0, 0]

    def number(right: int, packed: str) -> bytes:
        nonlocal wrong
        if wrong and draw(st.integers(0, 5)) == 0:
            wrong -= 1
            limit = 2 ** (8 * struct.calcsize(packed))
            right = draw(st.sampled_from([0, 1, 2, 3, 2**16, 2**31, 2**32, 2**62, 2**64 - 1])) % limit
        return struct.pack(packed, right)

    pairs = b""
    for _ in range(draw(st.integers(0, 3))):
        counts[0] += 1
        pairs += text_bytes(draw(st.binary(max_size=3)) + b"k%d" % counts[0])
        kind = draw(st.sampled_from([0, 4, 5, 6, 7, 8, 9, 10, 12]))
        pairs += number(kind, "<I")
        if kind == 8:
            content = draw(st.binary(max_size=5))
            pairs += number(len(content), "<Q") + content
        elif kind == 9:
            length = draw(st.integers(0, 3))
            pairs += number(4, "<I") + number(length, "<Q") + bytes(4 * length)
        else:
            pairs += bytes({0: 1, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 12: 8}[kind])
    infos, position = b"", 0
    for _ in range(draw(st.integers(0, 3))):
        counts[1] += 1
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = 4
        for length in shape:
            size *= length
        infos += text_bytes(b"t%d" % counts[1]) + number(len(shape), "<I") + b"".join(number(length, "<Q") for length in shape)
        infos += number(0, "<I") + number(position, "<Q")
        position = -(-(position + size) // 32) * 32
    head = b"GGUF" + number(3, "<I") + number(counts[1], "<Q") + number(counts[0], "<Q") + pairs + infos
    return head + bytes(-len(head) % 32) + bytes(position)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(content=gguf_files(), cut=st.integers(0, 40))
def test_a_gguf_header_points_into_its_file_or_is_refused(content: bytes, cut: int) -> None:
    content = content[: len(content) - cut] if cut > 32 else content
    try:
        header = GgufFormat().header_from(FILE, len(content), lambda start, end: content[start:end])
    except CheckpointError as error:
        check_named(error, FILE)
        return
    for entry in header.entries:
        assert 24 <= entry.offset <= entry.offset + entry.nbytes <= len(content)


@lru_cache
def distributed() -> tuple[bytes, bytes]:
    """The table and the data of a small distributed checkpoint."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.arange(12.0).view(3, 4), "b": torch.ones(3).bfloat16(), "n": 3}, checkpoint_id=folder, no_dist=True)
        return Path(folder, ".metadata").read_bytes(), Path(folder, "__0_0.distcp").read_bytes()


def read_distributed(table: bytes, data: bytes) -> None:
    """Opens, and reads what was opened."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, ".metadata").write_bytes(table)
        Path(folder, "__0_0.distcp").write_bytes(data)
        try:
            checkpoint = Checkpoint.open(Path(folder))
        except CheckpointError as error:
            check_named(error, folder)
            return
        entries = checkpoint.entries
        jobs = [
            (lower(Whole(name), entries, name, entry.dtype), torch.empty(entry.shape, dtype=entry.dtype)) for name, entry in entries.items()
        ]
        reader = Reader(checkpoint.identities)
        reader.read(jobs)
        reader.close()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_distributed_table_with_other_numbers_is_read_or_refused(data: st.DataObject) -> None:
    table, content = distributed()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, ".metadata").write_bytes(table)
        metadata = FileSystemReader(folder).read_metadata()
    small = st.integers(-2, 5000) | HUGE | st.none() | st.floats() | st.text(max_size=2)
    sizes = st.lists(st.integers(-2, 5) | HUGE.filter(lambda number: number < 2**63), max_size=3).map(torch.Size)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from([each for index, each in metadata.storage_data.items() if index.fqn in ("w", "b")]))
        found = metadata.state_dict_metadata[data.draw(st.sampled_from(["w", "b"]))]
        change = data.draw(st.sampled_from(["offset", "length", "relative_path", "size", "chunk", "start", "dtype"]))
        if change in ("offset", "length"):
            setattr(place, change, data.draw(small))
        elif change == "relative_path":
            place.relative_path = data.draw(names)
        elif change == "size":
            found.size = data.draw(sizes)
        elif change == "dtype":
            found.properties.dtype = data.draw(st.sampled_from([torch.int8, torch.float64, torch.bfloat16]))
        else:
            setattr(found.chunks[0], "sizes" if change == "chunk" else "offsets", data.draw(sizes))
    read_distributed(pickle.dumps(metadata), content)


def nested(depth: int) -> bytes:
    """Tuples that hold the same tuple twice, many levels deep."""
    return b"N\x85\x94" + b"".join(b"h" + bytes([level]) + b"\x86\x94" for level in range(depth))


@pytest.mark.parametrize(
    "table",
    [
        b"\x80\x04Nr\xff\xff\xff\x7f.",
        b"\x80\x04\x96" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x04\x8b" + struct.pack("<I", (1 << 31) - 1) + b".",
        b"\x80\x04}" + nested(60) + b"Ns.",
        b"\x80\x04}(" + nested(60) + b"Nu.",
        b"\x80\x04ccollections\nOrderedDict\n]" + nested(60) + b"a\x85R.",
        b"\x80\x04ctorch\nSize\n" + nested(60) + b"\x85R.",
        b"\x80\x04\x8f(" + nested(60) + b"\x90.",
    ],
    ids=["memo", "bytearray", "bytes", "frame", "integer", "key", "keys", "pairs", "size", "set"],
)
def test_pickled_bombs_are_refused_at_once(table: bytes) -> None:
    tracemalloc.start()
    try:
        read_distributed(table, b"")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 << 20


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(edits=st.lists(st.tuples(st.integers(0, 3000), st.binary(min_size=1, max_size=4)), min_size=1, max_size=4), in_table=st.booleans())
def test_flipped_bytes_in_a_distributed_checkpoint_are_read_or_refused(edits: list[tuple[int, bytes]], in_table: bool) -> None:
    contents = [bytearray(part) for part in distributed()]
    changed = contents[0] if in_table else contents[1]
    for position, replacement in edits:
        place = position % len(changed)
        changed[place : place + len(replacement)] = replacement
    read_distributed(bytes(contents[0]), bytes(contents[1]))


@lru_cache
def archive() -> bytes:
    """A small file of torch.save."""
    stream = io.BytesIO()
    torch.save({"w": torch.arange(12.0).view(3, 4).t(), "b": torch.ones(3).bfloat16(), "n": 3}, stream)
    return stream.getvalue()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(edits=st.lists(st.tuples(st.integers(0, 5000), st.binary(min_size=1, max_size=4)), min_size=1, max_size=4), cut=st.integers(0, 60))
def test_flipped_bytes_in_a_file_of_torch_are_read_or_refused(edits: list[tuple[int, bytes]], cut: int) -> None:
    content = bytearray(archive())
    for position, replacement in edits:
        place = position % len(content)
        content[place : place + len(replacement)] = replacement
    if cut > 50:
        content = content[: -(cut - 50)]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Path(folder, "x.bin")
        file.write_bytes(content)
        try:
            entries = Checkpoint.open(file).entries
        except CheckpointError as error:
            check_named(error, file)
            return
        for entry in entries.values():
            assert 0 <= entry.offset <= entry.offset + entry.nbytes <= len(content)


@pytest.mark.parametrize("kind", ["deflated", "encrypted", "long"])
def test_records_that_torch_does_not_write_are_refused(tmp_path: Path, kind: str) -> None:
    source = zipfile.ZipFile(io.BytesIO(archive()))
    file = tmp_path / "x.bin"
    with zipfile.ZipFile(file, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            if info.filename.endswith("/byteorder"):
                content = b"little" if kind != "long" else bytes(1000)
                target.writestr(info.filename, content, zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED)
            else:
                target.writestr(info.filename, content)
    if kind == "encrypted":
        content = bytearray(file.read_bytes())
        place = content.rindex(b"/byteorder")
        directory = content.rindex(b"PK\x01\x02", 0, place)
        content[directory + 8] |= 1
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"byteorder|encrypted"):
        Checkpoint.open(file)
