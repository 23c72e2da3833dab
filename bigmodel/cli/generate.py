"""`bigmodel generate MODEL --prompt …`: text from a model that need not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..dispatch import placement
from ..errors import BigModelError
from ..integrations.transformers import config_folder, from_pretrained, resolve, single_gguf
from ..integrations.transformers.package import transformers_module
from ..loading import Checkpoint
from ..loading.location import HubRepository, located
from ..text import kind_text
from .budgets import MaxMemory, parse_max_memory

__all__ = ["generate"]


def generate(
    model: Annotated[str, typer.Argument(help="A folder, a GGUF file, or a model's id on the hub.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    max_memory: MaxMemory = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at the most.", min=1)] = 64,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    device_map: Annotated[str, typer.Option(help="auto, balanced, sequential, or one device.")] = "auto",
    show_plan: Annotated[bool, typer.Option("--show-placement", help="Print where everything lives before generating.")] = False,
) -> None:
    """Loads a causal language model under the given budgets and streams its answer to the prompt."""
    text_streamer = transformers_module().TextStreamer
    tokenizer = _tokenizer(model)  # takes a moment; the weights of a model that nobody can talk to would take minutes
    loaded = from_pretrained(model, device_map=device_map, max_memory=parse_max_memory(max_memory), dtype=dtype)
    if not loaded.can_generate():
        raise BigModelError(f"{model} is {kind_text(loaded)}, which does not generate text: name a causal language model.")
    if show_plan:
        print(placement(loaded))
    inputs = tokenizer(prompt, return_tensors="pt").to(loaded.device)
    loaded.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=text_streamer(tokenizer, skip_special_tokens=True))


def _tokenizer(model: str) -> Any:
    """The tokenizer in a folder, in a GGUF file or on the hub. Raises `BigModelError`, naming it, where there is none that works."""
    advice = "Put the tokenizer's files (tokenizer.json, tokenizer_config.json) beside config.json."
    gguf = _gguf(model)
    if gguf is not None:
        Checkpoint.open(gguf)  # says what is damaged in the file, if anything is
        advice = "A GGUF file holds its tokenizer itself (tokenizer.ggml.model, tokenizer.ggml.tokens): convert the model with it."
    try:
        auto = transformers_module().AutoTokenizer
        tokenizer: Any = auto.from_pretrained(model) if gguf is None else auto.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A missing file, a missing package and a damaged file come as errors of many types, some of them bare Exceptions.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise BigModelError(f"{model}: no tokenizer that works. {advice} transformers says: {type(error).__name__}: {reason}") from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what some classes make of a folder without these files
        raise BigModelError(f"{model}: its {type(tokenizer).__name__} has no vocabulary. {advice}")
    return tokenizer


def _gguf(model: str) -> Path | None:
    """The GGUF file that is the whole model, fetched if it is on the hub; None for models with a configuration of their own."""
    place = located(model)
    if isinstance(place, Path) and not place.is_file() and not (place / "config.json").exists():
        Checkpoint.open(place)  # says that it is not there, or that several files are
    if isinstance(place, HubRepository) and (place.path.endswith(".gguf") or config_folder(place) is None):
        fetched = resolve(model)
        return fetched if fetched.is_file() else None
    return single_gguf(place) if isinstance(place, Path) else None
