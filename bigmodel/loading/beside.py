"""What configurations beside a checkpoint's file say of how its weights are packed."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .location import CheckpointFile

__all__ = ["CONFIGS", "descriptions_beside", "quantization_beside"]

CONFIGS: Final = ("quantize_config.json", "config.json")
MAX_CONFIG_BYTES: Final = 1 << 22


def quantization_beside(file: CheckpointFile) -> Mapping[str, Any]:
    """What the first of `CONFIGS` in a local file's folder that speaks of quantization says; empty where there is none."""
    return next(iter(descriptions_beside(file).values()), {})


def descriptions_beside(file: CheckpointFile) -> Mapping[Path, Mapping[str, Any]]:
    """What those of `CONFIGS` in a local file's folder that speak of quantization say, each by its path."""
    found = {}
    for config in (file.parent / name for name in CONFIGS) if isinstance(file, Path) else ():
        try:
            state = config.stat()
        except OSError:
            continue
        # Asked for each of a checkpoint's weights, of which there may be many thousands.
        content = _description(config, state.st_size, state.st_mtime_ns) if state.st_size <= MAX_CONFIG_BYTES else {}
        if content:
            found[config] = content
    return found


@functools.lru_cache(maxsize=16)
def _description(config: Path, size_bytes: int, modified_ns: int) -> Mapping[str, Any]:
    """What a file of this size and time says of quantization; empty where it says nothing."""
    try:
        content = json.loads(config.read_bytes()) if config.is_file() else None
    except (OSError, ValueError, RecursionError):
        return {}
    if config.name == "config.json" and isinstance(content, dict):
        content = content.get("quantization_config")
    return content if isinstance(content, dict) else {}
