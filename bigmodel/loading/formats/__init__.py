"""File formats: each reads the headers of its files into entries."""

from __future__ import annotations

from typing import Final

from .gguf import GgufFormat
from .header import FolderFormat, Format, Header, Opened, RangedFormat, open_local
from .safetensors import SafetensorsFormat
from .torch_distributed import TorchDistributedFormat
from .torch_zip import TorchZipFormat

__all__ = ["FORMATS", "FolderFormat", "Format", "Header", "Opened", "RangedFormat", "open_local"]

FORMATS: Final[tuple[Format, ...]] = (SafetensorsFormat(), TorchZipFormat(), TorchDistributedFormat(), GgufFormat())
"""Known formats. Where a folder holds several, safetensors wins."""
