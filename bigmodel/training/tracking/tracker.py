"""What a tracker is: the object that tells an experiment tracking library how a run goes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

from ...errors import IncompleteTrackerError, MissingPackageError, TrainingError
from ..available import is_package_available
from ..state import PartialState

__all__ = ["BlankTracker", "GeneralTracker", "LibraryTracker", "Tracker", "library", "on_main_process"]

Method = TypeVar("Method", bound=Callable[..., Any])


class Tracker(Protocol):
    """What is asked of a tracker. `main_process_only = False` on its class means one in every process."""

    name: str

    @property
    def tracker(self) -> Any:
        """The library's own object."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters, once."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and words, at a step."""

    def finish(self) -> None:
        """The run is over."""


def on_main_process(method: Method) -> Method:
    """Makes a tracker's method do nothing in other processes than the main one, unless its class has `main_process_only = False`."""

    @functools.wraps(method)
    def there(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return method(self, *args, **kwargs)

    return there  # type: ignore[return-value]


class GeneralTracker:
    """Base of trackers, also of a user's own.

    Give it the attributes below, a property `tracker` (the library's own object), `log`, and the other methods that its library can do.
    An instance goes into `Accelerator(log_with=…)` as it is; a class that is registered (`register_tracker_class`) goes there by its name.

    Attributes:
        name: what `get_tracker` and `init_kwargs` call it.
        requires_logging_directory: its class takes the logging directory as second argument.
        main_process_only: started and told in the main process alone; False: in every process.

    Raises `IncompleteTrackerError` where a subclass lacks some of it.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool]
    main_process_only: bool = True
    package: ClassVar[str | None] = None
    """What it needs: the name that pip installs and Python imports."""

    def __init__(self, _blank: bool = False):
        if _blank:
            return
        lacking = [member for member in ("name", "requires_logging_directory", "tracker") if member not in dir(self)]
        lacking += [] if keeps_values(self) else ["log"]
        if lacking:
            raise IncompleteTrackerError(f"{type(self).__name__} is no whole tracker: give its class {', '.join(lacking)}.")

    @classmethod
    def installed(cls) -> bool:
        """Whether the package is there."""
        return cls.package is None or is_package_available(cls.package)

    def start(self) -> None:
        """The run begins; called by `Accelerator.init_trackers`, when processes know each other."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters, once."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and words, at a step."""

    def finish(self) -> None:
        """The run is over."""


def keeps_values(tracker: Any) -> bool:
    """Whether a tracker has a `log` of its own: that of `GeneralTracker` does nothing."""
    return getattr(tracker.log, "__func__", None) is not GeneralTracker.log


class BlankTracker(GeneralTracker):
    """Stands for a tracker where none is started: whatever is asked of it does nothing."""

    name = ""
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__(_blank=True)

    def __getattr__(self, name: str) -> BlankTracker:
        if name.startswith("__"):  # what copies and pickles ask for
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> BlankTracker:
        return self


def library(package: str, tracker: str) -> Any:
    """A tracking library, imported when it is used. Raises `MissingPackageError` with the name to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPackageError(f"The tracker {tracker!r} needs the package {package}: pip install {package} ({error}).") from error


class LibraryTracker(GeneralTracker):
    """Base of the trackers in this folder: `_open` gives the library's object when the run begins, `_close` ends it."""

    package: ClassVar[str]
    requires_logging_directory = False
    _opened: Any = None

    def _open(self) -> Any:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _library(self) -> Any:
        return library(self.package, self.name)

    @property
    def tracker(self) -> Any:
        """The library's own object. Raises `TrainingError` before the start and after the end."""
        if self._opened is None:
            raise TrainingError(f"The tracker {self.name!r} is not started: Accelerator.init_trackers does it, or its method start.")
        return self._opened

    @on_main_process
    def start(self) -> None:
        """The run begins. Raises `MissingPackageError` where the library is not installed."""
        if self._opened is None:
            self._opened = self._open()

    @on_main_process
    def finish(self) -> None:
        """The run is over, and everything is written."""
        if self._opened is not None:
            self._close()
            self._opened = None
