"""Folders that several processes fill together, and that are there completely or not at all; their names, and how many are kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError, CheckpointNotFoundError, TrainingError
from .collectives import broadcast_object_list, gather_object
from .configuration import ProjectConfiguration

__all__ = ["MANIFEST_NAME", "delete_oldest", "filled_together", "latest_checkpoint", "next_checkpoint", "read_manifest", "together"]

MANIFEST_NAME: Final = "training_state.json"
"""What the folder holds: sizes of all files in bytes, and the job's own numbers."""

SAVING: Final = ".saving"
REPLACED: Final = ".replaced"
"""How the names of folders end that are there only while a state is saved."""

NUMBERED: Final = re.compile(r"checkpoint_(\d+)")


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """The block succeeds in all processes or fails in all: one that failed raises its own error, the others name it."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    stories: list[str | None] = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
    failed = {rank: story for rank, story in enumerate(stories) if story is not None}
    if error is not None:
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise CheckpointError(f"{what} failed: {error}.") from error
        raise error
    if failed:
        rank, story = next(iter(failed.items()))
        raise TrainingError(f"{what} failed in process {rank}: {story}")


@contextlib.contextmanager
def filled_together(folder: Path, writes: bool, facts: dict[str, Any]) -> Iterator[Path]:
    """A temporary neighbour of `folder` for all processes to write in, which takes its place when the block has succeeded in all of them.

    A folder that is there already is replaced in one step: what an earlier save put there goes, other files stay. An error, in whichever
    process, leaves everything as it was. A folder that cannot be moved is filled file by file in the end, and counts as damaged until then.

    Args:
        writes: whether this process makes and moves the folder; one for each file system.
        facts: of the job, for the manifest; all that can be written as JSON. Read when the block has ended.
    """
    places = [str(_temporary_place(folder))]
    broadcast_object_list(places)
    temporary = Path(places[0])
    with together(f"Making {temporary}"):
        if writes:
            if folder.exists() and not folder.is_dir():
                raise CheckpointError(f"{folder}: it is a file, so nothing can be saved in it. Give the name of a folder.")
            _clear_up(folder)
            temporary.mkdir(parents=True)
    done = False
    try:
        with together(f"Saving {folder} (of which nothing half written is left)"):
            yield temporary
        with together(f"Replacing {folder}"):
            if writes:
                files = {str(file.relative_to(temporary)): file.stat().st_size for file in sorted(temporary.rglob("*")) if file.is_file()}
                (temporary / MANIFEST_NAME).write_text(json.dumps({**facts, "files": files}, indent=1) + "\n")
                _replace(temporary, folder)
        done = True
    finally:
        if writes and not done:
            shutil.rmtree(temporary, ignore_errors=True)


def _temporary_place(folder: Path) -> Path:
    """Beside `folder`; inside, where it cannot be moved: it is mounted, somebody works in it, or nobody may write beside it."""
    token = uuid.uuid4().hex[:8]
    fixed = folder.is_dir() and (os.path.ismount(folder) or Path.cwd().is_relative_to(folder) or not os.access(folder.parent, os.W_OK))
    return folder / f".{token}{SAVING}" if fixed else folder.parent / f".{folder.name}.{token}{SAVING}"


def _replace(temporary: Path, folder: Path) -> None:
    if temporary.parent == folder:
        _replace_files(temporary, folder)
        return
    if not folder.exists():
        os.rename(temporary, folder)
        return
    old = temporary.with_suffix(REPLACED)
    os.rename(folder, old)
    try:
        os.rename(temporary, folder)
    except BaseException:
        os.rename(old, folder)
        raise
    _discard(old, folder)


def _replace_files(temporary: Path, folder: Path) -> None:
    """File by file, with a manifest that says meanwhile that the folder is not complete."""
    stale = {Path(name).parts[0] for name in _manifest_files(folder)} | {entry.name for entry in temporary.iterdir()}
    (folder / MANIFEST_NAME).write_text('{"incomplete": "a save was interrupted"}\n')
    for name in stale - {MANIFEST_NAME}:
        _remove(folder / name)
        if (temporary / name).exists():
            os.rename(temporary / name, folder / name)
    os.replace(temporary / MANIFEST_NAME, folder / MANIFEST_NAME)
    temporary.rmdir()


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)


def _discard(old: Path, folder: Path) -> None:
    """Removes a replaced folder; files in it that no save has put there go to the new one."""
    ours = set(_manifest_files(old)) | {MANIFEST_NAME}
    for entry in old.iterdir():
        if entry.name not in {Path(name).parts[0] for name in ours} and not (folder / entry.name).exists():
            os.rename(entry, folder / entry.name)
    shutil.rmtree(old)


def _clear_up(folder: Path) -> None:
    """Ends what a process that was killed while it saved `folder` has left."""
    for left in folder.parent.glob(f".{folder.name}.*{REPLACED}"):
        if folder.exists():
            _discard(left, folder)
        else:
            os.rename(left, folder)
    for left in [*folder.parent.glob(f".{folder.name}.*{SAVING}"), *folder.glob(f".????????{SAVING}")]:
        shutil.rmtree(left, ignore_errors=True)


def _manifest_files(folder: Path) -> dict[str, int]:
    try:
        return dict(json.loads((folder / MANIFEST_NAME).read_text())["files"])
    except (OSError, ValueError, KeyError):
        return {}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The facts of a saved folder, whose files are all there; empty for one that another program wrote.

    Raises `CheckpointNotFoundError` where there is no folder, and `CheckpointError` where a file is missing or of another size.
    """
    if not folder.is_dir():
        left = next(folder.parent.glob(f".{folder.name}.*{REPLACED}"), None)
        hint = "" if left is None else f" A save was interrupted while it replaced it; the earlier state is in {left}."
        raise CheckpointNotFoundError(f"{folder}: there is no such folder.{hint}")
    file = folder / MANIFEST_NAME
    if not file.exists():
        return {}
    try:
        facts: dict[str, Any] = json.loads(file.read_text())
        files = dict(facts["files"])
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{file} is damaged: {error}. Load another checkpoint.") from error
    for name, size in files.items():
        there = (folder / name).stat().st_size if (folder / name).exists() else None
        if there != size:
            raise CheckpointError(
                f"{folder / name} {'is missing' if there is None else f'has {there} bytes'}, and was saved with {size}: "
                "the checkpoint is not complete. Copy it again, or load another one."
            )
    return facts


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    found = [(int(match[1]), entry) for entry in folder.iterdir() if (match := NUMBERED.fullmatch(entry.name))] if folder.is_dir() else []
    return sorted(found)


