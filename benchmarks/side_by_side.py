"""Runs the same question for several libraries, each in a fresh process, interleaved, and prints medians and ratios.

A benchmark file defines functions decorated with `@worker`, each of which does one library's side and returns a dict of numbers; `compare`
starts this very file again in a subprocess for every run, so that no library sees another's memory or caches.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

WORKERS: dict[str, Callable[..., dict[str, float]]] = {}


def worker(function: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    WORKERS[function.__name__] = function
    return function


def run_worker_if_asked() -> None:
    """To be called first in `__main__`: this process may be one of the subprocesses, or somebody wants to know what it does (`--help`)."""
    help_if_asked()
    if len(sys.argv) > 2 and sys.argv[1] == "--worker":
        arguments = json.loads(sys.argv[3])
        print("RESULT " + json.dumps(WORKERS[sys.argv[2]](**arguments)))
        sys.exit()


def help_if_asked() -> None:
    """With `--help`, prints what the script says of itself, and ends."""
    script = sys.modules["__main__"]
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"usage: python {sys.argv[0]}\n\n{(script.__doc__ or '').strip()}")
        sys.exit()


def fresh_process(script: str, name: str, arguments: dict[str, object]) -> dict[str, float]:
    """What the worker `name` returns when it runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, script, "--worker", name, json.dumps(arguments)], capture_output=True, text=True, check=False, env=os.environ
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise RuntimeError(f"{name} gave no result:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def compare(
    script: str,
    title: str,
    names: Sequence[str],
    arguments: dict[str, object],
    rounds: int = 3,
    before_each: Callable[[], None] | None = None,
) -> dict[str, dict[str, float]]:
    """Median of each number over `rounds` interleaved runs; prints a table whose last column is ours (the first name) over theirs."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        # Memory and disk are as the run before has left them, so nobody always comes after the same one.
        for name in names if number % 2 == 0 else names[::-1]:
            if before_each is not None:
                before_each()
            results[name].append(fresh_process(script, name, arguments))
    medians = {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()}
    print(f"\n### {title}\n")
    print("| | " + " | ".join(names) + " | ratio |")
    print("|---|" + "---:|" * (len(names) + 1))
    ours = medians[names[0]]
    for key, value in ours.items():
        theirs = [medians[name].get(key, float("nan")) for name in names[1:]]
        ratio = value / theirs[0] if theirs and theirs[0] else float("nan")
        cells = [_format(key, number) for number in [value, *theirs]]
        print(f"| {key} | " + " | ".join(cells) + f" | {ratio:.2f} |")
    return medians


def _format(key: str, value: float) -> str:
    return f"{value / 2**20:,.0f} MiB" if "bytes" in key else f"{value:.3f}"


def drop_from_page_cache(folder: Path) -> None:
    """Makes the next read of the folder's files come from the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.exists() else 0


def print_verdicts(verdicts: Sequence[tuple[str, float, str, float]]) -> None:
    """A table of what was asked for: figure, measured value, "≤" or "≥", and the limit."""
    print("\n### What was asked for\n")
    print("| figure | measured | asked | |")
    print("|---|---:|---:|---|")
    for name, value, sign, limit in verdicts:
        holds = value <= limit if sign == "≤" else value >= limit
        print(f"| {name} | {value:.2f} | {sign} {limit:.2f} | {'holds' if holds else 'falls short'} |")
