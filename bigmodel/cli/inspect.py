"""`bigmodel inspect CHECKPOINT`: what is in a checkpoint, from its headers alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ..loading import Checkpoint, Entry
from ..loading.entry import Packed
from ..text import bytes_text, printable
from .output import console, counted, print_json

__all__ = ["inspect"]


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="A file, folder or *.index.json, a repository on the hub (owner/name), or a URL.")],
    depth: Annotated[int, typer.Option(help="How many levels of module names to show.", min=1)] = 2,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with the hub's hash, or its own checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tensors, bytes by dtype and by module, and health: every header is checked (lengths, holes, overlaps, index against files)."""
    found = Checkpoint.open(checkpoint, verify=verify)
    facts = _facts(found, depth)
    if as_json:
        print_json(facts)
        return
    summary = (
        f": {found.format}, {counted(len(found.files), 'file')}, {counted(len(found.entries), 'tensor')}, "
        f"{bytes_text(found.total_bytes)}. Headers are sound."
    )
    console.print(Text.assemble((str(found.location), "bold"), summary), soft_wrap=True)
    _print_sizes("dtype", facts["bytes_by_dtype"], found.total_bytes)
    _print_sizes("module", facts["bytes_by_module"], found.total_bytes)
    if tensors:
        table = Table("tensor", "dtype", "shape", "bytes", "file")
        for name, entry in found.entries.items():
            table.add_row(printable(name), _stored_as(entry), str(list(entry.shape)), bytes_text(entry.nbytes), entry.file.name)
        console.print(table)


def _facts(found: Checkpoint, depth: int) -> dict[str, Any]:
    by_dtype: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    for name, entry in found.entries.items():
        by_dtype[_stored_as(entry)] += entry.nbytes
        by_module[".".join(name.split(".")[:-1][:depth]) or name] += entry.nbytes
    return {
        "location": str(found.location),
        "format": found.format,
        "files": [str(file) for file in found.files],
        "total_bytes": found.total_bytes,
        "bytes_by_dtype": dict(by_dtype),
        "bytes_by_module": dict(by_module),
        "metadata": dict(found.metadata),
        "config": _config(found.location),
        "tensors": {
            name: {
                "dtype": _dtype_name(entry.dtype),
                "stored_as": _stored_as(entry),
                "shape": list(entry.shape),
                "nbytes": entry.nbytes,
                "file": str(entry.file),
                "offset": entry.offset,
            }
            for name, entry in found.entries.items()
        },
    }


def _config(location: Path | str) -> Any:
    """The model's configuration that lies beside a checkpoint on this machine; None where there is none that can be read."""
    if isinstance(location, str):
        return None
    file = (location if location.is_dir() else location.parent) / "config.json"
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None


def _print_sizes(what: str, sizes: dict[str, int], total_bytes: int) -> None:
    table = Table(what, "bytes", "share")
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, nbytes in sizes.items():
        table.add_row(printable(name), bytes_text(nbytes), f"{nbytes / max(1, total_bytes):.1%}")
    console.print(table)


def _stored_as(entry: Entry) -> str:
    """The dtype in the file, or the name of the packing (`"Q4_K"`)."""
    return entry.contents.name if isinstance(entry.contents, Packed) else _dtype_name(entry.dtype)


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
