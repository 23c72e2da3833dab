"""The optional package transformers, imported when it is used."""

from __future__ import annotations

import importlib
from typing import Any

from ...errors import MissingPackageError

__all__ = ["transformers_module"]


def transformers_module(name: str = "") -> Any:
    """The module `transformers`, or its submodule `name`. Raises `MissingPackageError` where transformers is missing or too old."""
    full_name = f"transformers.{name}" if name else "transformers"
    try:
        return importlib.import_module(full_name)
    except ImportError as error:
        raise MissingPackageError(
            "Loading a transformers model needs the package transformers, version 5.24 or later "
            f"({full_name} cannot be imported: {error}). "
            'Install it with: pip install "bigmodel[transformers]"'
        ) from error
