"""The fields of a model's configuration: an object with attributes, or the mapping of a `config.json`; both spell the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ConfigFields", "text_config"]

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
    fields = ConfigFields(config)
    for name in _TEXT_CONFIGS:
        inner = fields.get(name)
        if isinstance(inner, Mapping) or hasattr(inner, "to_dict"):
            return text_config(inner)
    return config