def _numbered_folder(project: ProjectConfiguration) -> Path:
    if project.project_dir is None:
        raise TrainingError("automatic_checkpoint_naming needs a project_dir: give one to Accelerator or ProjectConfiguration.")
    return Path(project.project_dir) / "checkpoints"


def next_checkpoint(project: ProjectConfiguration) -> Path:
    """The folder for `project.iteration`. Raises `TrainingError` where it is there already."""
    folder = _numbered_folder(project) / f"checkpoint_{project.iteration}"
    if folder.exists():
        raise TrainingError(
            f"{folder} exists. Load the latest checkpoint to go on counting after it, or set ProjectConfiguration(iteration=…) yourself."
        )
    return folder


def latest_checkpoint(project: ProjectConfiguration) -> Path:
    """The one with the highest number. Raises `CheckpointNotFoundError` where there is none."""
    folder = _numbered_folder(project)
    found = _checkpoints(folder)
    if not found:
        raise CheckpointNotFoundError(f"{folder}: there is no checkpoint to load. Save one first, or name a folder.")
    return found[-1][1]


def delete_oldest(project: ProjectConfiguration) -> None:
    """Removes numbered checkpoints, the lowest numbers first, until `total_limit` are left."""
    if project.total_limit is None:
        return
    found = _checkpoints(_numbered_folder(project))
    for _, folder in found[: max(len(found) - project.total_limit, 0)]:
        # Out of sight in one step, so that what is left of it after a crash is not taken for a checkpoint.
        doomed = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}{SAVING}"
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
