"""Versions of packages, compared."""

from __future__ import annotations

import importlib.metadata
import operator
from collections.abc import Callable
from typing import Final

import torch
from packaging.version import Version

from ..errors import MissingPackageError, TrainingError

__all__ = ["compare_versions", "is_torch_version"]

OPERATIONS: Final[dict[str, Callable[[Version, Version], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Whether the installed package (or the version) stands in that relation to `requirement_version`; `"2.9.1+cpu"` counts as 2.9.1.

    Raises `TrainingError` for an operation other than `>`, `>=`, `==`, `!=`, `<=`, `<`, and `MissingPackageError`.
    """
    if operation not in OPERATIONS:
        raise TrainingError(f"{operation!r} does not compare versions; use one of {list(OPERATIONS)}.")
    version = library_or_version if isinstance(library_or_version, Version) else _installed(library_or_version)
    return OPERATIONS[operation](Version(version.public), Version(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version stands in that relation to `version`: `is_torch_version(">=", "2.9")`."""
    return compare_versions(Version(torch.__version__), operation, version)


def _installed(package: str) -> Version:
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingPackageError(f"The package {package!r} is not installed: pip install {package}.") from error
