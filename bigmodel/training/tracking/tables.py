"""What the libraries have in common that take tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import TrainingError
from .tracker import LibraryTracker, on_main_process

__all__ = ["TableTracker"]


class TableTracker(LibraryTracker):
    """A tracker whose library takes tables: `_tell_table` gives it one."""

    def _tell_table(self, name: str, columns: list[str] | None, rows: Sequence[Sequence[Any]], step: int | None, **kwargs: Any) -> None:
        raise NotImplementedError

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """A table of rows, or of a dataframe. `kwargs`: of the library's own function, see the class.

        Raises `TrainingError` where there are neither rows nor a dataframe.
        """
        names: list[str] | None
        rows: Sequence[Sequence[Any]]
        if dataframe is not None:
            names, rows = [str(name) for name in dataframe.columns], dataframe.to_numpy().tolist()
        elif data is None:
            raise TrainingError(f"{self.name}: the table {table_name!r} has no rows: give data, or a dataframe.")
        else:
            names, rows = None if columns is None else list(columns), data
        self._tell_table(table_name, names, rows, step, **kwargs)
