"""The build of the extension: cached by content, one at a time, whole or not at all. Small sources stand in for the real ones."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from simdev import compilation
from simdev.compilation import SimulatorBuildError, build


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two small sources in place of the extension's; every call of the compiler that makes a file is logged beside it."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "number.h").write_text("#define NUMBER 1\n")
    (folder / "first.cpp").write_text('#include "number.h"\nextern "C" int first() { return NUMBER; }\n')
    (folder / "second.cpp").write_text('extern "C" int second() { return 2; }\n')
    compiler = tmp_path / "bin" / "logging-g++"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo "$@" >> {tmp_path}/log\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(compilation, "CSRC", folder)
    monkeypatch.setattr(compilation, "UNITS", {"one": ["first.cpp"], "other": ["second.cpp"]})
    monkeypatch.setattr(compilation, "COMPILER", str(compiler))
    monkeypatch.setenv("BIGMODEL_SIM_BUILD_DIR", str(tmp_path / "cache"))
    compilation._compiler_version.cache_clear()
    yield folder
    compilation._compiler_version.cache_clear()


def calls(sources: Path) -> int:
    return len((sources.parent / "log").read_text().splitlines())


def test_what_has_not_changed_is_not_compiled_again(sources: Path) -> None:
    library = build()
    assert library.parent == sources.parent / "cache"
    assert calls(sources) == 3  # two sources, one link
    assert build() == library
    assert calls(sources) == 3

    (sources / "second.cpp").write_text('extern "C" int second() { return 3; }\n')
    changed = build()
    assert changed != library
    assert calls(sources) == 5  # one source, one link

    (sources / "number.h").write_text("#define NUMBER 4\n")
    assert build() not in (library, changed)
    assert calls(sources) == 8


def test_several_processes_at_once_build_once(sources: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        libraries = pool.starmap(build, [()] * 4)
    assert len(set(libraries)) == 1
    assert calls(sources) == 3


def test_an_error_names_the_file_and_leaves_nothing_half_done(sources: Path) -> None:
    (sources / "second.cpp").write_text("int second() { return undeclared; }\n")
    with pytest.raises(SimulatorBuildError, match=r"failed on other-.*\.o[\s\S]*undeclared"):
        build()
    cache = sources.parent / "cache"
    assert not list(cache.glob("other*"))
    assert not list(cache.glob("*.so"))


def test_what_an_interrupted_build_left_is_cleared_away(sources: Path) -> None:
    cache = sources.parent / "cache"
    cache.mkdir()
    (cache / "first-0123456789abcdef.o.partial").write_bytes(b"half")
    assert build().exists()
    assert not list(cache.glob("*.partial"))


def test_a_missing_compiler_is_named(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "COMPILER", "g++-of-nowhere")
    with pytest.raises(SimulatorBuildError, match="no g\\+\\+-of-nowhere on the PATH"):
        build()


def test_every_source_is_in_a_unit() -> None:
    sources = sorted(source for unit in compilation.UNITS.values() for source in unit)
    assert sources == sorted(path.name for path in compilation.CSRC.glob("*.cpp"))
