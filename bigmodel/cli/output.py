"""What every subcommand prints with: one console, human sizes at the edge, JSON for programs."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

from rich.console import Console

__all__ = ["console", "fail", "human_bytes", "print_json"]

console = Console()


def human_bytes(nbytes: int) -> str:
    """Bytes for people: `"90.9 MB"` would be ambiguous, so binary units throughout: `"86.7 MiB"`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def print_json(data: Any) -> None:
    """One JSON document on stdout, and nothing else there."""
    print(json.dumps(data, indent=2))


def fail(message: str, code: int = 1) -> NoReturn:
    """The message on stderr, then exit."""
    Console(stderr=True).print(f"[bold red]Error:[/] {message}", highlight=False, soft_wrap=True)
    sys.exit(code)
