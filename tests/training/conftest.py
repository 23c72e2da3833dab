"""`processes(n)`: n processes in one group, shared by all tests of the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Callable[[int], Processes]]:
    """Gives `Processes` of a size: `processes(2).run(function, *args)` returns what each rank returns."""
    sets: dict[int, Processes] = {}

    def of_size(count: int) -> Processes:
        if count not in sets:
            sets[count] = Processes(count)
        return sets[count]

    yield of_size
    for processes in sets.values():
        processes.close()
