"""The kept figures: found again, never another machine's, never an error because of a bad file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from test_machine_values import MACHINE

from bigmodel.errors import MachineError
from bigmodel.measuring import cache_folder, keep_machine, kept_machine, profile, profile_file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIGMODEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_kept_is_found(cache: Path):
    assert kept_machine() is None
    file = keep_machine(MACHINE)
    assert file == profile_file()
    assert [each.name for each in cache.iterdir()] == [file.name]
    assert kept_machine() == MACHINE
    keep_machine(MACHINE)
    assert len(list(cache.iterdir())) == 1


def test_another_machine_has_another_file(monkeypatch):
    file = keep_machine(MACHINE)
    here = profile.identity()
    monkeypatch.setattr(profile, "identity", lambda: {**here, "accelerators": ["another, 1 MiB"]})
    assert profile_file() != file
    assert kept_machine() is None


def test_a_file_of_another_machine_is_not_used():
    file = keep_machine(MACHINE)
    content = json.loads(file.read_text())
    content["identity"]["cores"] += 1
    file.write_text(json.dumps(content))
    assert kept_machine() is None


def test_a_file_of_another_format_is_not_used():
    file = keep_machine(MACHINE)
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    assert kept_machine() is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', "\x00\xff"])
def test_a_damaged_file_is_logged_and_counts_as_none(text: str, caplog):
    file = keep_machine(MACHINE)
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert kept_machine() is None
    assert file.name in caplog.text
    assert "bigmodel bench" in caplog.text


def test_damaged_figures_are_logged(caplog):
    file = keep_machine(MACHINE)
    content = json.loads(file.read_text())
    content["machine"]["disk"] = {"per_second": "fast"}
    file.write_text(json.dumps(content))
    assert kept_machine() is None
    assert file.name in caplog.text


def test_a_folder_in_the_place_of_the_file_is_logged(caplog):
    profile_file().mkdir(parents=True)
    assert kept_machine() is None
    assert profile_file().name in caplog.text
    with pytest.raises(MachineError, match="cannot be kept"):
        keep_machine(MACHINE)


def test_a_folder_that_cannot_be_made_is_named(cache: Path):
    cache.write_text("in the way")
    with pytest.raises(MachineError, match="BIGMODEL_CACHE"):
        keep_machine(MACHINE)
    assert kept_machine() is None
    assert cache.read_text() == "in the way"


def test_where_the_cache_folder_is(monkeypatch, tmp_path: Path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("BIGMODEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "bigmodel"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/path")
    assert cache_folder() == Path.home() / ".cache" / "bigmodel"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "bigmodel"
