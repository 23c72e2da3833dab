"""File formats: each reads the headers of its files into entries."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .gguf import MAGIC, GgufFormat
from .header import START_BYTES, FolderFormat, Format, Header, Opened, RangedFormat, foreign, open_local
from .safetensors import LENGTH_BYTES, MAX_HEADER_BYTES, SafetensorsFormat
from .torch_distributed import TorchDistributedFormat
from .torch_zip import ZIP_MAGIC, TorchZipFormat

__all__ = ["FORMATS", "FolderFormat", "Format", "Header", "Opened", "RangedFormat", "foreign", "format_by_content", "open_local"]

_SAFETENSORS, _TORCH, _GGUF = SafetensorsFormat(), TorchZipFormat(), GgufFormat()
_PICKLE: Final = b"\x80"
"""What files of torch before 1.6 begin with, which its format refuses with advice."""

FORMATS: Final[tuple[Format, ...]] = (_SAFETENSORS, _TORCH, TorchDistributedFormat(), _GGUF)
"""Known formats. Where a folder holds several, safetensors wins."""


def format_by_content(file: Path) -> tuple[Format | None, bytes]:
    """The format of a file on this machine by its first bytes, None for what no format begins with; and these bytes.

    Raises `CheckpointError` where it cannot be read.
    """
    with open_local(file) as opened:
        start = opened.read(0, START_BYTES)
    if start.startswith((ZIP_MAGIC, _PICKLE)):
        return _TORCH, start
    if start.startswith(MAGIC):
        return _GGUF, start
    is_header = start[LENGTH_BYTES:].startswith(b"{") and int.from_bytes(start[:LENGTH_BYTES], "little") <= MAX_HEADER_BYTES
    return _SAFETENSORS if is_header else None, start
