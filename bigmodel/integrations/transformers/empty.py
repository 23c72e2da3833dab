"""A transformers model without weights: its class and dtype found from the configuration, its parameters on meta."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ...errors import BigModelError, CheckpointError
from ...loading import Checkpoint, init_empty_weights
from ...modules import get_non_persistent_buffers, tensor_aliases
from ...text import kind_text
from .gguf import single_gguf
from .initialize import compute_buffers, set_tensor
from .package import transformers_module

__all__ = ["build_empty", "empty_model", "is_config", "load_config", "misfit", "resolve_dtype"]

SIZES: Final = ("block_count", "embedding_length")
"""What the metadata of a GGUF file must say of its model, after the name of the architecture."""


def empty_model(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    model_class: Any = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """The transformers model that a folder's `config.json` describes, with its parameters and persistent buffers on meta.

    Buffers that are computed (rotary frequencies, position ids) are real, on CPU. Weights are tied as the configuration says.

    Args:
        path: a folder with a `config.json`.
        dtype: of the floating parameters; `"auto"` and None mean the configuration's, or the checkpoint's where the configuration names
            none. What the class keeps in float32 (`_keep_in_fp32_modules`) stays so.
        model_class: a model class of transformers, an `Auto…` class, or the name of either; by default the configuration's architecture.
        trust_remote_code: whether code that lies in the folder may run.

    Raises:
        MissingPackageError: transformers is not installed. CheckpointError: no configuration, an unknown class, a dtype that is none, or
        buffers that nobody computes.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    found = resolve_dtype(dtype, config, lambda: Checkpoint.open(Path(path)))
    return build_empty(config, dtype=found, model_class=model_class, trust_remote_code=trust_remote_code)


def load_config(path: str | os.PathLike[str], *, trust_remote_code: bool = False, **overrides: Any) -> Any:
    """The configuration in the folder `path`, or in a GGUF file; see `single_gguf`.

    Raises `CheckpointError` where there is none, or none that transformers knows.
    """
    transformers = transformers_module()
    gguf = single_gguf(path)
    if gguf is not None:
        path, overrides = gguf.parent, overrides | {"gguf_file": gguf.name}
    try:
        config = transformers.AutoConfig.from_pretrained(os.fspath(path), trust_remote_code=trust_remote_code, **overrides)
    except (BigModelError, ImportError):
        raise
    # What transformers reads is taken for granted there, types as well: anything may come of damage.
    except Exception as error:
        raise CheckpointError(f"{os.fspath(gguf or path)!r} has no configuration that transformers can read: {error}") from error
    if gguf is not None:
        _check_sizes(gguf)
        config.architectures = config.architectures or _usual_architecture(config)
    return config


def _check_sizes(gguf: Path) -> None:
    """transformers takes its defaults for sizes that the file leaves out, as if it were another model."""
    metadata = Checkpoint.open(gguf).metadata
    architecture = metadata.get("general.architecture", "")
    absent = [name for name in (f"{architecture}.{size}" for size in SIZES) if name not in metadata]
    if absent:
        raise CheckpointError(
            f"{gguf}: its metadata do not say {', '.join(absent)}: the model's sizes cannot be known. Convert the model anew."
        )


