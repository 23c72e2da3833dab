"""What a save has written takes the place of what was saved in a folder before, as a whole."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from ..constants import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_PATTERN_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_PATTERN_NAME
from ..errors import CheckpointError
from ..interrupts import uninterrupted
from .choose import choose

__all__ = ["published_together"]

KINDS: Final = ((WEIGHTS_INDEX_NAME, WEIGHTS_PATTERN_NAME), (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_PATTERN_NAME))
"""How the files are called that saving writes, here and in transformers: the index, and files or shards. The last wins when loaded."""
INDEXES: Final = tuple(index for index, _ in KINDS)


@contextlib.contextmanager
def published_together(folder: Path, names: Collection[str]) -> Iterator[Path]:
    """A temporary folder in `folder`, for the block to write the files `names` in. When it ends they are moved to `folder`, and files that
    a save has left there before, of either kind, are gone.

    The earlier files leave, the index first, before the first new one comes, the index last: whoever reads meanwhile, or after the process
    was killed in between, finds one of the two checkpoints or is told of missing files, but never finds shards of both. What was taken
    out by then lies in `.saving-…/earlier`. A signal is heeded before or after. After an error everything is as it was.

    Raises `CheckpointError`, before the block begins, where folders have these names, or where other files in `folder` would be loaded in
    their place.
    """
    _check_place(folder, names)
    temporary: Path | None = None
    try:
        with uninterrupted():
            temporary = Path(tempfile.mkdtemp(dir=folder, prefix=".saving-"))
        yield temporary
        with uninterrupted():
            _exchange(folder, temporary, names)
    finally:
        with uninterrupted():
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)


def _earlier(folder: Path) -> list[str]:
    """Names of the files that a save has left in `folder`, in the order in which they leave: what would be loaded goes last, its index
    before its shards, which alone are refused as soon as one is missing.
    """
    found = sorted(path.name for path in folder.iterdir() if path.is_file() or path.is_symlink())
    earlier: list[str] = []
    for index, pattern in KINDS:
        files = re.compile(re.escape(pattern).replace(re.escape("{suffix}"), r"(-\d+-of-\d+)?"))
        earlier += [name for name in found if name == index] + [name for name in found if files.fullmatch(name)]
    return earlier


def _check_place(folder: Path, names: Collection[str]) -> None:
    blocked = [name for name in names if (folder / name).is_dir()]
    if blocked:
        raise CheckpointError(f"{folder}: folders are in the way of the files {', '.join(blocked)}. Remove them, or save elsewhere.")
    left = {path.name for path in folder.iterdir() if path.is_file()} - set(_earlier(folder))
    try:
        chosen = choose(sorted({*left, *names}), str(folder))
    except CheckpointError:
        return  # whoever loads the folder is told so, and can name the file
    others = sorted({chosen} if isinstance(chosen, str) else set(chosen))
    if not set(others) <= set(names):
        raise CheckpointError(
            f"{folder}: {', '.join(others[:10])} would be loaded from it, not what is saved ({', '.join(sorted(names)[:10])}). "
            "Move that away, or save elsewhere."
        )


def _exchange(folder: Path, temporary: Path, names: Collection[str]) -> None:
    earlier = _earlier(folder)
    new = sorted(names, key=lambda name: name in INDEXES)
    if len(new) == 1 and set(earlier) <= set(new):  # which the system does in one step
        os.replace(temporary / new[0], folder / new[0])
        return
    aside = temporary / "earlier"
    aside.mkdir()
    moves = [(folder / name, aside / name) for name in earlier] + [(temporary / name, folder / name) for name in new]
    done: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            os.rename(source, target)
            done.append((source, target))
    except BaseException:
        for source, target in reversed(done):
            os.rename(target, source)
        raise
