"""The fields of a model's configuration: an object with attributes, or the mapping of a `config.json`; both spell the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["UNREADABLE", "ConfigFields", "text_config"]

UNREADABLE: Final = (KeyError, TypeError, ValueError, ArithmeticError)
"""How calculating with a configuration fails where a field is missing, is of another type, or cannot be: it may be a stranger's."""
_NESTED_CONFIGS: Final = 8
"""Configurations inside each other that are followed."""

_TEXT_CONFIGS = ("text_config", "decoder", "generator", "llm_config", "language_config", "thinker_config")
"""Where configurations of several models keep that of the language model."""


class ConfigFields:
    """Reads a configuration's fields, however it spells them."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def get(self, *names: str) -> Any:
        """The first of the fields that is there and not None."""
        for name in names:
            value = self.config.get(name) if isinstance(self.config, Mapping) else getattr(self.config, name, None)
            if value is not None:
                return value
        return None

    def number(self, *names: str, default: int | None = None) -> int:
        """A whole number. Raises KeyError where the configuration has none and there is no default."""
        value = self.get(*names)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if default is None:
            raise KeyError(names[0])
        return default


def text_config(config: Any) -> Any:
    """The configuration of the language model in one of several models, or `config` itself."""
    for _ in range(_NESTED_CONFIGS):
        fields = ConfigFields(config)
        found = (fields.get(name) for name in _TEXT_CONFIGS)
        inner = next((each for each in found if isinstance(each, Mapping) or hasattr(each, "to_dict")), None)
        if inner is None:
            break
        config = inner
    return config
