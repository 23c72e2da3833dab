"""Compiles the extension when no build of these exact sources for this torch is in the cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

__all__ = ["SimulatorBuildError", "build", "cache_folder"]

CSRC = Path(__file__).resolve().parent / "csrc"
COMPILER = "g++"
PARALLEL_COMPILERS = 2
COMPILE_FLAGS = ["-O2", "-g0", "-std=c++20", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Wno-sign-compare", "-Wno-interference-size"]
EXTENSION_NAME = "_sim_C"

# Most of the time goes into torch's headers, so sources that need the same ones are compiled together; the slowest unit comes first.
UNITS = {
    "autocast": ["autocast.cpp"],
    "operators": ["attention.cpp", "copies.cpp", "fallback.cpp", "tensors.cpp"],
    "bind": ["bind.cpp"],
    "runtime": ["guard.cpp", "links.cpp", "memory.cpp", "sanitizer.cpp", "streams.cpp"],
}


class SimulatorBuildError(RuntimeError):
    """The simulated accelerator could not be built; the message says what is missing or what the compiler said."""


def cache_folder() -> Path:
    """Where builds are kept: `BIGMODEL_SIM_BUILD_DIR`, or `tests/simulator/build/`, which git ignores."""
    override = os.environ.get("BIGMODEL_SIM_BUILD_DIR")
    return Path(override).resolve() if override else Path(__file__).resolve().parents[1] / "build"


def build() -> Path:
    """Returns the path of the shared object, compiling it first if need be. Raises `SimulatorBuildError`.

    Safe in several processes at once (one builds, the others wait for it) and when interrupted: files appear under their names only when
    they are complete, and names contain a hash of everything that went into them.
    """
    compiler = _compiler_version()
    torch_folder = _torch_folder()
    flags = [*COMPILE_FLAGS, *_include_flags(torch_folder)]
    surroundings = [repr(flags).encode(), compiler.encode(), (torch_folder / "version.py").read_bytes()]
    headers = [path.read_bytes() for path in sorted(CSRC.glob("*.h"))]

    folder = cache_folder()
    objects = {}
    for unit, sources in UNITS.items():
        contents = [(CSRC / source).read_bytes() for source in sources]
        objects[unit] = folder / f"{unit}-{_digest([*surroundings, *headers, *contents])}.o"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    library = folder / f"{EXTENSION_NAME}-{_digest(path.name.encode() for path in objects.values())}{suffix}"
    if library.exists():
        return library
    with _locked(folder):
        if library.exists():  # another process built it while this one waited
            return library
        print(f"Building the simulated accelerator in {folder}, once; this takes a minute or two.", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(PARALLEL_COMPILERS) as pool:
            jobs = [pool.submit(_compile, UNITS[unit], target, flags) for unit, target in objects.items() if not target.exists()]
            for job in jobs:
                job.result()
        torch_libraries = torch_folder / "lib"
        link_flags = [f"-L{torch_libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{torch_libraries}"]
        _produce(library, ["-shared", *map(str, objects.values()), *link_flags])
    return library


@cache
def _compiler_version() -> str:
    if shutil.which(COMPILER) is None:
        raise SimulatorBuildError(
            f"The simulated accelerator is a C++ extension and there is no {COMPILER} on the PATH. Install it: apt-get install g++"
        )
    return subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SimulatorBuildError("The simulated accelerator needs torch. Install it: pip install torch")
    return Path(spec.submodule_search_locations[0])


def _include_flags(torch_folder: Path) -> list[str]:
    python_headers = Path(sysconfig.get_paths()["include"])
    if not (python_headers / "Python.h").exists():
        raise SimulatorBuildError(
            f"The simulated accelerator needs Python's C headers, and {python_headers / 'Python.h'} is missing. "
            "Install them: apt-get install python3-dev"
        )
    torch_headers = torch_folder / "include"
    return [f"-I{torch_headers}", f"-I{torch_headers}/torch/csrc/api/include", f"-I{python_headers}"]


def _digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()[:16]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it when this process ends, however it ends
        for leftover in folder.glob("*.partial"):  # of an interrupted build: whoever holds the lock is the only writer
            leftover.unlink()
        yield


def _compile(sources: list[str], target: Path, flags: list[str]) -> None:
    unit = "".join(f'#include "{source}"\n' for source in sources)
    _produce(target, [*flags, f"-I{CSRC}", "-x", "c++", "-c", "-"], standard_input=unit)


def _produce(target: Path, arguments: list[str], *, standard_input: str | None = None) -> None:
    partial = target.with_name(f"{target.name}.partial")
    done = subprocess.run([COMPILER, *arguments, "-o", str(partial)], input=standard_input, capture_output=True, text=True)
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        said = done.stderr[-4000:]
        raise SimulatorBuildError(f"The simulated accelerator does not build: {COMPILER} failed on {target.name}.\n{said}")
    os.replace(partial, target)
