"""Arguments for a model's forward, as shapes on meta: tokens for language models, images and audio where their shape is known."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

__all__ = ["InputsUnknown", "inputs_for"]


class InputsUnknown(Exception):
    """Nothing says what the model takes."""


def inputs_for(
    model: nn.Module, batch: int, tokens: int, *, last_logits: bool = False, example: Any = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for a forward of `model` (on meta) with `batch` sequences of `tokens` tokens.

    `example` (a tensor, a sequence of positional or a mapping of keyword arguments) gives other ones; its tensors are taken as shapes,
    floating ones in the dtype of the model. Encoders of encoder-decoder models get as many tokens as their decoders. With `last_logits`
    only those of the last token are asked for, where the model can. Raises `InputsUnknown`.
    """
    dtype = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.get_default_dtype())
    if example is not None:
        arguments = example if isinstance(example, Mapping | tuple | list) else (example,)
        arguments = tree_map_only(torch.Tensor, lambda tensor: _like(tensor, dtype), arguments)
        return ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
    accepted = set(inspect.signature(model.forward).parameters)
    keywords = _main_input(model, batch, tokens, dtype, accepted)
    if "decoder_input_ids" in accepted:
        keywords["decoder_input_ids"] = _ids(batch, tokens)
    if "input_ids" in keywords and "attention_mask" in accepted and batch > 1:
        # Sequences that run together differ in length: with padding, attention takes a mask of all pairs of tokens.
        keywords["attention_mask"] = _ids(batch, tokens)
    if "use_cache" in accepted:
        keywords["use_cache"] = True
    if last_logits and "logits_to_keep" in accepted:
        keywords["logits_to_keep"] = 1
    return (), keywords


def _main_input(model: nn.Module, batch: int, tokens: int, dtype: torch.dtype, accepted: set[str]) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", "input_ids")
    if name == "input_ids" and name in accepted:
        return {name: _ids(batch, tokens)}
    if name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        shape = (batch, getattr(config, "num_channels", 3), config.image_size, config.image_size)
        return {name: torch.empty(shape, dtype=dtype, device="meta")}
    if name == "input_features" and hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        # Two frames make one position (Whisper's convolution of stride 2).
        return {name: torch.empty(batch, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype, device="meta")}
    raise InputsUnknown("what it takes is not known (give example_inputs)")


def _like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="meta")


def _ids(batch: int, tokens: int) -> torch.Tensor:
    return torch.empty(batch, tokens, dtype=torch.long, device="meta")
