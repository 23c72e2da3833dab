"""What every subcommand prints with: one console, JSON for programs, one way to fail."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from ..text import printable

__all__ = ["console", "counted", "fail", "note", "print_json"]

console = Console(markup=False, emoji=False)
"""Prints tables. Names and paths are not ours: `[red]` or `:tada:` in one is text, not a style."""


def print_json(data: Any) -> None:
    """One JSON document on stdout, and nothing else there."""
    print(json.dumps(data, indent=2))


def counted(number: int, thing: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def note(message: str) -> None:
    """The message on stderr."""
    Console(stderr=True).print(Text.assemble(("Note:", "bold yellow"), " ", printable(message)), soft_wrap=True)


def fail(message: str, code: int = 1) -> NoReturn:
    """The message on stderr, then exit."""
    Console(stderr=True).print(Text.assemble(("Error:", "bold red"), " ", printable(message)), soft_wrap=True)
    sys.exit(code)
