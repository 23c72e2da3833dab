"""Arguments of another type than they are annotated with, refused by name before anything is done with them."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from numbers import Integral, Real
from typing import Any, Final, Union, cast

from ..errors import WrongTypeError
from ..text import kind_text

__all__ = ["refuse_wrong_arguments", "refuse_wrong_fields", "wrong_thing"]

WORDS: Final[dict[Any, list[str]]] = {
    bool: ["True", "False"],
    int: ["a whole number"],
    float: ["a number"],
    type(None): ["None"],
}
KINDS: Final[dict[Any, list[str]]] = {
    Callable: ["a function"],
    list: ["a list"],
    Sequence: ["a list"],
    dict: ["a dict"],
    Mapping: ["a dict"],
    Iterable: ["an iterable"],
}


def refuse_wrong_fields(settings: Any) -> None:
    """Raises `WrongTypeError` for the first field of a dataclass whose value does not fit its annotation."""
    kind: Any = type(settings)
    hints = _hints(kind)
    for field in dataclasses.fields(settings):
        _refuse(f"{kind.__name__}({field.name}=", getattr(settings, field.name), hints[field.name])


def refuse_wrong_arguments(function: Callable[..., Any], owner: str, arguments: Mapping[str, Any]) -> None:
    """Raises `WrongTypeError` for the first parameter of `function` whose value in `arguments` does not fit its annotation.

    Args:
        owner: whose arguments the message says they are.
        arguments: by name; others than the parameters' are passed over, so that it may be `locals()`.
    """
    for name, hint in _hints(function).items():
        if name in arguments:
            _refuse(f"{owner}({name}=", arguments[name], hint)


def wrong_thing(function: str, takes: str, thing: Any, advice: str = "") -> WrongTypeError:
    """The error about an argument of another kind: who takes it, what it takes, and at the end what to give instead."""
    got = f"the class {thing.__name__}" if isinstance(thing, type) else kind_text(thing)
    return WrongTypeError(f"{function} takes {takes}, not {got}{f': {advice}' if advice else ''}.")


def _refuse(beginning: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise WrongTypeError(f"{beginning}{shown}): it takes {_described(hint)}, not {kind_text(value)}.")


@cache
def _hints(thing: Any) -> dict[str, Any]:
    unknown: dict[str, Any] = {}
    while True:
        try:
            return typing.get_type_hints(cast(Any, thing), localns=dict(unknown))
        except NameError as error:  # imported for type checkers alone; whoever uses the value looks at it
            unknown[str(error.name)] = Any


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in typing.get_args(hint))
    if hint is Any:
        return True
    if hint is bool:
        return isinstance(value, bool) or (isinstance(value, Integral) and value in (0, 1))
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if origin is Callable:
        return callable(value)
    kind = hint if origin is None else origin
    if not inspect.isclass(kind) or (getattr(kind, "_is_protocol", False) and kind.__module__.startswith(str(__package__))):
        return True  # protocols, that nobody can ask for, and what is no class
    if kind in (list, Sequence):
        return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if kind in (dict, Mapping):
        return isinstance(value, Mapping)
    if issubclass(kind, Enum):  # words do, and are looked up where they are used
        return isinstance(value, (kind, str))
    return isinstance(value, kind)


def _described(hint: Any) -> str:
    each = _words(hint)
    return each[0] if len(each) == 1 else f"{', '.join(each[:-1])} or {each[-1]}"


def _words(hint: Any) -> list[str]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [word for one in typing.get_args(hint) for word in _words(one)]
    if hint in WORDS:
        return WORDS[hint]
    kind = typing.get_origin(hint) or hint
    return KINDS.get(kind) or [kind_text(kind)]
