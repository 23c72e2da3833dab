"""Config files as earlier releases of the ecosystem wrote them, and as people type them, in today's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import TrainingError

__all__ = ["todays_words"]

PREFIXES_OF_KEYS: Final = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}
"""Sections whose keys were once written without their prefix."""

NEGATIVE_WORDS: Final = {"distributed_type": "NO", "dynamo_backend": "NO", "mixed_precision": "no"}
"""YAML 1.1 reads `no` without quotation marks as false (https://yaml.org/type/bool.html)."""

SWITCHES: Final = {"ipex_config": "ipex", "mpirun_config": "mpirun_hostfile"}
"""Sections that bigmodel has nothing for, and their key without which nothing was asked for."""


def todays_words(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same keys and values, with those of older files in the place and under the name that they have today.

    Raises `TrainingError` where a key stands there under both of its names, with different values.
    """
    found: dict[Any, Any] = {
        key: NEGATIVE_WORDS[key] if value is False and key in NEGATIVE_WORDS else value for key, value in content.items()
    }
    for section, prefix in PREFIXES_OF_KEYS.items():
        if isinstance(found.get(section), Mapping):
            found[section] = _prefixed(found[section], prefix, section)
    if (backend := found.pop("dynamo_backend", None)) not in (None, "NO", "no"):
        found["dynamo_config"] = _joined(found.get("dynamo_config") or {}, "dynamo_backend", backend, "dynamo_config")
    if found.pop("fp16", False) and found.get("mixed_precision") is None:
        found["mixed_precision"] = "fp16"
    return {key: value for key, value in found.items() if not _asks_for_nothing(key, value)}


def _prefixed(section: Mapping[Any, Any], prefix: str, name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in section.items():
        found = _joined(found, key if str(key).startswith(prefix) else f"{prefix}{key}", value, name)
    return found


def _joined(section: Mapping[Any, Any], key: str, value: Any, name: str) -> dict[Any, Any]:
    if key in section and section[key] != value:
        raise TrainingError(f"{name} has {key} twice: {section[key]} and {value}.")
    return {**section, key: value}


def _asks_for_nothing(key: str, value: Any) -> bool:
    """Whether a section stands there because every file of a CPU job had it: an extension that is off, MPI without hosts."""
    switch = SWITCHES.get(key)
    return switch is not None and isinstance(value, Mapping) and not value.get(switch)
