"""The memory limit of this process's control groups (Linux, versions 1 and 2): the system's own figures leave it out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["headroom_bytes"]

NO_LIMIT = 1 << 60
"""Version 1 writes a number of pages near the largest integer where there is no limit."""


def headroom_bytes(membership: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left under the tightest limit of the process's group and the groups around it; None without a limit.

    `membership` lists the groups of the process (`man 7 cgroups`); below `mounted` lie their files. Clean page cache counts as usage there
    but is given back on demand, so that it is counted as free.
    """
    left = [nbytes for folder, names in _groups(membership, mounted) if (nbytes := _left_bytes(folder, *names)) is not None]
    return min(left, default=None)


def _groups(membership: Path, mounted: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """The folders of the memory groups, the process's own first, with the names of the files for limit and usage."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    first, second = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    # In a container the group may lie outside of what is mounted; its own limit is then at the top.
    for line in [*lines, "0::/", "0:memory:/"]:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if (controllers and "memory" not in controllers.split(",")) or ".." in path.split("/"):
            continue
        names, top = (second, mounted / "memory") if controllers else (first, mounted)
        group = PurePosixPath("/", path)
        for each in (group, *group.parents):
            yield top / each.relative_to("/"), names


def _left_bytes(folder: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= NO_LIMIT:
            return None
        usage = int((folder / usage_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(statistics.get("total_inactive_file", statistics.get("inactive_file", "0")))
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - usage + cached)
