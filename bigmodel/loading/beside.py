"""What a configuration beside a checkpoint's file says of how its weights are packed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .location import CheckpointFile

__all__ = ["CONFIGS", "quantization_beside"]

CONFIGS: Final = ("quantize_config.json", "config.json")
MAX_CONFIG_BYTES: Final = 1 << 22


def quantization_beside(file: CheckpointFile) -> Mapping[str, Any]:
    """What the first of `CONFIGS` in a local file's folder that speaks of quantization says; empty where there is none."""
    if not isinstance(file, Path):
        return {}
    for name in CONFIGS:
        config = file.parent / name
        try:
            readable = config.is_file() and config.stat().st_size <= MAX_CONFIG_BYTES
            content = json.loads(config.read_bytes()) if readable else None
        except (OSError, ValueError, RecursionError):
            continue
        if name == "config.json" and isinstance(content, dict):
            content = content.get("quantization_config")
        if isinstance(content, dict) and content:
            return content
    return {}
