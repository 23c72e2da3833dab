"""DeepSpeed's configuration: nested dictionaries, asked by dotted names (https://www.deepspeed.ai/docs/config-json/)."""

from __future__ import annotations

import base64
import binascii
import copy
import json
from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final

from ...errors import TrainingError, WrongTypeError
from ...text import kind_text

__all__ = ["AUTO", "HfDeepSpeedConfig", "leaves"]

AUTO: Final = "auto"
"""Stands for a value that follows from the model, the loaders, the optimizer or the number of processes."""

NOWHERE: Final = ("none", None)
"""Devices of an offload that does not take place."""


class HfDeepSpeedConfig:
    """A configuration of DeepSpeed, asked by dotted names: `get_value("zero_optimization.stage")`.

    Args:
        config_file_or_dict: a dict, which is copied; the path of a JSON file; or such a file's text in base64, as launchers pass it on.

    Attributes:
        config: the dictionaries.

    Raises:
        TrainingError: no such file, or no JSON object in it.
    """

    def __init__(self, config_file_or_dict: Mapping[str, Any] | str | PathLike[str]):
        if isinstance(config_file_or_dict, Mapping):
            self.config: dict[str, Any] = copy.deepcopy(dict(config_file_or_dict))
        elif not isinstance(config_file_or_dict, (str, PathLike)):
            raise WrongTypeError(f"The DeepSpeed config is a JSON file's path or a dict, not {kind_text(config_file_or_dict)}.")
        else:
            self.config = _read(fspath(config_file_or_dict))

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The dictionary that holds (or would hold) the last part of the name, and that part; None for a dictionary that is not there."""
        *path, key = ds_key_long.split(".")
        node: Any = self.config
        for part in path:
            node = node.get(part)
            if not isinstance(node, dict):
                return None, key
        return node, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of that name, or `default`."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Sets the value of that name, in dictionaries that are made where they are not there."""
        *path, key = ds_key_long.split(".")
        node = self.config
        for part in path:
            inner = node.get(part)
            node[part] = node = inner if isinstance(inner, dict) else {}
        node[key] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Takes out the value or dictionary of that name; `TrainingError` where it is not there and `must_exist`."""
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise TrainingError(f"The DeepSpeed config has no {ds_key_long!r} to take out; it has {', '.join(leaves(self.config))}.")

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value is `"auto"`, to be filled in."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the value is there and counts as true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the value is there and counts as false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether gradients and optimizer state are sharded (ZeRO stage 2)."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Whether parameters are sharded, too (ZeRO stage 3)."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Whether optimizer state or parameters rest on the host or on NVMe (stages 2 and 3)."""
        if not (self.is_zero2() or self.is_zero3()):
            return False
        places = (self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param"))
        return any(place not in NOWHERE for place in places)


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all values that are no dictionaries."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _read(place: str) -> dict[str, Any]:
    try:
        there = Path(place).is_file()
    except OSError:  # too long for a path
        there = False
    if there:
        text = Path(place).read_text(encoding="utf-8")
    else:
        try:
            text = base64.b64decode(place, validate=True).decode()
        except (binascii.Error, ValueError):
            raise TrainingError(f"There is no DeepSpeed config {place[:200]!r}; give a JSON file's path, or a dict.") from None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise TrainingError(f"The DeepSpeed config {place[:200]!r} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise TrainingError(f"The DeepSpeed config {place[:200]!r} is {kind_text(config)} in JSON, not an object of keys and values.")
    return config
