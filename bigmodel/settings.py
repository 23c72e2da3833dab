"""What users set in the environment: `BIGMODEL_<name>`, or `ACCELERATE_<name>`, which launchers and other libraries set."""

from __future__ import annotations

import os

__all__ = ["PREFIXES", "environment_flag", "read_variable", "word_as_bool"]

PREFIXES = ("BIGMODEL_", "ACCELERATE_")
"""What the names of our variables begin with; the first one that is set counts."""

YES = ("1", "true", "yes", "y", "t", "on")
NO = ("0", "false", "no", "n", "f", "off")


def read_variable(name: str, default: str | None = None) -> str | None:
    """The value of `BIGMODEL_<name>`, else of its alias `ACCELERATE_<name>`, else `default`."""
    for prefix in PREFIXES:
        if prefix + name in os.environ:
            return os.environ[prefix + name]
    return default


def word_as_bool(word: str) -> bool:
    """True for 1, true, yes, y, t, on; False for 0, false, no, n, f, off, in any case. Raises ValueError on other words."""
    if word.lower() in YES:
        return True
    if word.lower() in NO:
        return False
    raise ValueError(f"{word!r} is neither yes nor no: use 1 or 0.")


def environment_flag(name: str, default: bool = False) -> bool:
    """Whether `BIGMODEL_<name>` (or its alias `ACCELERATE_<name>`) says yes; empty says no. Raises ValueError on other words."""
    for prefix in PREFIXES:
        value = os.environ.get(prefix + name)
        if value is None:
            continue
        try:
            return bool(value) and word_as_bool(value)
        except ValueError as error:
            raise ValueError(f"Environment variable {prefix}{name}: {error}") from None
    return default
