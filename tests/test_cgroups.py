"""Memory limits of containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel import devices
from bigmodel.cgroups import headroom_bytes

GB = 10**9


def group(folder: Path, version: int, limit: int | str, usage: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{'total_' if version == 1 else ''}inactive_file {cached}\n")


def membership(folder: Path, *lines: str) -> Path:
    file = folder / "membership"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_second_version(tmp_path: Path) -> None:
    group(tmp_path / "user" / "job", 2, 8 * GB, 3 * GB, GB)
    group(tmp_path / "user", 2, "max", 30 * GB)
    assert headroom_bytes(membership(tmp_path, "0::/user/job"), tmp_path) == 6 * GB


def test_a_tighter_limit_around_the_group_counts(tmp_path: Path) -> None:
    group(tmp_path / "user" / "job", 2, 8 * GB, 3 * GB)
    group(tmp_path / "user", 2, 20 * GB, 19 * GB)
    assert headroom_bytes(membership(tmp_path, "0::/user/job"), tmp_path) == GB


def test_first_version_among_other_controllers(tmp_path: Path) -> None:
    group(tmp_path / "memory" / "docker" / "abc", 1, 4 * GB, GB, GB // 2)
    group(tmp_path / "memory", 1, 9223372036854771712, 50 * GB)
    file = membership(tmp_path, "9:name=systemd:/x", "5:cpu,cpuacct:/docker/abc", "4:memory:/docker/abc", "0::/")
    assert headroom_bytes(file, tmp_path) == 3 * GB + GB // 2


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_that_sees_its_group_at_the_top(tmp_path: Path, version: int) -> None:
    group(tmp_path / "memory" if version == 1 else tmp_path, version, 2 * GB, GB)
    line = "4:memory:/host/path/abc" if version == 1 else "0::/../../abc"
    assert headroom_bytes(membership(tmp_path, line), tmp_path) == GB


def test_without_a_limit_or_without_groups(tmp_path: Path) -> None:
    assert headroom_bytes(tmp_path / "nothing", tmp_path) is None
    group(tmp_path, 2, "max", GB)
    assert headroom_bytes(membership(tmp_path, "0::/"), tmp_path) is None


def test_more_in_use_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    group(tmp_path, 2, GB, 2 * GB)
    assert headroom_bytes(membership(tmp_path, "0::/"), tmp_path) == 0


def test_host_memory_is_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "headroom_bytes", lambda: 12_345)
    assert devices.available_host_bytes() == 12_345
