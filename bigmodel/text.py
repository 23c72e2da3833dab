"""Numbers and names for people: human units appear only where somebody reads them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .constants import GiB, KiB, MiB

__all__ = ["bytes_text", "first_repeated", "get_pretty_name", "kind_text", "listed", "names_text", "printable"]


def bytes_text(nbytes: int | None, *, short: bool = False) -> str:
    """Bytes for people: `"1.50 GiB"`, `"236 B"`, and `"no limit"` for None; with `short` in three digits where that is enough."""
    if nbytes is None:
        return "no limit"
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(nbytes) >= unit - unit // 2048:  # what would be 1024 of the smaller unit once rounded
            amount = nbytes / unit
            digits = 3 - len(str(int(abs(amount)))) if short else 2 if amount < 100 else 1
            return f"{amount:.{max(0, digits)}f} {name}"
    return f"{nbytes} B"


def printable(text: str) -> str:
    """The text without what would steer a terminal, lines kept: it may hold names from a stranger's checkpoint."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def kind_text(thing: object) -> str:
    """The type of a value, or a type itself, with its article: `"an int"`, `"a str"`, `"an MLP"`; `"None"`."""
    if thing is None:
        return "None"
    name = thing.__name__ if isinstance(thing, type) else type(thing).__name__
    spelled = len(name) > 1 and name[:2].isupper()
    return f"{'an' if name[0] in ('AEFHILMNORSX' if spelled else 'AEIOaeio') else 'a'} {name}"


def listed(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Names as somebody gave them: a string is one name (and not its letters), None is none."""
    return (names,) if isinstance(names, str) else tuple(names or ())


def names_text(names: Iterable[str]) -> str:
    """Module names in short: `layers.0`, `layers.1`, `layers.2`, `norm` become `layers.0–2, norm`."""
    runs: list[tuple[str, int, int, str]] = []
    for name in names:
        match = re.fullmatch(r"(.*?)(\d+)", name)
        if match is None:
            runs.append((name or "everything", -1, -1, ""))
            continue
        stem, number = match[1], int(match[2])
        if runs and runs[-1][0] == stem and runs[-1][2] == number - 1:
            runs[-1] = (stem, runs[-1][1], number, "")
        else:
            runs.append((stem, number, number, ""))
    return ", ".join(stem if first < 0 else f"{stem}{first}" if first == last else f"{stem}{first}–{last}" for stem, first, last, _ in runs)


def first_repeated(names: Iterable[str]) -> str:
    """The first name that stood before; there has to be one."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    raise ValueError("no name is repeated")


def get_pretty_name(obj: object) -> str:
    """What a class, function or module is called; of any other object what its class is."""
    for named in (obj, type(obj)):
        for attribute in ("__qualname__", "__name__"):
            if hasattr(named, attribute):
                return str(getattr(named, attribute))
    return str(obj)
