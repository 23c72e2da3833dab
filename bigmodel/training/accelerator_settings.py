"""What `Accelerator` is told, put in order: handlers by kind, plugins, and choices that exclude each other."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

from ..errors import TrainingError, WrongTypeError
from ..settings import environment_flag, read_variable
from ..text import kind_text
from .configuration import DataLoaderConfiguration, GradientAccumulationPlugin, TorchDynamoPlugin, checked_steps
from .enums import DynamoBackend, PrecisionType
from .float8 import refuse_without_torchao
from .handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)

__all__ = ["Handlers", "accumulation_plugin", "checked_precision", "compile_plugin", "loader_configuration", "spreading_plugins"]

PLUGINS: Final = {
    "deepspeed_plugin": ("USE_DEEPSPEED", "plugins.deepspeed", "DeepSpeedPlugin"),
    "fsdp_plugin": ("USE_FSDP", "plugins.fsdp", "FullyShardedDataParallelPlugin"),
    "megatron_lm_plugin": ("USE_MEGATRON_LM", "plugins.megatron", "MegatronLMPlugin"),
}
"""The variable that asks for the plugin without an argument, the module relative to this room, and the class."""


class Handlers:
    """The handlers given to an `Accelerator`, at most one of each kind. Raises `TrainingError` for others, and for two of one kind."""

    def __init__(self, given: Sequence[KwargsHandler] | None):
        kinds = (AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs)
        self._found: dict[type, Any] = {}
        for handler in given or ():
            kind = next((kind for kind in kinds if isinstance(handler, kind)), None)
            if kind is None:
                raise TrainingError(
                    f"kwargs_handlers holds {kind_text(handler)}, which nothing here uses; "
                    f"it may hold one each of {', '.join(kind.__name__ for kind in kinds)}."
                )
            if kind in self._found:
                raise TrainingError(f"kwargs_handlers holds two {kind.__name__}; give one.")
            self._found[kind] = handler

    def get(self, kind: type) -> Any:
        """The handler of that kind, or None."""
        return self._found.get(kind)


def checked_precision(mixed_precision: PrecisionType | str | None) -> str | None:
    """The precision as a word. Raises `MissingPackageError` for one whose library is not installed."""
    word = mixed_precision or read_variable("MIXED_PRECISION")
    if word is not None and str(word).lower() == PrecisionType.FP8:
        refuse_without_torchao()
    return None if mixed_precision is None else str(mixed_precision)


def accumulation_plugin(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """The settings of accumulation. Raises `TrainingError` where both are given, or fewer than one step."""
    if plugin is not None and steps != 1:
        raise TrainingError(f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin are both given; give one.")
    return plugin or GradientAccumulationPlugin(num_steps=None if steps == 1 else checked_steps("gradient_accumulation_steps", steps))


def loader_configuration(config: DataLoaderConfiguration | None, split_batches: bool | None) -> DataLoaderConfiguration:
    """How loaders are prepared. Raises `TrainingError` where both say something about `split_batches` and differ."""
    if config is None:
        return DataLoaderConfiguration(split_batches=bool(split_batches))
    if split_batches is not None and split_batches != config.split_batches:
        raise TrainingError(f"split_batches={split_batches}, but dataloader_config says {config.split_batches}; set it there.")
    return config


def compile_plugin(backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None, settled: bool) -> TorchDynamoPlugin | None:
    """How models are compiled; None where it is `settled` already and nothing is said now. Raises `TrainingError` where both are given."""
    if backend is not None and plugin is not None:
        raise TrainingError("dynamo_backend and dynamo_plugin are both given; give one.")
    if backend is not None:
        return TorchDynamoPlugin(backend=DynamoBackend(str(backend).upper()) if str(backend).upper() in DynamoBackend else backend)  # type: ignore[arg-type]
    return plugin if plugin is not None or settled else TorchDynamoPlugin()


def spreading_plugins(settled: bool, **given: Any) -> dict[str, Any]:
    """The plugins by their arguments' names; those not given, where the environment asks for them and nothing is `settled` yet.

    Raises `TrainingError` for an argument that is no such plugin.
    """
    found: dict[str, Any] = {}
    for argument, (variable, module, name) in PLUGINS.items():
        plugin = given[argument]
        if plugin is None and (settled or not environment_flag(variable)):
            continue
        kind = _plugin_class(argument, module, name)
        by_name = isinstance(plugin, dict) and bool(plugin) and argument == "deepspeed_plugin"
        each = list(plugin.values()) if by_name else [plugin]
        strangers = sorted({kind_text(one) for one in each if plugin is not None and not isinstance(one, kind)})
        if strangers:
            raise WrongTypeError(f"{argument} takes {kind_text(kind)}, not {', '.join(strangers)}.")
        found[argument] = kind() if plugin is None else plugin
    if len(found) > 1:
        raise TrainingError(f"{' and '.join(found)} cannot spread one model together; give one.")
    return found


def _plugin_class(argument: str, module: str, name: str) -> type:
    try:
        return getattr(importlib.import_module(f".{module}", __package__), name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(str(__package__)):
            raise
        raise TrainingError(f"{argument}: this version of bigmodel has no {name}.") from error
