"""The package megatron-core, told what a `MegatronLMPlugin` says: groups of processes, and the configuration of a model."""

from __future__ import annotations

import importlib
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from ...devices import accelerator_type
from ...errors import MissingPackageError, TrainingError

if TYPE_CHECKING:
    from .megatron import MegatronLMPlugin

__all__ = ["require_megatron_core", "start_model_parallel", "transformer_config"]

GROUPS: Final = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Arguments of Megatron-LM that say how many processes share something."""

HINTS: Final = "Training with Megatron-LM needs the package megatron-core (%s): pip install 'bigmodel[megatron]'."


def require_megatron_core() -> None:
    """Raises `MissingPackageError` where megatron-core cannot be imported."""
    try:
        importlib.import_module("megatron.core")
    except ImportError as error:
        raise MissingPackageError(HINTS % error) from error


def start_model_parallel(plugin: MegatronLMPlugin) -> None:
    """Divides the processes of the default group into Megatron-LM's groups; see `MegatronLMPlugin.initialize_model_parallel`."""
    require_megatron_core()
    from megatron.core import parallel_state

    if not dist.is_initialized():
        raise TrainingError("Megatron-LM divides a process group: make the Accelerator or PartialState first, in a script under torchrun.")
    sizes = {name: int(plugin.megatron_lm_default_args[name]) for name in GROUPS}
    shared = sizes["tensor_model_parallel_size"] * sizes["pipeline_model_parallel_size"] * sizes["context_parallel_size"]
    if dist.get_world_size() % shared:
        raise TrainingError(
            f"{dist.get_world_size()} processes are no multiple of {shared}, those that one copy of the model takes: tp_degree "
            f"{plugin.tp_degree} x pp_degree {plugin.pp_degree} x context_parallel_size {plugin.context_parallel_size}."
        )
    if parallel_state.model_parallel_is_initialized():
        there = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
        )
        if there != (plugin.tp_degree, plugin.pp_degree, plugin.context_parallel_size):
            raise TrainingError(
                f"This process is in groups of megatron-core already, with degrees {there} (tensors, pipelines, contexts), and the plugin "
                "wants others: call megatron.core.parallel_state.destroy_model_parallel() first."
            )
        return
    parallel_state.initialize_model_parallel(**sizes)


def transformer_config(plugin: MegatronLMPlugin, sizes: dict[str, Any]) -> Any:
    """The `TransformerConfig` of arguments and sizes; see `MegatronLMPlugin.transformer_config`."""
    require_megatron_core()
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = {field.name for field in fields(TransformerConfig)}
    unknown = sorted(set(sizes) - known)
    if unknown:
        raise TrainingError(f"megatron-core's TransformerConfig has no {', '.join(unknown)}.")
    arguments = {name: value for name, value in plugin.megatron_lm_default_args.items() if name in known}
    arguments.pop("attention_backend", None)  # kernels by name there; without one Megatron-LM chooses
    if plugin.decoder_last_pipeline_num_layers is not None:
        arguments["num_layers_in_last_pipeline_stage"] = plugin.decoder_last_pipeline_num_layers
    if not plugin.recompute_activations:  # the fields name what is computed again once something is
        for name in ("recompute_granularity", "recompute_method", "recompute_num_layers"):
            arguments.pop(name, None)
    elif arguments.get("recompute_granularity") == "selective":
        for name in ("recompute_method", "recompute_num_layers"):
            arguments.pop(name, None)
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}
    dtype = next((half[word] for word in half if arguments.get(word)), torch.float32)
    usual = {"params_dtype": dtype, "pipeline_dtype": dtype, "use_cpu_initialization": accelerator_type() is None}
    return TransformerConfig(**{**usual, **{name: value for name, value in arguments.items() if value is not None}, **sizes})
