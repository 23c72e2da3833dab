"""What scripts tell trackers, as what libraries store: numbers, words, and containers of them."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch

from ...errors import TrainingError
from ...structures import is_dataclass_instance

__all__ = ["flattened", "numbers", "numbers_and_words", "plain", "plain_leaf"]

_PLAIN = (bool, int, float, str, type(None))


def plain_leaf(value: Any) -> Any:
    """A number, a word or None where `value` means one (tensors and arrays of one element, enums, paths, dtypes); else `value` itself."""
    if isinstance(value, enum.Enum):
        return plain_leaf(value.value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and math.prod(value.shape) == 1:
        return value.item()
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    return value


def plain(value: Any, tracker: str, where: str = "config") -> Any:
    """A configuration of dicts, lists, numbers, words and None; dataclasses are dicts. Raises `TrainingError` by name for anything else."""
    if is_dataclass_instance(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain_leaf(key)): plain(item, tracker, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, tracker, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (torch.Tensor, np.ndarray)) and math.prod(value.shape) != 1:
        return value.tolist()
    value = plain_leaf(value)
    if not isinstance(value, _PLAIN):
        raise TrainingError(
            f"{where} is of type {type(value).__qualname__}, which {tracker} cannot store: give a number, a word, a list or a dict of them."
        )
    return value


def flattened(values: Mapping[str, Any], tracker: str) -> dict[str, bool | int | float | str | None]:
    """The same in one level: `{"optimizer": {"rate": 0.1}}` is `{"optimizer/rate": 0.1}`, and lists are their text."""
    result: dict[str, Any] = {}
    for key, value in plain(values, tracker).items():
        if isinstance(value, dict):
            result.update({f"{key}/{below}": item for below, item in flattened(value, tracker).items()})
        else:
            result[key] = str(value) if isinstance(value, list) else value
    return result


def numbers_and_words(values: Mapping[str, Any], tracker: str) -> tuple[dict[str, int | float], dict[str, str]]:
    """What is logged at a step, in one level, as numbers and as words. Raises `TrainingError` by name for what is neither."""
    found: dict[str, int | float] = {}
    words: dict[str, str] = {}
    for key, value in values.items():
        value = plain_leaf(value)
        if isinstance(value, Mapping):
            below = numbers_and_words({f"{key}/{name}": item for name, item in value.items()}, tracker)
            found.update(below[0])
            words.update(below[1])
        elif isinstance(value, (bool, int, float)):
            found[key] = value
        elif isinstance(value, str):
            words[key] = value
        else:
            raise TrainingError(f"{tracker} cannot log {key!r}: it is of type {type(value).__qualname__}, not a number or a word.")
    return found, words


def numbers(values: Mapping[str, Any], tracker: str) -> dict[str, int | float]:
    """The same for a library that takes only numbers."""
    found, words = numbers_and_words(values, tracker)
    for key, word in words.items():
        raise TrainingError(f"{tracker} logs numbers only, and {key!r} is {word!r}.")
    return found
