"""How the names in a checkpoint become the names of a transformers model: transformers' own table, as key rules of the loading room."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...errors import MatchError
from ...loading import Entry, Source, Unmade, Whole
from ...protocols import TensorSpec
from .gguf import gguf_sources, is_gguf
from .package import transformers_module
from .tracing import trace_conversion

__all__ = ["TransformersKeys"]


@dataclass(slots=True)
class _Group:
    """What makes one or several tensors of the model: the checkpoint tensors caught by each pattern of a converter."""

    converter: Any
    collected: dict[str, list[str]] = field(default_factory=dict)


class TransformersKeys:
    """Key rules for a transformers model.

    Renames with the table that transformers keeps for the model's class (old names, prefixes, per-expert weights, fused projections), in
    transformers' order: every renaming, then at most one conversion, then the prefix of the base model is added or taken away.

    Args:
        model: a `PreTrainedModel`, on meta or not; it is only asked for names, shapes and its configuration.
        key_mapping: further renamings, regular expression → replacement, applied before the table.
    """

    def __init__(self, model: nn.Module, key_mapping: Mapping[str, str] | None = None) -> None:
        self._model: Any = model
        self._key_mapping = None if key_mapping is None else dict(key_mapping)
        self.found: dict[str, Source] = {}
        """What the last call of `sources` found."""
        self.used_conversions: list[Any] = []
        """The entries of the table that matched a name at the last call of `sources`; transformers saves with their reverse."""
        self._asked: tuple[dict[str, Entry], dict[str, TensorSpec]] | None = None
        self._unexpected: list[str] = []

    def sources(self, entries: Mapping[str, Entry], targets: Mapping[str, TensorSpec]) -> tuple[dict[str, Source], list[str]]:
        """What fills each tensor of the model, and the names in the checkpoint that the model has no use for.

        Names that the model's class expects to find unused (`_keys_to_ignore_on_load_unexpected`, former buffers) are not listed. Asked
        again for the same, it does not look again: tens of thousands of experts take seconds.

        Raises:
            MatchError: for GGUF files, see `gguf_sources`. Tensors whose conversion lacks some of what it needs, or finds it in the
                wrong shapes, are `Unmade`.
        """
        if self._asked is not None and self._asked == (entries, targets):
            return self.found, self._unexpected
        self._asked = None
        if is_gguf(entries):
            if self._key_mapping:
                raise MatchError("key_mapping renames what transformers has saved. The names in GGUF files are llama.cpp's own.")
            self.used_conversions = []
            self.found, self._unexpected = gguf_sources(self._model, entries, targets)
            self._asked = dict(entries), dict(targets)
            return self.found, self._unexpected
        loading = transformers_module("core_model_loading")
        table = transformers_module("conversion_mapping").get_model_conversion_mapping(self._model, self._key_mapping)
        renamings = [transform for transform in table if isinstance(transform, loading.WeightRenaming)]
        converters = [transform for transform in table if isinstance(transform, loading.WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        names = dict.fromkeys(self._model.state_dict(), True)
        prefix = self._model.base_model_prefix

        groups: dict[str, _Group] = {}
        unused: dict[str, str] = {}
        for name in sorted(entries, key=loading.dot_natural_key):
            renamed, pattern = loading.rename_source_key(name, renamings, converters, prefix, names)
            if renamed not in names and name in names:
                renamed, pattern = loading.rename_source_key(name, [], [], prefix, names)
            converter = None if pattern is None else by_pattern[pattern]
            group = groups.setdefault(renamed, _Group(converter)) if renamed in names else None
            # A tensor that two names in the checkpoint stand for is filled from the first; the other one is reported.
            if group is None or group.converter is not converter or (converter is None and group.collected):
                unused[name] = renamed
            else:
                group.collected.setdefault(pattern or name, []).append(name)

        self.used_conversions = [transform for transform in table if transform.was_used()]
        specs = {name: TensorSpec(tuple(entry.shape), entry.dtype) for name, entry in entries.items()}
        self.found = {}
        for target, group in groups.items():
            try:
                made = self._sources_of(target, group, specs, targets)
            except MatchError as error:
                # What else does not fit shall be told with it.
                made = {target: Unmade(str(error).rstrip("."))}
            for name, source in made.items():
                self.found.setdefault(name, source)
        expected = self._expected_unused()
        self._unexpected = [name for name, renamed in unused.items() if not (expected and expected.search(renamed))]
        self._asked = dict(entries), dict(targets)
        return self.found, self._unexpected

    def _sources_of(
        self, target: str, group: _Group, specs: Mapping[str, TensorSpec], targets: Mapping[str, TensorSpec]
    ) -> dict[str, Source]:
        if group.converter is None:
            (name,) = group.collected
            return {target: Whole(name)}
        for names in group.collected.values():
            _check_numbering(target, names)
        dtype = targets[target].dtype if target in targets else torch.get_default_dtype()
        try:
            return trace_conversion(group.converter, target, group.collected, specs, self._model, dtype)
        # The operations of transformers check little: what they raise for tensors that do not fit is of any type.
        except Exception as error:
            absent = [pattern for pattern in group.converter.source_patterns if pattern not in group.collected]
            lost = f"Nothing in the checkpoint is called {absent}" if absent else "Their shapes do not fit each other or the model"
            shapes = ", ".join(f"{name} {list(specs[name].shape)}" for names in group.collected.values() for name in names[:4])
            raise MatchError(
                f"{target} cannot be made from the checkpoint: {lost}. Found: {shapes}. "
                f"(transformers' conversion {group.converter.operations} says {error!r})"
            ) from error

    def _expected_unused(self) -> re.Pattern[str] | None:
        """What transformers leaves in a checkpoint without a word: the class's own list, and buffers that are computed nowadays."""
        patterns = list(self._model._keys_to_ignore_on_load_unexpected or [])
        buffers = [name for name, _ in self._model.named_buffers()]
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            patterns.append(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in buffers):
            patterns.append(r"(^|\.)position_ids$")
        return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None


def _check_numbering(target: str, names: list[str]) -> None:
    """Raises `MatchError` where numbered tensors (experts) are not 0, 1, 2, … without a hole: stacking them would shift their numbers."""
    parts = [name.split(".") for name in names]
    if len({len(part) for part in parts}) != 1:
        return
    varying = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    if len(varying) != 1 or not all(number.isdigit() for number in varying[0]):
        return
    numbers = [int(number) for number in varying[0]]
    missing = sorted(set(range(max(numbers) + 1)) - set(numbers))
    if missing:
        raise MatchError(
            f"{target} is stacked from numbered tensors such as {names[0]!r}, and {len(missing)} of the numbers up to {max(numbers)}, "
            f"the highest there, are not in the checkpoint: {missing[:8]}"
        )
