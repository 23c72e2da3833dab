"""Tuples in a pickle that would take for ever, or the whole stack, to hash: a few hundred bytes can make them."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

__all__ = ["refuse_endless_tuples"]

MAX_DEPTH: Final = 100
"""Tuples within each other: hashing goes down into them without a limit of its own."""
MAX_REPEATED: Final = 10_000_000
"""Elements of all tuples that stand in more than one place, counted each time: hashing goes through them again for each."""
AS_THEY_ARE: Final = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.BINPERSID, pickle.BINPUT, pickle.LONG_BINPUT, pickle.EMPTY_TUPLE),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.BINUNICODE, pickle.SHORT_BINSTRING),
)
"""Operations that torch's unpickler knows, which the interpreter's own carries out; those that make or fill something have others below."""


def refuse_endless_tuples(text: bytes) -> None:
    """Raises `pickle.UnpicklingError` for a pickle with such tuples; one that is damaged is left to whoever reads it.

    Nothing of the pickle is made: of its tuples only sizes are held.
    """
    refused = None
    # What is damaged fails in any way, and does so again in the hands of torch.
    with contextlib.suppress(Exception):
        try:
            _Sizes(text).load()
        except _EndlessError as error:
            refused = error
    if refused is not None:
        raise pickle.UnpicklingError(str(refused))


class _EndlessError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Tuple:
    elements: int
    """Of it and of all tuples within."""
    depth: int


class _Sizes(pickle._Unpickler):
    """Goes through the operations of a pickle, and makes nothing but the sizes of its tuples. Everything else is None."""

    dispatch: ClassVar[dict[int, Callable[..., Any]]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in AS_THEY_ARE}

    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text), encoding="latin-1")
        self.repeated = 0

    def find_class(self, module: str, name: str) -> None:
        return None

    def persistent_load(self, pid: Any) -> None:
        return None


def _tuple_of(items: list[Any]) -> _Tuple:
    inner = [item for item in items if type(item) is _Tuple]
    made = _Tuple(len(items) + sum(each.elements for each in inner), 1 + max((each.depth for each in inner), default=0))
    if made.depth > MAX_DEPTH:
        raise _EndlessError(f"it holds more than {MAX_DEPTH} tuples within each other")
    return made


def _marked(sizes: Any) -> None:
    items = sizes.pop_mark()
    sizes.append(_tuple_of(items))


def _last(count: int) -> Callable[[Any], None]:
    def tuple_of_last(sizes: Any) -> None:
        sizes.stack[-count:] = [_tuple_of(sizes.stack[-count:])]

    return tuple_of_last


def _drop(count: int) -> Callable[[Any], None]:
    def drop(sizes: Any) -> None:
        del sizes.stack[-count:]

    return drop


def _drop_marked(sizes: Any) -> None:
    sizes.pop_mark()


def _call(sizes: Any) -> None:
    sizes.stack[-2:] = [None]


def _other(sizes: Any) -> None:
    sizes.append(None)


def _again(load: Callable[..., None]) -> Callable[[Any], None]:
    def again(sizes: Any) -> None:
        load(sizes)
        found = sizes.stack[-1]
        if type(found) is _Tuple:
            sizes.repeated += found.elements
            if sizes.repeated > MAX_REPEATED:
                raise _EndlessError(f"its tuples repeat each other to more than {MAX_REPEATED} elements")

    return again


_Sizes.dispatch |= {
    code[0]: does
    for does, codes in (
        (_marked, [pickle.TUPLE]),
        (_last(1), [pickle.TUPLE1]),
        (_last(2), [pickle.TUPLE2]),
        (_last(3), [pickle.TUPLE3]),
        (_drop(1), [pickle.APPEND, pickle.BUILD]),
        (_drop(2), [pickle.SETITEM]),
        (_drop_marked, [pickle.APPENDS, pickle.SETITEMS]),
        (_call, [pickle.REDUCE, pickle.NEWOBJ]),
        (_other, [pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_SET]),
        (_again(pickle._Unpickler.dispatch[pickle.BINGET[0]]), [pickle.BINGET]),
        (_again(pickle._Unpickler.dispatch[pickle.LONG_BINGET[0]]), [pickle.LONG_BINGET]),
    )
    for code in codes
}
