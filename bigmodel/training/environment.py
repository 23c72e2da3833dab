"""Environment variables, read under both prefixes or changed for a while; ports and the kernel."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import platform
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, TypeVar

from ..errors import TrainingError
from ..settings import PREFIXES, read_variable, word_as_bool

__all__ = [
    "check_os_kernel",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_free_port",
    "get_int_from_env",
    "is_port_in_use",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "str_to_bool",
]

logger = logging.getLogger("bigmodel.utils.environment")

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

# What launchers call the same four numbers: torchrun; then Open MPI, MPICH and Intel MPI, MVAPICH2.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
WORLD_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")
LOCAL_WORLD_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")

MAIN_PORT = 29500
LAST_PORT = 2**16 - 1
"""Where the processes of a job meet unless told otherwise; torchrun's default."""

OLDEST_KERNEL = (5, 5, 0)
"""Linux before it is known to hang processes that share memory."""


def str_to_bool(value: str, to_bool: bool = False) -> int:
    """1 or 0 (True or False with `to_bool`) for a word that says yes or no; raises ValueError on other words."""
    answer = word_as_bool(value)
    return answer if to_bool else int(answer)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Whether the variable `key` says yes; `ACCELERATE_X` is looked up as `BIGMODEL_X` first. Raises TrainingError on other words."""
    value = parse_choice_from_env(key, str(default))
    try:
        return word_as_bool(value)
    except ValueError as error:
        raise TrainingError(f"Environment variable {key}: {error}") from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The value of the variable `key`; `ACCELERATE_X` is looked up as `BIGMODEL_X` first."""
    for prefix in PREFIXES:
        if key.startswith(prefix):
            return read_variable(key.removeprefix(prefix), default) or default
    return os.environ.get(key, default)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of these variables that is a number from 0 on (some launchers say "none" by -1); raises TrainingError on other words."""
    for key in env_keys:
        if key in os.environ:
            try:
                number = int(os.environ[key])
            except ValueError:
                raise TrainingError(f"The environment variable {key} is {os.environ[key]!r}, not a whole number.") from None
            if number >= 0:
                return number
    return default


def convert_dict_to_env_variables(current_env: dict[str, str]) -> list[str]:
    """Lines `"KEY=value\\n"`, as files of environment variables have them; what such a line cannot hold is left out, with a warning."""
    lines = []
    for key, value in current_env.items():
        if key and value and not re.search(r"[;\n<> ]", key + value):
            lines.append(f"{key}={value}\n")
        else:
            logger.warning("Left out %r=%r: names and values are not empty, and have no space, line break, ';', '<' or '>'.", key, value)
    return lines


@contextlib.contextmanager
def _restored(mine: Callable[[str], bool]) -> Iterator[None]:
    """Afterwards the variables whose name is `mine` are as they were, also those that were removed; the others stay as they are."""
    before = {name: value for name, value in os.environ.items() if mine(name)}
    try:
        yield
    finally:
        for name in [name for name in os.environ if mine(name) and name not in before]:
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Sets variables for the block: `patch_environment(foo=1)` sets `FOO` to `"1"`. Afterwards, also after an error, they are as before."""
    patched = {name.upper(): str(value) for name, value in kwargs.items()}
    with _restored(patched.__contains__):
        os.environ.update(patched)
        yield


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """No variable is set in the block. Afterwards, also after an error, all are as before, whatever the block has set."""
    with _restored(lambda name: True):
        os.environ.clear()
        yield


def purge_accelerate_environment(func_or_cls: Decorated) -> Decorated:
    """Decorates a test, or a class of tests and those derived from it: variables `BIGMODEL_…` and `ACCELERATE_…` are as before after each.

    Libraries set such variables to tell their settings to what runs later in the process, and so to the next test.
    """
    if not isinstance(func_or_cls, type):
        return _purged(func_or_cls)
    _purge_tests(func_or_cls)
    inherited = func_or_cls.__init_subclass__

    def purge_subclass(cls: type, **kwargs: Any) -> None:
        if inspect.ismethod(inherited):
            inherited.__func__(cls, **kwargs)
        else:  # object's, which knows the class by itself
            inherited(**kwargs)
        _purge_tests(cls)

    func_or_cls.__init_subclass__ = classmethod(purge_subclass)  # type: ignore[arg-type, assignment]
    return func_or_cls


def _ours(name: str) -> bool:
    return name.startswith(PREFIXES)


def _purged(function: Any) -> Any:
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def wait(*args: Any, **kwargs: Any) -> Any:
            with _restored(_ours):
                return await function(*args, **kwargs)

        return wait

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _restored(_ours):
            return function(*args, **kwargs)

    return call


def _purge_tests(cls: type) -> None:
    for name in dir(cls):
        if not name.startswith("test"):
            continue
        member = inspect.getattr_static(cls, name)
        if isinstance(member, (staticmethod, classmethod)):
            setattr(cls, name, type(member)(_purged(member.__func__)))
        elif inspect.isfunction(member):
            setattr(cls, name, _purged(member))


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether something listens on this host's `port`; None: 29500, where processes meet by default. Raises `TrainingError` for no port."""
    number = MAIN_PORT if port is None else int(port)
    if not 0 <= number <= LAST_PORT:
        raise TrainingError(f"port is {number}: ports are 0 to {LAST_PORT}.")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", number)) == 0


def get_free_port() -> int:
    """A port of this host that nothing listens on, chosen by the system."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_os_kernel() -> None:
    """Warns on Linux before 5.5.0, on which processes are known to hang."""
    if platform.system() != "Linux":
        return
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", platform.release())
    if numbers and (version := tuple(int(number or 0) for number in numbers.groups())) < OLDEST_KERNEL:
        logger.warning(
            "Linux kernel %s is older than %s, on which processes of a job are known to hang: upgrade where you can.",
            ".".join(map(str, version)),
            ".".join(map(str, OLDEST_KERNEL)),
        )