def _usual_architecture(config: Any) -> list[str] | None:
    """The class of language models for a configuration that names none: what GGUF files hold."""
    mapping = transformers_module("models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found = mapping.get(config.model_type)
    return None if found is None else [found]


def is_config(thing: object) -> bool:
    """Whether it is a configuration object of transformers; where that was never imported, nothing is."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(thing, transformers.PretrainedConfig)


def resolve_dtype(dtype: torch.dtype | str | None, config: Any, open_checkpoint: Callable[[], Checkpoint] | None) -> torch.dtype:
    """The dtype that the model is built in: the asked one, the configuration's, or that of the first floating tensor in the checkpoint.

    Without a checkpoint (None) the last of these is torch's default.
    """
    if isinstance(dtype, str) and dtype != "auto":
        named = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(named, torch.dtype):
            raise CheckpointError(f"dtype={dtype!r} is not a dtype. Use a torch.dtype, its name such as 'bfloat16', or 'auto'.")
        dtype = named
    if isinstance(dtype, torch.dtype):
        if not dtype.is_floating_point:
            raise CheckpointError(f"A model cannot be built in {dtype}: its parameters are floating. Use float32, bfloat16 or float16.")
        return dtype
    configured = _configured_dtype(config)
    if configured is not None:
        return configured
    if open_checkpoint is None:
        return torch.get_default_dtype()
    checkpoint = open_checkpoint()
    if checkpoint.format == "gguf":
        return torch.float32  # which its packed tensors stand for, whatever the others are
    floating = [entry.dtype for entry in checkpoint.entries.values() if entry.dtype.is_floating_point]
    # One-byte floats only mean something together with their scales; nothing is computed in them.
    wide = [found for found in floating if found.itemsize > 1]
    return wide[0] if wide else torch.get_default_dtype()


def _configured_dtype(config: Any) -> torch.dtype | None:
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def build_empty(config: Any, *, dtype: torch.dtype, model_class: Any = None, trust_remote_code: bool = False) -> nn.Module:
    """The model of a configuration (which is not changed), in evaluation mode; see `empty_model`."""
    initialization = transformers_module("initialization")
    with torch.device("meta"), initialization.meta_device_safe_creation_ops():
        model = _construct(config, dtype, model_class, trust_remote_code)
    try:
        uncomputed = compute_buffers(model)
    # Initialization code that reads its parameters fails on meta with an error of any type.
    except Exception:
        uncomputed = ["(the model's initialization does not run on meta)"]
    if uncomputed:
        # Code from elsewhere computes in its constructor what transformers' own classes compute in their initialization.
        with init_empty_weights(include_buffers=False):
            model = _construct(config, dtype, model_class, trust_remote_code)
        _refuse_buffers_on_meta(model)
    _keep_in_float32(model, dtype)
    return model.eval()


def _construct(config: Any, dtype: torch.dtype, model_class: Any, trust_remote_code: bool) -> nn.Module:
    config = copy.deepcopy(config)
    found = _class_for(config, model_class)
    if not (hasattr(found, "from_config") or hasattr(found, "_from_config")):
        raise CheckpointError(f"model_class={model_class!r} is not a class of models: use one of transformers, or an Auto… class.")
    try:
        if hasattr(found, "from_config"):
            model: nn.Module = found.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        else:
            model = found._from_config(config, dtype=dtype)
    except (BigModelError, ImportError):
        raise
    # A class that reads what another model's configuration does not have fails in any way, and in its own words.
    except Exception as error:
        if model_class is None:
            raise
        own = ", ".join(getattr(config, "architectures", None) or ()) or "AutoModel"
        reason = str(error).partition("\n")[0][:300]
        raise CheckpointError(
            f"model_class {found.__name__} cannot be built from the configuration, a {_described(config)}: "
            f"{type(error).__name__}: {reason}. Name a class that is made for it, or give no model_class ({own} then)."
        ) from error
    return model


def misfit(config: Any, model_class: Any) -> str:
    """A sentence for errors where `model_class` is made for another configuration than this one; some such classes work all the same."""
    if model_class is None:
        return ""
    found = _class_for(config, model_class)
    expected = getattr(found, "config_class", None)
    if not isinstance(expected, type) or isinstance(config, expected):
        return ""
    return f"model_class {found.__name__} is made for {kind_text(expected)}, but the configuration is a {_described(config)}. "


def _described(config: Any) -> str:
    return f"{type(config).__name__} (model type {getattr(config, 'model_type', None)!r})"


def _class_for(config: Any, model_class: Any) -> Any:
    """A model class, or an `Auto…` class that finds it."""
    transformers = transformers_module()
    if isinstance(model_class, str):
        found = getattr(transformers, model_class, None)
        if found is None:
            raise CheckpointError(f"model_class={model_class!r} is not a class of transformers {transformers.__version__}.")
        return found
    if model_class is not None:
        return model_class
    architectures = getattr(config, "architectures", None) or []
    auto_map = getattr(config, "auto_map", None) or {}
    for architecture in architectures:
        if architecture.startswith("Auto"):
            continue
        for auto_class, reference in auto_map.items():
            if isinstance(reference, str) and reference.rpartition(".")[2] == architecture and hasattr(transformers, auto_class):
                return getattr(transformers, auto_class)
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)
    if architectures and not auto_map:
        raise CheckpointError(
            f"The configuration names the architecture {architectures[0]!r}, which transformers {transformers.__version__} does not have. "
            "Install a newer transformers, or give model_class."
        )
    return transformers.AutoModel


def _refuse_buffers_on_meta(model: nn.Module) -> None:
    computed = get_non_persistent_buffers(model, recurse=True, fqns=True)
    empty = [name for name, buffer in model.named_buffers() if name in computed and buffer.is_meta]
    if empty:
        raise CheckpointError(
            f"{type(model).__name__} has {len(empty)} buffers that are in no checkpoint and that its code does not compute: {empty[:8]}. "
            "Build the model yourself and use bigmodel.load_checkpoint_and_dispatch."
        )


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Makes float32 what the class wants so: `_keep_in_fp32_modules` beside float16, `…_strict` beside float16 and bfloat16."""
    patterns: set[str] = set()
    if dtype == torch.float16:
        patterns |= set(model._keep_in_fp32_modules or ())
    if dtype in (torch.float16, torch.bfloat16):
        patterns |= set(model._keep_in_fp32_modules_strict or ())
    if not patterns:
        return
    kept = re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in sorted(patterns)))
    not_saved = get_non_persistent_buffers(model, recurse=True, fqns=True)
    tied = getattr(model, "all_tied_weights_keys", {})
    for names in tensor_aliases(model, include_buffers=True).values():
        # Of tied tensors, the name that the others are tied to decides.
        name = next((name for name in names if name not in tied), names[0])
        owner_name, _, attribute = name.rpartition(".")
        tensor = getattr(model.get_submodule(owner_name), attribute)
        if name in not_saved or not tensor.is_floating_point() or not kept.search(name):
            continue
        wide = tensor.detach().to(torch.float32)
        if isinstance(tensor, nn.Parameter):
            wide = nn.Parameter(wide, requires_grad=tensor.requires_grad)
        for alias in names:
            set_tensor(model, alias, wide)
